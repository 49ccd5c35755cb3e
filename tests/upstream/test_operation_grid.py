"""Basic operations over shapes and dtypes, alone and between casts of every recipe."""

import pytest
import torch
import torch.nn.functional as F

from octavo import ops
from octavo.kernels.activation import ACTIVATIONS
from tests.support.activation_formulas import FORMULAS, applied
from tests.support.pairs import pairs
from tests.support.steps import compiled
from tests.support.upstream_data import DATA, DTYPES, RECIPES, assert_near, numbers

pytestmark = pytest.mark.usefixtures("fresh_compiler")
KINDS = {
    kind.NAME: kind for kind in vars(ops).values()
    if isinstance(kind, type) and kind.__dict__.get("NAME") in FORMULAS and kind.__dict__["NAME"] != "linear"
}  # fmt: skip
LEADS = {"flat": (), "6x16": (6, 16), "none": (0,)}


def layer_norm(x, w, b, shape, eps):
    return F.layer_norm(x, shape, w, b, eps)


def rms_norm(x, w, b, shape, eps):
    dims = tuple(range(-len(shape), 0))
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps) * w


NORMS = {"LayerNorm": (ops.LayerNorm, layer_norm), "RMSNorm": (ops.RMSNorm, rms_norm)}


def with_gradients(call, x, dy):
    leaf = x.detach().clone().requires_grad_()
    y = call(leaf)
    y.backward(dy.to(y.dtype))
    return y.detach(), leaf.grad


@pairs(
    norm=NORMS, shape={"7x2": (7, 2), "32": (32,), "19": (19,), "64": (64,)}, lead=LEADS, dtype=DTYPES, data=DATA,
    zero_centered=(True, False), eps=(0.3, 1e-5), mode=("eager", "compiled"),
)  # fmt: skip
def test_norms(norm, shape, lead, dtype, data, zero_centered, eps, mode):
    kind, formula = norm
    op = kind(shape if len(shape) > 1 else shape[0], eps=eps, zero_centered_gamma=zero_centered, dtype=dtype)
    x, dy = (numbers(*lead, *shape, data=data, dtype=dtype, seed=i) for i in (1, 2))
    with torch.no_grad():
        for p in op.parameters():
            p.copy_(numbers(*p.shape, dtype=dtype, seed=5))
    y, dx = with_gradients(compiled(op) if mode == "compiled" else op, x, dy)
    w, b = ([p.detach().double() for p in op.parameters()] + [None])[:2]
    w = w + 1 if zero_centered else w
    want, want_dx = with_gradients(lambda x: formula(x, w, b, shape, eps), x.double(), dy.double())
    bound = {"data": "positive"}  # the reference is exact but for one rounding of each result
    assert_near(y, want, what="y", **bound)
    assert_near(dx, want_dx, what="dx", **bound)


@pairs(shape={"32": (32,), "6x16x64": (6, 16, 64), "32x64": (32, 64)}, dtype=DTYPES, data=DATA)
def test_l2_normalization(shape, dtype, data):
    op = ops.L2Normalization()
    x, dy = (numbers(*shape, data=data, dtype=dtype, seed=i) for i in (1, 2))
    y, dx = with_gradients(op, x, dy)
    norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True).clamp_min(op.eps))  # noqa: E731
    want, want_dx = with_gradients(norm, x.double(), dy.double())
    assert_near(y, want, what="y"), assert_near(dx, want_dx, what="dx")


@pairs(
    kind=KINDS, shape={"37": (37,), "2x13": (2, 13), "32x1x32": (32, 1, 32)}, recipe=RECIPES,
    cache=(False, True), mode=("eager", "compiled"),
)  # fmt: skip
def test_activations(kind, shape, recipe, cache, mode):
    """As upstream: x arrives as values of codes; what is kept as codes has the tolerance of FP8."""
    op = kind(cache_quantized_input=cache)
    gated = ACTIVATIONS[kind.NAME].gated
    x = numbers(*shape[:-1], shape[-1] * (2 if gated else 1), recipe=recipe, seed=1) - 0.5
    dy = numbers(*shape, recipe=recipe, seed=2, operand="dy")
    y, dx = with_gradients(compiled(op) if mode == "compiled" else op, x, dy)
    want, want_dx = with_gradients(lambda x: applied(FORMULAS[kind.NAME], gated, x), x.double(), dy.double())
    assert_near(y, want, what="y")
    assert_near(dx, want_dx, recipe="fp8-current" if cache else "bf16", what="dx")


@pairs(size=(1, 7, 32), lead={"none": (), "1x3": (1, 3), "4x3x8": (4, 3, 8)}, dtype=DTYPES, data=DATA)
def test_bias(size, lead, dtype, data):
    op = ops.Bias(size, dtype=dtype)
    x, dy = (numbers(*lead, size, data=data, dtype=dtype, seed=i) for i in (1, 2))
    with torch.no_grad():
        op.bias.copy_(numbers(size, data=data, dtype=dtype, seed=3))
    y, dx = with_gradients(op, x, dy)
    assert_near(y, x.double() + op.bias.detach().double(), what="y")
    assert_near(dx, dy.double(), what="dx")
    assert_near(op.bias.grad, dy.double().reshape(-1, size).sum(0), what="db")


@pairs(scale=(1.0, 0.0, -2.5, 3.5), shape={"number": (), "1x13": (1, 13), "4x4x2": (4, 4, 2)}, dtype=DTYPES)
def test_constant_scale(scale, shape, dtype):
    x, dy = (numbers(*shape, data="positive", dtype=dtype, seed=i) for i in (1, 2))
    y, dx = with_gradients(ops.ConstantScale(scale), x, dy)
    assert_near(y, x.double() * scale, what="y"), assert_near(dx, dy.double() * scale, what="dx")


@pairs(
    shape={"30": ((30,), (2, 3, -1)), "1x2x3x4": ((1, 2, 3, 4), (2, 12)), "5x4x3x2": ((5, 4, 3, 2), (-1, 6)),
           "6x7": ((6, 7), (3, -1, 7))},
    dtype=DTYPES,
)  # fmt: skip
def test_reshape(shape, dtype):
    before, after = shape
    x = numbers(*before, dtype=dtype, seed=1)
    y, dx = with_gradients(ops.Reshape(after), x, torch.ones(x.reshape(after).shape))
    assert torch.equal(y, x.reshape(after)) and torch.equal(dx, torch.ones_like(x))
