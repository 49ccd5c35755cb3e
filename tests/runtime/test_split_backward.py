"""A backward in several passes: a pass computes what it takes. A later one takes what an earlier one kept, if it has
the same gradients of the outputs."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.ops import operands
from tests.support.linear_oracle import assert_same

ROWS, WIDTH = 32, 32


@pytest.fixture
def products(monkeypatch):
    """A list with an entry for each GEMM that ran."""
    ran, product = [], operands.product

    def watched(*arguments):
        ran.append(1)
        return product(*arguments)

    monkeypatch.setattr(operands, "product", watched)
    return ran


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        return operator(*arguments, **(keywords or {}))


def call(recipe="fp8-delayed", **settings):
    torch.manual_seed(0)
    layer = octavo.Linear(WIDTH, WIDTH, recipe=recipe, **settings)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    return layer, x, layer(x), torch.randn(ROWS, WIDTH)


def whole(recipe, dy, **settings):
    layer, x, y, _ = call(recipe, **settings)
    y.backward(dy)
    return x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("order", [("x", "weight", "bias"), ("x", "bias", "weight"), ("bias", "x", "weight")])
def test_any_order_of_passes_gives_the_gradients_of_one(order):
    layer, x, y, dy = call()
    tensors = {"x": x, "weight": layer.weight, "bias": layer.bias}
    found = {name: torch.autograd.grad(y, tensors[name], dy, retain_graph=True)[0] for name in order}
    for name, one in zip(tensors, whole("fp8-delayed", dy), strict=True):
        assert_same(found[name], one, name)


def test_another_dy_is_not_served_with_what_was_kept():
    layer, x, y, dy = call()
    other = torch.randn(ROWS, WIDTH)
    torch.autograd.grad(y, x, dy, retain_graph=True)
    (dw,) = torch.autograd.grad(y, layer.weight, other)
    assert_same(dw, whole("fp8-delayed", other)[1], "dw")


def test_a_dy_that_was_written_to_is_another_one():
    layer, x, y, dy = call()
    torch.autograd.grad(y, x, dy, retain_graph=True)
    dy.mul_(2)
    (dw,) = torch.autograd.grad(y, layer.weight, dy)
    assert_same(dw, whole("fp8-delayed", dy)[1], "dw")


def test_a_pass_that_frees_the_graph_computes_dx_alone_and_keeps_nothing(products):
    _, x, y, dy = call()
    products.clear()
    torch.autograd.grad(y, x, dy)
    assert len(products) == 1 and y.grad_fn.kept_gradients is None


def test_what_was_taken_is_dropped(products):
    layer, x, y, dy = call()
    torch.autograd.grad(y, x, dy, retain_graph=True)
    kept = y.grad_fn.kept_gradients
    assert kept.deferred and kept.gradients
    products.clear()
    torch.autograd.grad(y, (layer.weight, layer.bias), dy, retain_graph=True)
    assert len(products) == 1 and not kept.deferred and not kept.gradients
    y.backward(dy)  # all of it, anew
    assert_same(layer.weight.grad, whole("fp8-delayed", dy)[1], "dw")


def test_an_operand_that_was_written_to_is_refused():
    layer, x, y, dy = call('fp8-current(wgrad="bf16")')
    torch.autograd.grad(y, x, dy, retain_graph=True)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(octavo.errors.ModifiedInPlace, match="operand of dw"):
        torch.autograd.grad(y, layer.weight, dy)


@pytest.mark.parametrize("flagged", [False, True])
def test_main_grad_is_added_to_once(flagged):
    layer, x, _, dy = call(fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    if flagged:
        layer.weight.grad_added_to_main_grad = False
    y = layer(x)
    torch.autograd.grad(y, x, dy, retain_graph=True)
    rest = (layer.weight, layer.bias) if flagged else (layer.bias,)
    torch.autograd.grad(y, rest, dy)
    assert_same(layer.weight.main_grad, whole("fp8-delayed", dy)[1], "main_grad")


def test_the_counter_of_rounding_advances_once_where_a_mode_watches_operators():
    model = nn.Sequential(octavo.Linear(WIDTH, WIDTH, recipe="nvfp4"))
    x, dy = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    with Watching():
        y = model(x)
        torch.autograd.grad(y, x, dy, retain_graph=True)
        torch.autograd.grad(y, list(model.parameters()), dy)
    assert octavo.state_dict(model)["0.rounding.seed"][1] == 1
