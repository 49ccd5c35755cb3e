"""When the reference GEMM's sum is exact, and so independent of order: the table of docs/numerics.md."""

from fractions import Fraction

import pytest
import torch

from octavo.formats import E4M3, E5M2
from octavo.kernels.gemm import reference
from octavo.quant import MX, NVFP4, Block1D, Rowwise, Tensorwise

ONE = torch.ones(1)


def coded(values, fmt):
    """These values as codes with a scale of one."""
    return Tensorwise(fmt).quantize(values[None], inverse_scale=ONE)


def total(a, b):
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    return sum((Fraction(u) * Fraction(v) for u, v in pairs), Fraction(0))


def product(a, b):
    """The float64 sum that the reference makes."""
    return (reference._operand(a)[0] @ reference._operand(b)[0].T).item()


def test_the_largest_and_the_smallest_e4m3_products_add_up_exactly():
    a, b = torch.full((2**16,), E4M3.max), torch.full((2**16,), E4M3.max)
    a[::2], b[::2] = E4M3.min_subnormal, -E4M3.min_subnormal
    assert Fraction(product(coded(a, E4M3), coded(b, E4M3))) == total(a, b)


@pytest.mark.parametrize(("count", "exact"), [(10, True), (24, False)])
def test_e5m2_products_add_up_exactly_below_a_bound(count, exact):
    a, b = torch.full((count + 1,), E5M2.max), torch.full((count + 1,), E4M3.max)
    a[0], b[0] = E5M2.min_subnormal, E4M3.min_subnormal
    assert (total(a.abs(), b.abs()) < 2**28) == exact
    assert (Fraction(product(coded(a, E5M2), coded(b, E4M3))) == total(a, b)) == exact


SPECS = [Tensorwise(), Rowwise(), Rowwise(pow2=False), Block1D(), MX(), NVFP4()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_order_does_not_matter_for_ordinary_values(spec):
    x, w = torch.randn(16, 1024), torch.randn(16, 1024)
    a, b = reference._operand(spec.quantize(x))[0], reference._operand(spec.quantize(w))[0]
    order = torch.randperm(1024)
    assert torch.equal(a @ b.T, a[:, order] @ b[:, order].T)


def test_products_round_under_float32_scales_of_blocks():
    a, b = (reference._operand(Block1D(scale="fp32").quantize(torch.randn(1, 8192)))[0][0] for _ in range(2))
    exact = [Fraction(u) * Fraction(v) == Fraction(u * v) for u, v in zip(a.tolist(), b.tolist(), strict=True)]
    assert not all(exact)
