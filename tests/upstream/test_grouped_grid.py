"""GroupedLinear over splits, layouts of parameters, recipes and what wants a gradient."""

import pytest
import torch

import octavo
from tests.support.pairs import pairs
from tests.support.steps import compiled
from tests.support.upstream_data import DATA, DTYPES, RECIPES, assert_near, numbers

pytestmark = pytest.mark.usefixtures("fresh_compiler")
SPLITS = {
    "of 128, one empty": (256, 0, 128, 64), "64 96 80": (64, 96, 80), "15 1 0 101": (15, 1, 0, 101), "one": (33,),
    "all empty": (0, 0, 0),
}  # fmt: skip
N, K, SPARE = 48, 32, 5


def made(splits, recipe, dtype, bias, data, **settings):
    layer = octavo.GroupedLinear(len(splits), K, N, bias, recipe=recipe, dtype=dtype, **settings)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            operand = {"operand": "w", "recipe": recipe} if p.dim() > 1 and p.shape[-1] == K else {}
            matrix = p.view(-1, p.shape[-1])
            matrix.copy_(numbers(*matrix.shape, data=data, dtype=dtype, seed=7 + i, **operand))
    return layer


def whole(layer, name):
    parts = [p for key, p in layer.named_parameters() if key.startswith(name)]
    return parts[0] if len(parts) == 1 and parts[0].shape[0] == layer.num_groups else torch.stack(parts)


def gradient(layer, name):
    parts = [p.grad for key, p in layer.named_parameters() if key.startswith(name)]
    return parts[0] if len(parts) == 1 and parts[0].shape[0] == layer.num_groups else torch.stack(parts)


@pairs(
    recipe=RECIPES, splits=SPLITS, single_weight=(True, False), single_bias=(True, False), bias=(True, False),
    deferred=(False, True), data=DATA, mode=("eager", "compiled"),
)  # fmt: skip
def test_the_grid(recipe, splits, single_weight, single_bias, bias, deferred, data, mode):
    layer = made(
        splits, recipe, torch.float32, bias, data, single_grouped_weight=single_weight,
        single_grouped_bias=single_bias, delay_wgrad_compute=deferred,
    )  # fmt: skip
    rows = sum(splits) + SPARE
    x = numbers(rows, K, data=data, recipe=recipe, seed=1).requires_grad_()
    dy = numbers(rows, N, data=data, recipe=recipe, seed=2, operand="dy")
    y = (compiled(layer) if mode == "compiled" else layer)(x, torch.tensor(splits))
    y.backward(dy)
    if deferred:
        layer.backward_dw()
    w, at = whole(layer, "weight").detach().double(), 0
    dw, bound = gradient(layer, "weight"), {"recipe": recipe, "data": data}
    for i, size in enumerate(splits):
        own = slice(at, at + size)
        x64, dy64 = x.detach()[own].double(), dy[own].double()
        b = whole(layer, "bias").detach()[i].double() if bias else 0.0
        if size > 1:
            assert_near(y.detach()[own], x64 @ w[i].T + b, what=f"y of {i}", **bound)
            assert_near(x.grad[own], dy64 @ w[i], what=f"dx of {i}", **bound)
            assert_near(dw[i], dy64.T @ x64, what=f"dw of {i}", **bound)
        if bias:
            assert_near(gradient(layer, "bias")[i], dy64.sum(0), what=f"db of {i}", data="positive")
        if not size:
            assert not dw[i].any()
        at += size
    assert not y.detach()[at:].any() and not x.grad[at:].any()


@pairs(recipe=RECIPES, dtype=DTYPES, x_grad=(True, False), w_grad=(True, False), integers=(torch.int32, torch.int64))
def test_dtypes_and_what_wants_a_gradient(recipe, dtype, x_grad, w_grad, integers):
    splits = (15, 0, 18)
    layer = made(splits, recipe, dtype, True, "positive")
    layer.weight.requires_grad_(w_grad)
    x = numbers(33, K, recipe=recipe, dtype=dtype, seed=1).requires_grad_(x_grad)
    dy = numbers(33, N, recipe=recipe, dtype=dtype, seed=2, operand="dy")
    y = layer(x, torch.tensor(splits, dtype=integers))
    y.backward(dy)
    assert y.dtype == dtype and (x.grad is None) == (not x_grad) and (layer.weight.grad is None) == (not w_grad)
    w, rows = layer.weight.detach().double(), slice(15, 33)
    assert_near(y.detach()[rows], x.detach()[rows].double() @ w[2].T + layer.bias.detach()[2].double(), recipe=recipe)
    if x_grad:
        assert_near(x.grad[rows], dy[rows].double() @ w[2], recipe=recipe)
    if w_grad:
        assert_near(layer.weight.grad[2], dy[rows].double().T @ x.detach()[rows].double(), recipe=recipe)
