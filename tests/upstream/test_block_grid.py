"""LayerNormLinear and LayerNormMLP over recipes, activations, norms and the modes of backward, against float64."""

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo.kernels.activation import ACTIVATIONS
from tests.support.activation_formulas import FORMULAS, applied
from tests.support.linear_oracle import randn
from tests.support.pairs import pairs
from tests.support.steps import compiled, relative_error
from tests.support.upstream_data import RECIPES, normed

pytestmark = pytest.mark.usefixtures("fresh_compiler")
HIDDEN, FFN, OUT, EPS = 64, 96, 48, 1e-5
BACKWARD = ("quantized", "high_precision", "dequantized")
NAMES = tuple(name for name in FORMULAS if name != "linear")
BOUNDS = {"bf16": 1e-4, "nvfp4": 0.6}  # of errors in the Frobenius norm; 0.35 in FP8


def drawn(block):
    with torch.no_grad():
        for i, p in enumerate(block.parameters()):
            p.copy_(randn(*p.shape, seed=30 + i) * (0.2 if p.dim() > 1 else 0.5))
    return block


def assert_block(block, formula, recipe, mode, width):
    """y and all gradients beside those of a formula of the block's parameters in float64."""
    x, dy = randn(24, HIDDEN, seed=1), randn(24, width, seed=2)
    leaves = [x.clone().requires_grad_(), x.double().requires_grad_()]
    exact = {name: p.detach().double().requires_grad_() for name, p in block.named_parameters()}
    y = (compiled(block) if mode == "compiled" else block)(leaves[0])
    want = formula(leaves[1], exact)
    y.backward(dy), want.backward(dy.double())
    bound = BOUNDS.get(recipe, 0.35)
    found = [("y", y.detach(), want.detach()), ("dx", leaves[0].grad, leaves[1].grad)]
    found += [(name, p.grad, exact[name].grad) for name, p in block.named_parameters()]
    for name, a, b in found:
        assert relative_error(a, b) <= bound, f"{name}: {relative_error(a, b):.3g} of {bound}"


def named(recipe, backward):
    return recipe if recipe == "bf16" or backward == "quantized" else f"{recipe}(backward={backward!r})"


@pairs(
    recipe=RECIPES, backward=BACKWARD, norm=("LayerNorm", "RMSNorm"), zero_centered=(False, True), bias=(True, False),
    mode=("eager", "compiled"),
)  # fmt: skip
def test_a_norm_and_a_linear(recipe, backward, norm, zero_centered, bias, mode):
    settings = {"normalization": norm, "zero_centered_gamma": zero_centered, "bias": bias, "eps": EPS}
    block = drawn(octavo.LayerNormLinear(HIDDEN, OUT, recipe=named(recipe, backward), **settings))

    def formula(x, p):
        n = normed(x, norm, p["norm.weight"], p.get("norm.bias"), zero_centered, EPS)
        return F.linear(n, p["linear.weight"], p.get("linear.bias"))

    assert_block(block, formula, recipe, mode, OUT)


@pairs(
    recipe=RECIPES, activation=NAMES, backward=BACKWARD, norm=("LayerNorm", "RMSNorm"), zero_centered=(False, True),
    bias=(True, False), recompute=(False, True), mode=("eager", "compiled"),
)  # fmt: skip
def test_an_mlp(recipe, activation, backward, norm, zero_centered, bias, recompute, mode):
    settings = {"normalization": norm, "zero_centered_gamma": zero_centered, "bias": bias, "eps": EPS}
    settings |= {"activation": activation, "activation_recompute": recompute}
    block = drawn(octavo.LayerNormMLP(HIDDEN, FFN, recipe=named(recipe, backward), **settings))
    gated = ACTIVATIONS[activation].gated

    def formula(x, p):
        n = normed(x, norm, p["norm.weight"], p.get("norm.bias"), zero_centered, EPS)
        h = applied(FORMULAS[activation], gated, F.linear(n, p["fc1.weight"], p.get("fc1.bias")))
        return F.linear(h, p["fc2.weight"], p.get("fc2.bias"))

    assert_block(block, formula, recipe, mode, HIDDEN)
