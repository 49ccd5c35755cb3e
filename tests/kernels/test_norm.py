"""Norm kernels against torch's own norms, differentiated in float64."""

import pytest
import torch
import torch.nn.functional as F

from octavo import backend
from octavo.kernels import norm as kernel
from octavo.kernels.norm import Statistics, Wanted
from tests.support.activation_formulas import DTYPES, assert_rounded_once, data, dtypes
from tests.support.norm_operands import NORMS, operands
from tests.support.pairs import pairs, turns

every = pytest.mark.parametrize("name", NORMS)


def formula(norm, x, weight, bias):
    gamma = None if weight is None else weight + 1 if norm.zero_centered else weight
    if norm.kind == "layer":
        return F.layer_norm(x, x.shape[1:], gamma, bias, norm.eps)
    if norm.kind == "rms":
        return F.rms_norm(x, x.shape[1:], gamma, norm.eps)
    return x / torch.sqrt((x * x).sum(1, keepdim=True) + norm.eps)


def both_ways(norm, x, dy, weight, bias, dtype=torch.float32):
    """y, dx, dγ, dβ"""
    y, mean, rstd = kernel.forward(norm, x, weight, bias)
    found = kernel.backward(
        norm, dy, x, Statistics(mean, rstd), weight,
        Wanted(True, None if weight is None else dtype, None if bias is None else dtype),
    )  # fmt: skip
    return y, *found


def terms(norm, x, dy, weight):
    """How large are the terms that y, dx, dγ and dβ are made of."""
    x, dy = x.double(), dy.double()
    mean = x.mean(1, keepdim=True).abs() if norm.kind == "layer" else 0 * x[:, :1]
    rstd = kernel.forward(norm, x.float(), None, None).rstd.double()[:, None]
    gamma = torch.ones_like(x[0]) if weight is None else weight.double().abs() + 1
    found, g = (x.abs() + mean) * rstd, dy.abs() * gamma
    average = (g * found).mean(1, keepdim=True) if norm.kind != "l2" else (g * found).sum(1, keepdim=True)
    of_dx = (g + found * average + g.mean(1, keepdim=True)) * rstd
    return found * gamma + 1, of_dx, (dy.abs() * found).sum(0), dy.abs().sum(0)


def assert_close(found, want, sizes, factor):
    """Each within one rounding to its dtype, and `factor` of the terms it is made of."""
    for what, a, b, size in zip(("y", "dx", "dweight", "dbias"), found, want, sizes, strict=True):
        assert (a is None) == (b is None), what
        if a is not None:
            kind = torch.finfo(a.dtype)
            steps = kind.eps * (b.double().abs() + kind.smallest_normal)  # of subnormals there is but one
            error, allowed = (a.double() - b.double()).abs(), steps + factor * size
            assert a.shape == b.shape, what
            assert (error <= allowed).all(), f"{what}: off by {(error / allowed).max():.3g} times the bound"


@every
@dtypes
@pytest.mark.parametrize(("m", "n"), [(6, 19), (33, 64), (5, 1), (1, 300)])
def test_values_and_gradients(name, dtype, m, n):
    norm = NORMS[name]
    x, dy, weight, bias = operands(norm, m, n, dtype)
    leaves = [None if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    y = formula(norm, *leaves)
    there = [t for t in leaves if t is not None]
    want = iter(torch.autograd.grad(y, there, dy.double()))
    want = [y.detach(), *(None if t is None else next(want) for t in leaves)]
    found = both_ways(norm, x, dy, weight, bias)
    assert_rounded_once(found[0], want[0], "y")
    assert found[1].dtype == dtype
    assert_close(found, want, terms(norm, x, dy, weight), 1e-6)  # mean and rstd are kept in float32


@every
def test_what_is_not_wanted_is_not_made(name):
    norm = NORMS[name]
    x, dy, weight, _ = operands(norm, 7, 12)
    _, mean, rstd = kernel.forward(norm, x, weight, None)
    only_dx = kernel.backward(norm, dy, x, Statistics(mean, rstd), weight)
    assert only_dx.x is not None and only_dx.weight is None and only_dx.bias is None
    only_dw = kernel.backward(norm, dy, x, Statistics(mean, rstd), None, Wanted(False, torch.float32))
    assert only_dw.x is None and only_dw.weight is not None
    only_db = kernel.backward(norm, dy, None, Statistics(None, None), None, Wanted(False, bias=torch.bfloat16))
    assert only_db.bias.dtype == torch.bfloat16
    torch.testing.assert_close(only_db.bias.float(), dy.sum(0), rtol=4e-3, atol=1e-5)


@every
def test_strides_do_not_matter(name):
    norm = NORMS[name]
    x, dy, weight, bias = operands(norm, 9, 20)
    turned = both_ways(norm, x.T.contiguous().T, dy[:1].expand(9, 20), weight, bias)
    for a, b in zip(turned, both_ways(norm, x, dy[:1].repeat(9, 1), weight, bias), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@every
def test_a_norm_of_no_rows_is_empty(name):
    norm = NORMS[name]
    x, dy, weight, bias = operands(norm, 0, 8)
    y, dx, dw, db = both_ways(norm, x, dy, weight, bias)
    assert y.shape == dx.shape == (0, 8)
    for sums in (dw, db):
        assert sums is None or torch.equal(sums, torch.zeros(8))


@every
def test_a_row_does_not_know_the_others(name):
    norm = NORMS[name]
    x, dy, weight, bias = operands(norm, 8, 37)
    y, dx, *_ = both_ways(norm, x, dy, weight, bias)
    alone = both_ways(norm, x[5:6], dy[5:6], weight, bias)
    assert torch.equal(y[5:6], alone[0])
    assert torch.equal(dx[5:6], alone[1])


# -- on a GPU ----------------------------------------------------------------------------------------------------------

WIDTHS = [(1, 1), (37, 19), (1000, 128), (5, 1008), (300, 4096), (41, 8192), (600, 9000)]  # the last is read by parts


@pytest.mark.gpu
@pairs(size=WIDTHS, name=list(NORMS), dtype=DTYPES)
def test_triton_is_the_reference_but_for_rounding(name, dtype, size):
    norm, strided, (m, n) = NORMS[name], dtype == torch.float16, size
    x, dy, weight, bias = operands(norm, m, n, dtype, "cuda")
    if strided:
        x, dy = x.T.contiguous().T, dy[:1].expand(m, n)
    found = both_ways(norm, x, dy, weight, bias)
    sizes = terms(norm, x, dy, weight)
    with backend.use("reference"):
        want = both_ways(norm, x, dy, weight, bias)
    assert_close(found, want, sizes, 4e-6)


@pytest.mark.gpu
@turns(size=WIDTHS, name=list(NORMS))
def test_triton_gives_the_same_bits_again(name, size):
    norm = NORMS[name]
    given = operands(norm, *size, torch.bfloat16, "cuda")
    first, second = both_ways(norm, *given), both_ways(norm, *given)
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@every
@pytest.mark.parametrize("n", [128, 9000])
def test_triton_makes_only_what_is_wanted(name, n):
    norm = NORMS[name]
    x, dy, weight, bias = operands(norm, 70, n, torch.bfloat16, "cuda")
    y, mean, rstd = kernel.forward(norm, x, weight, bias)
    all_of_it = both_ways(norm, x, dy, weight, bias)
    assert torch.equal(y, all_of_it[0])
    assert torch.equal(kernel.backward(norm, dy, x, Statistics(mean, rstd), weight).x, all_of_it[1])
    if weight is not None:
        only_dw = kernel.backward(norm, dy, x, Statistics(mean, rstd), None, Wanted(False, torch.float32))
        assert only_dw.x is None
        assert torch.equal(only_dw.weight, all_of_it[2])


# -- a gradient that is added to dx ------------------------------------------------------------------------------------


def dx_with(norm, x, dy, weight, added):
    _, mean, rstd = kernel.forward(norm, x, weight, None)
    return kernel.backward(norm, dy, x, Statistics(mean, rstd), weight, Wanted(weight=torch.float32), added)


@pytest.mark.parametrize("name", ["rms", "rms, zero centered"])
@dtypes
@pytest.mark.parametrize(("m", "n"), [(6, 19), (33, 64), (0, 64)])
def test_an_added_gradient_and_dx_are_rounded_once(name, dtype, m, n):
    norm = NORMS[name]
    x, dy, weight, _ = operands(norm, m, n, dtype)
    added = data(m, n, dtype=dtype, seed=9)
    found = dx_with(norm, x, dy, weight, added)
    _, mean, rstd = kernel.forward(norm, x, weight, None)
    exact = kernel.backward(norm, dy.double(), x.double(), Statistics(mean, rstd), weight.double()).x
    assert found.x.dtype == dtype
    assert_rounded_once(found.x, exact + added.double(), "dx")
    assert torch.equal(found.weight, dx_with(norm, x, dy, weight, None).weight)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rms", "rms, zero centered"])
@dtypes
@pytest.mark.parametrize(("m", "n"), WIDTHS)
def test_triton_adds_a_gradient_as_the_reference_does(name, dtype, m, n):
    norm = NORMS[name]
    x, dy, weight, _ = operands(norm, m, n, dtype, "cuda")
    added = data(m, n, dtype=dtype, seed=9).to("cuda")
    found = dx_with(norm, x, dy, weight, added)
    with backend.use("reference"):
        want = dx_with(norm, x, dy, weight, added)
    assert_close((None, *found), (None, *want), terms(norm, x, dy, weight), 4e-6)


def test_the_gradient_of_a_layer_norm_sums_to_zero_over_each_row():
    """Adding a number to a row does not change y."""
    _, dx, *_ = both_ways(NORMS["layer"], *operands(NORMS["layer"], 5, 64))
    torch.testing.assert_close(dx.sum(1), torch.zeros(5), rtol=0, atol=1e-5)
