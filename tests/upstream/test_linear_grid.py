"""Linear over shapes, recipes, dtypes and the places of its gradient."""

import math

import pytest
import torch

import octavo
from tests.support.pairs import pairs
from tests.support.steps import compiled
from tests.support.upstream_data import DATA, DTYPES, RECIPES, assert_near, numbers

pytestmark = pytest.mark.usefixtures("fresh_compiler")
LEADS = {"one row": (), "5x1": (5, 1), "4x2x4": (4, 2, 4), "128": (128,), "no row": (0,)}
WEIGHTS = {"64x32": (64, 32), "3x5": (3, 5), "128x128": (128, 128)}
MAIN_GRAD = ("none", "add", "overwrite", "add, not fused")
FILL = 0.5


def made(weight, recipe, dtype, bias, data, main_grad="none"):
    n, k = weight
    layer = octavo.Linear(
        k, n, bias, dtype=dtype, recipe=recipe, fuse_wgrad_accumulation=main_grad in ("add", "overwrite")
    )
    with torch.no_grad():
        layer.weight.copy_(numbers(n, k, data=data, recipe=recipe, dtype=dtype, seed=1, operand="w"))
        if bias:
            layer.bias.copy_(numbers(n, data=data, dtype=dtype, seed=2))
    if main_grad != "none":
        layer.weight.main_grad = torch.full((n, k), FILL)
        layer.weight.overwrite_main_grad = main_grad == "overwrite"
    return layer


def exact(layer, x, dy):
    """y, dx, dw and db in float64."""
    w = layer.weight.detach().double()
    y = x.double() @ w.T + (0 if layer.bias is None else layer.bias.detach().double())
    rows, dys = x.double().reshape(-1, x.shape[-1]), dy.double().reshape(-1, dy.shape[-1])
    return y, dy.double() @ w, dys.T @ rows, dys.sum(0)


def assert_step(layer, call, x, dy, main_grad, **bound):
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.backward(dy)
    want = exact(layer, x, dy)
    assert_near(y.detach(), want[0], what="y", **bound)
    assert_near(leaf.grad, want[1], what="dx", **bound)
    if main_grad in ("add", "overwrite"):
        assert layer.weight.grad is None
        dw = layer.weight.main_grad - (FILL if main_grad == "add" else 0.0)
    else:
        dw = layer.weight.grad
        assert main_grad == "none" or (layer.weight.main_grad == FILL).all()
    assert_near(dw, want[2], what="dw", **bound)
    if layer.bias is not None:
        assert_near(layer.bias.grad, want[3], what="db", **bound)


@pairs(
    recipe=RECIPES, weight=WEIGHTS, lead=LEADS, main_grad=MAIN_GRAD, data=DATA, bias=(True, False),
    mode=("eager", "compiled"),
)  # fmt: skip
def test_the_grid(recipe, weight, lead, main_grad, data, bias, mode):
    n, k = weight
    if math.prod(lead) * min(weight) < 20:
        data = "positive"  # a bound for the whole tensor says nothing about few numbers
    layer = made(weight, recipe, torch.float32, bias, data, main_grad)
    x = numbers(*lead, k, data=data, recipe=recipe, seed=3)
    dy = numbers(*lead, n, data=data, recipe=recipe, seed=4, operand="dy")
    assert_step(layer, compiled(layer) if mode == "compiled" else layer, x, dy, main_grad, recipe=recipe, data=data)


@pairs(recipe=RECIPES, dtype=DTYPES, weight=WEIGHTS, x_grad=(True, False), w_grad=(True, False))
def test_dtypes_and_what_wants_a_gradient(recipe, dtype, weight, x_grad, w_grad):
    n, k = weight
    layer = made(weight, recipe, dtype, True, "positive")
    layer.weight.requires_grad_(w_grad)
    x = numbers(16, k, recipe=recipe, dtype=dtype, seed=3).requires_grad_(x_grad)
    dy = numbers(16, n, recipe=recipe, dtype=dtype, seed=4, operand="dy")
    y = layer(x)
    assert y.dtype == dtype
    y.backward(dy)
    want = exact(layer, x.detach(), dy)
    bound = {"recipe": recipe}
    assert_near(y.detach(), want[0], **bound)
    assert (x.grad is None) == (not x_grad) and (layer.weight.grad is None) == (not w_grad)
    if x_grad:
        assert_near(x.grad, want[1], what="dx", **bound)
    if w_grad:
        assert_near(layer.weight.grad, want[2], what="dw", **bound)
