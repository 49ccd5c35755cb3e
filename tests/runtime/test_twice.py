"""A gradient that is to be differentiated again: refused whichever way the second differentiation comes back, and not
refused where nobody asks for one."""

from functools import partial

import pytest
import torch

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig

K = 16
MODULES = {
    "linear": lambda: octavo.Linear(K, K),
    "linear in codes": lambda: octavo.Linear(K, K, recipe="fp8-current"),
    "frozen": lambda: octavo.Linear(K, K, recipe="fp8-current").requires_grad_(False),
    "mlp": lambda: octavo.LayerNormMLP(K, K, recipe="fp8-current"),
    "activation": ops.GELU,
    "norm": lambda: ops.RMSNorm(K),
}
every = pytest.mark.parametrize("name", MODULES)
LOSSES = {"dy is a constant": torch.sum, "dy depends on y": lambda y: y.square().sum()}


def penalised(module, x, loss):
    """A loss with a gradient in it, as a gradient penalty has."""
    y = module(x)
    (dx,) = torch.autograd.grad(loss(y), x, create_graph=True)
    return y.mean() + (dx.norm() - 1) ** 2


@every
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", ["backward", "grad", "grad of something before"])
def test_a_loss_with_a_gradient_in_it_is_refused(name, loss, way):
    leaf = torch.randn(4, K, requires_grad=True)
    x = leaf * 1 if way == "grad of something before" else leaf
    whole = penalised(MODULES[name](), x, LOSSES[loss])
    if way == "grad of something before" and loss == "dy is a constant" and name in ("linear in codes", "frozen"):
        torch.autograd.grad(whole, leaf)  # dx = dy · w: x has no part in it
        return
    again = whole.backward if way == "backward" else partial(torch.autograd.grad, whole, leaf)
    with pytest.raises(UnsupportedConfig, match=r"differentiated once.*octavo\.revert"):
        again()


@every
def test_gradients_are_the_same_where_a_graph_of_them_is_made(name):
    module, x, dy = MODULES[name](), torch.randn(4, K, requires_grad=True), torch.randn(4, K)
    wanted = [x, *[p for p in module.parameters() if p.requires_grad]]
    usual = torch.autograd.grad(module(x), wanted, dy)
    for given in (dy, dy.clone().requires_grad_()):
        for found, want in zip(torch.autograd.grad(module(x), wanted, given, create_graph=True), usual, strict=True):
            assert torch.equal(found, want) and found.stride() == want.stride()


def test_weight_gradients_are_refused_too():
    module, x = octavo.Linear(K, K, recipe="fp8-block"), torch.randn(4, K)
    (dw,) = torch.autograd.grad(module(x).sum(), module.weight, create_graph=True)
    with pytest.raises(UnsupportedConfig, match="differentiated once"):
        dw.square().sum().backward()
