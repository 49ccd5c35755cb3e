"""Elementwise kernels against formulas written a second time, differentiated by torch in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from octavo import backend
from octavo.errors import UnsupportedConfig
from octavo.kernels import activation
from octavo.kernels.activation import ACTIVATIONS, Wanted, reference
from octavo.ops.activation_layer import layer
from tests.support.activation_formulas import (
    DTYPES,
    FORMULAS,
    applied,
    assert_rounded_once,
    at_most,
    clamped_swiglu,
    data,
    dtypes,
    seed_of,
    sizes,
    taken_apart,
)
from tests.support.contract_checks import wants
from tests.support.pairs import pairs

every = pytest.mark.parametrize("name", ACTIVATIONS)


def test_every_activation_has_a_formula_and_both_twins():
    triton = pytest.importorskip("octavo.kernels.activation.triton")
    assert FORMULAS.keys() == ACTIVATIONS.keys()
    named = {name for fn in ACTIVATIONS.values() for name in (fn.curve, fn.gate)}
    assert named == reference.CURVES.keys() == triton.CURVES.keys()


@every
@dtypes
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_values_and_gradients_are_rounded_once(name, dtype, scaled):
    fn = ACTIVATIONS[name]
    m, h = 13, 37
    x, dy = data(m, h * sizes(fn), dtype=dtype), data(m, h, dtype=dtype, seed=1)
    scales = torch.rand(m, generator=torch.Generator().manual_seed(2)) if scaled else None
    leaf = x.double().requires_grad_()
    factors = torch.ones(m, 1, dtype=torch.float64) if scales is None else scales.double()[:, None]
    factors.requires_grad_()
    y = applied(FORMULAS[name], fn.gated, leaf) * factors
    dx, ds = torch.autograd.grad(y, (leaf, factors), dy.double())
    assert_rounded_once(activation.forward(fn, x, scales), y.detach(), "y")
    found = activation.backward(fn, dy, x, scales, wanted=Wanted(scales=torch.float32 if scaled else None))
    assert_rounded_once(found.x, dx, "dx")
    if scaled:
        assert_rounded_once(found.scales, ds[:, 0], "dscales")
        alone = activation.backward(fn, dy, x, scales, wanted=Wanted(False, torch.float32))
        assert alone.x is None
        assert torch.equal(alone.scales, found.scales)


@pytest.mark.parametrize("name", ["swiglu", "clamped-swiglu", "situglu"])
@pytest.mark.parametrize("interleave", [1, 3, 32])
def test_interleaved_is_the_same_on_other_columns(name, interleave):
    fn = ACTIVATIONS[name]
    x, dy = data(7, 192), data(7, 96, seed=1)
    apart = torch.cat(taken_apart(x, interleave), 1)
    woven = fn._replace(interleave=interleave)
    assert torch.equal(activation.forward(woven, x), activation.forward(fn, apart))
    dx = activation.backward(woven, dy, x).x
    assert torch.equal(torch.cat(taken_apart(dx, interleave), 1), activation.backward(fn, dy, apart).x)


@pytest.mark.parametrize("limit", [0.75, 7.0])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_clamps_stop_gradients(limit, offset):
    fn = ACTIVATIONS["clamped-swiglu"]._replace(limit=limit, offset=offset, alpha=1.5)
    x, dy = data(9, 64), data(9, 32, seed=1)
    x[0, 0] = x[0, 32] = limit  # at the limit itself they pass
    leaf = x.double().requires_grad_()
    y = clamped_swiglu(*taken_apart(leaf), limit, 1.5, offset)
    (dx,) = torch.autograd.grad(y, leaf, dy.double())
    assert_rounded_once(activation.forward(fn, x), y.detach(), "y")
    assert_rounded_once(activation.backward(fn, dy, x).x, dx, "dx")


@pytest.mark.parametrize("betas", [(4.0, 25.0), (3.0, 12.0), (0.5, 0.25), (1e-30, 1e30)])
@pytest.mark.parametrize("extra", [{}, {"limit": 0.75}, {"offset": 1.0}], ids=str)
def test_the_soft_bounds_of_situ_hold_below_at_and_above_them(betas, extra):
    """Below, at and far above the bounds; with a clamp before them, and an offset after."""
    fn = ACTIVATIONS["situglu"]._replace(alpha=betas[0], beta=betas[1], **extra)
    x, dy = data(9, 64), data(9, 32, seed=1)
    x[0] *= 1e-4
    x[1] *= 1e4
    leaf = x.double().requires_grad_()
    a, b = taken_apart(leaf)
    if fn.limit:
        a, b = at_most(fn.limit, a), -at_most(fn.limit, -at_most(fn.limit, b))
    y = betas[0] * torch.tanh(a / betas[0]) * torch.sigmoid(a) * (betas[1] * torch.tanh(b / betas[1]) + fn.offset)
    (dx,) = torch.autograd.grad(y, leaf, dy.double())
    assert_rounded_once(activation.forward(fn, x), y.detach(), "y")
    assert_rounded_once(activation.backward(fn, dy, x).x, dx, "dx")


@every
def test_no_finite_input_has_a_gradient_that_is_not_a_number(name):
    fn = ACTIVATIONS[name]
    huge = torch.finfo(torch.bfloat16).max
    x = torch.tensor([[huge, -huge, 1e20, -1e20, 60.0, -60.0, 1e-30, 0.0] * sizes(fn)], dtype=torch.bfloat16)
    dy = torch.ones(1, 8, dtype=torch.bfloat16)
    assert not activation.forward(fn, x).isnan().any()
    assert not activation.backward(fn, dy, x).x.isnan().any()
    assert activation.forward(fn, torch.full_like(x, math.nan)).isnan().all()


@every
def test_strides_do_not_matter(name):
    fn = ACTIVATIONS[name]
    x, dy = data(6, 10 * sizes(fn)), data(6, 10, seed=1)
    turned = x.T.contiguous().T
    assert torch.equal(activation.forward(fn, turned), activation.forward(fn, x))
    assert torch.equal(activation.backward(fn, dy.T.contiguous().T, turned).x, activation.backward(fn, dy, x).x)
    row = dy[:1].expand(6, 10)
    assert torch.equal(activation.backward(fn, row, x).x, activation.backward(fn, row.contiguous(), x).x)


@every
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_an_empty_tensor_gives_an_empty_tensor(name, shape):
    fn = ACTIVATIONS[name]
    m, h = shape
    x, scales = torch.randn(m, h * sizes(fn)), torch.randn(m)
    assert activation.forward(fn, x, scales).shape == (m, h)
    found = activation.backward(fn, torch.randn(m, h), x, scales, wanted=Wanted(scales=torch.float32))
    assert found.x.shape == x.shape
    assert torch.equal(found.scales, torch.zeros(m))


def test_bias_is_added_first_and_summed_by_columns():
    fn = ACTIVATIONS["gelu"]
    x, bias, dy = data(11, 5), data(5, seed=3), data(11, 5, seed=1)
    leaf, added = x.double().requires_grad_(), bias.double().requires_grad_()
    y = F.gelu(leaf + added, approximate="tanh")
    want = torch.autograd.grad(y, (leaf, added), dy.double())
    assert_rounded_once(activation.forward(fn, x, bias=bias), y.detach())
    found = activation.backward(fn, dy, x, bias=bias, wanted=Wanted(bias=torch.float32))
    assert_rounded_once(found.x, want[0])
    torch.testing.assert_close(found.bias.double(), want[1], rtol=1e-6, atol=1e-6)


# -- dropout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0625, 0.1, 0.5, 0.75])
def test_as_many_are_dropped_as_should_be(p):
    n = 128 * 1000
    share = 1 - reference.kept((128, 1000), p, seed_of(5)).double().mean().item()
    assert abs(share - p) < 2.58 * math.sqrt(p * (1 - p) / n)  # 99 %


def test_masks_follow_seed_and_step_alone():
    mask = reference.kept((16, 63), 0.5, seed_of(2**40 + 1, 3))
    assert torch.equal(mask, reference.kept((16, 63), 0.5, seed_of(2**40 + 1, 3)))
    for seed, step in ((1, 3), (2**40, 3), (2**40 + 1, 4)):
        assert not torch.equal(mask, reference.kept((16, 63), 0.5, seed_of(seed, step)))
    assert torch.equal(mask[:5], reference.kept((5, 63), 0.5, seed_of(2**40 + 1, 3)))  # a row does not know the others


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_kept_elements_are_scaled_and_have_the_same_gradient(p):
    fn = ACTIVATIONS["linear"]._replace(drop=p)
    x, seed = data(8, 33), seed_of(9)
    y = activation.forward(fn, x, seed=seed)
    mask = reference.kept((8, 33), p, seed)
    want = torch.where(mask, x.double() / max(1 - p, 0.1), 0.0)
    torch.testing.assert_close(y.double(), want, rtol=1e-7, atol=0)
    assert torch.equal(activation.backward(fn, x, None, seed=seed).x, y)
    assert mask.all() if p == 0 else not mask.all()
    assert mask.any() == (p < 1)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_config_is_its_string():
    config = layer.Config("clamped-swiglu", alpha=2.0, interleave=8, scales_dtype="float32", **wants("dx ds"))
    assert layer.config(config.key) == config
    assert config.function == ACTIVATIONS["clamped-swiglu"]._replace(alpha=2.0, interleave=8)
    assert layer.Config("situglu", beta=12.0).function == ACTIVATIONS["situglu"]._replace(beta=12.0)
    with pytest.raises(UnsupportedConfig, match="must be one of 'gelu'"):
        layer.Config("mish")


# -- on a GPU ----------------------------------------------------------------------------------------------------------

CASES = {
    **{name: (fn, ()) for name, fn in ACTIVATIONS.items()},
    "swiglu interleaved": (ACTIVATIONS["swiglu"]._replace(interleave=16), ()),
    "swiglu scaled": (ACTIVATIONS["swiglu"], ("scales",)),
    "clamped-swiglu interleaved, scaled": (ACTIVATIONS["clamped-swiglu"]._replace(interleave=16), ("scales",)),
    "situglu by 16, scaled": (ACTIVATIONS["situglu"]._replace(interleave=16), ("scales",)),
    "situglu of small bounds": (ACTIVATIONS["situglu"]._replace(alpha=0.5, beta=3.0), ()),
    "srelu scaled": (ACTIVATIONS["srelu"], ("scales",)),
    "gelu with a bias": (ACTIVATIONS["gelu"], ("bias",)),
    "dropout": (ACTIVATIONS["linear"]._replace(drop=0.1), ("seed",)),
}


def both_ways(case, dtype, m, h, *, strided=False):
    """Forward and backward of a case on the GPU, and how large the terms are that each result is made of."""
    fn, given = CASES[case]
    x, dy = data(m, h * sizes(fn), dtype=dtype).cuda(), data(m, h, dtype=dtype, seed=1).cuda()
    if strided:
        x, dy = x.T.contiguous().T, dy[:1].expand(m, h)
    extra = {
        "scales": torch.rand(m, generator=torch.Generator().manual_seed(2)).cuda(),
        "bias": data(x.shape[1], dtype=dtype, seed=2).cuda(),
        "seed": seed_of(77, 2, "cuda"),
    }
    extra = {name: t for name, t in extra.items() if name in given}
    wanted = Wanted(**{name: torch.float32 for name in ("scales", "bias") if name in given})
    y = activation.forward(fn, x, **extra)
    found = activation.backward(fn, dy, x if fn.remembers else None, **extra, wanted=wanted)
    terms = (x.double().abs() + extra.get("bias", x[:1] * 0).double().abs() + 1) * 2
    a, b = taken_apart(terms, fn.interleave) if fn.gated else (terms, torch.ones_like(dy).double())
    size = a * a * b  # of a squared value, the largest that any entry makes
    part = size * dy.abs()
    of_dx = part if not fn.gated else part.max().expand(x.shape) if fn.interleave else torch.cat((part, part), 1)
    return (y, *found), (size, of_dx, part.sum(1), of_dx.sum(0))


gpu_cases = pytest.mark.parametrize("case", CASES)


SHAPES = {"one row": (1, 16, False), "strided": (37, 48, True), "large": (130, 4096, False), "wide": (5, 1008, True)}


@pytest.mark.gpu
@pairs(case=list(CASES), dtype=DTYPES, shape=list(SHAPES))
def test_triton_is_the_reference_but_for_rounding(case, dtype, shape):
    m, h, strided = SHAPES[shape]
    found, terms = both_ways(case, dtype, m, h, strided=strided)
    with backend.use("reference"):
        want, _ = both_ways(case, dtype, m, h, strided=strided)
    for what, a, b, size in zip(("y", "dx", "dscales", "dbias"), found, want, terms, strict=True):
        assert (a is None) == (b is None), what
        if a is not None:
            error, allowed = (a.double() - b.double()).abs(), torch.finfo(a.dtype).eps * b.double().abs() + 2e-6 * size
            assert a.dtype == b.dtype, what
            assert (error <= allowed).all(), f"{what}: off by {(error / allowed).max():.3g} times the bound"


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_triton_drops_the_same_elements():
    fn = ACTIVATIONS["linear"]._replace(drop=0.3)
    for shape in ((3, 5), (65, 1023), (128, 4096)):
        y = activation.forward(fn, torch.ones(shape, device="cuda"), seed=seed_of(2**45 + 3, 11, "cuda"))
        assert torch.equal((y != 0).cpu(), reference.kept(shape, 0.3, seed_of(2**45 + 3, 11)))


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_triton_has_soft_bounds_to_the_last_places():
    """However small x is: tanh does not cancel there, and its slope does not vanish before its time."""
    fn = ACTIVATIONS["situglu"]
    b = torch.logspace(-30, 2, 4096, device="cuda")
    x = torch.stack((torch.full_like(b, 2.0), b), 1).repeat(2, 1)
    x[4096:] *= torch.tensor([1.0, -1.0], device="cuda")
    dy = torch.ones(8192, 1, device="cuda")
    found = activation.forward(fn, x), activation.backward(fn, dy, x).x
    with backend.use("reference"):
        want = activation.forward(fn, x), activation.backward(fn, dy, x).x
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=4e-6, atol=0)


@pytest.mark.gpu
@gpu_cases
def test_triton_gives_the_same_bits_again(case):
    (first, _), (second, _) = (both_ways(case, torch.bfloat16, 513, 2048) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.gpu
@every
def test_triton_has_no_gradient_that_is_not_a_number(name):
    fn = ACTIVATIONS[name]
    huge = torch.finfo(torch.bfloat16).max
    row = [huge, -huge, 1e20, -1e20, 60.0, -60.0, 1e-30, 0.0] * sizes(fn)
    x = torch.tensor([row], dtype=torch.bfloat16, device="cuda")
    assert not activation.forward(fn, x).isnan().any()
    assert not activation.backward(fn, torch.ones(1, 8, dtype=torch.bfloat16, device="cuda"), x).x.isnan().any()
    assert activation.forward(fn, torch.full_like(x, math.nan)).isnan().all()
