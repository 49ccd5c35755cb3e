"""Dequantized values that are quantized again: which of codes, scales and values stay, as docs/numerics.md has it."""

import pytest
import torch

from octavo.errors import UnsupportedDtype
from octavo.formats import E4M3, E5M2
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, Tensorwise

FORMATS = (E4M3, E5M2)
SAME = [MX(fmt, rounding, square) for fmt in FORMATS for rounding in ("floor", "even") for square in (False, True)]
SAME_VALUES = [
    *[kind(fmt) for kind in (Rowwise, Block1D, Block2D) for fmt in FORMATS],
    *[Tensorwise(fmt, pow2=True) for fmt in FORMATS],
    *[MX(fmt, rounding, square) for fmt in FORMATS for rounding in ("rceil", "ceil") for square in (False, True)],
]
SAME_CODES = [
    kind for fmt in FORMATS
    for kind in (Tensorwise(fmt), Rowwise(fmt, pow2=False), Block1D(fmt, scale="fp32"), Block2D(fmt, scale="fp32"))
]  # fmt: skip


def matrices():
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(160, 288, generator=g)
        yield x
        yield x * torch.exp2(torch.randint(-20, 20, (160, 1), generator=g))
        yield x * torch.exp2(torch.randint(-20, 20, (160, 288), generator=g))
        yield x * 2.0**-130
        yield x * 2.0**120


def twice(quantizer):
    """(codes, scales, values), the second time and the first, of each matrix."""
    for x in matrices():
        first = quantizer.quantize(x)
        again = quantizer.quantize(first.dequantize())
        yield [(q.codes.view(torch.uint8), q.scale, q.dequantize()) for q in (again, first)]


@pytest.mark.parametrize("quantizer", SAME, ids=str)
def test_all_bytes_stay(quantizer):
    assert all(torch.equal(a, b) for pair in twice(quantizer) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("quantizer", SAME_VALUES, ids=str)
def test_values_stay_under_scales_that_are_powers_of_two(quantizer):
    pairs = list(twice(quantizer))
    assert all(torch.equal(again[2], first[2]) for again, first in pairs)


def test_bytes_may_change_under_scales_that_are_powers_of_two():
    changed = [q for q in SAME_VALUES if any(not torch.equal(again[0], first[0]) for again, first in twice(q))]
    assert {type(q) for q in changed} >= {Rowwise, Block1D, MX}


@pytest.mark.parametrize("quantizer", SAME_CODES, ids=str)
def test_codes_stay_under_float32_scales_and_scales_hardly_move(quantizer):
    for again, first in twice(quantizer):
        assert torch.equal(again[0], first[0])
        assert ((again[1] - first[1]).abs() <= 2**-22 * first[1]).all()


def test_in_nvfp4_nothing_is_sure():
    pairs = list(twice(NVFP4()))
    assert all(any(not torch.equal(again[i], first[i]) for again, first in pairs) for i in range(3))
    assert all(torch.equal(a, b) for a, b in zip(*pairs[0], strict=True))  # of ordinary values all bytes stay


def test_codes_themselves_are_refused_as_x():
    quantizer, x = Block1D(), torch.randn(8, 128)
    one, groups = quantizer.quantize(x), quantizer.quantize_groups(x, torch.tensor([8]))
    for codes in (one, groups):
        for call in (quantizer.quantize, lambda codes: quantizer.quantize_into(x, codes)):
            with pytest.raises(
                UnsupportedDtype, match=r"Pass its dequantize\(\); quantize_into takes the codes .* first"
            ):
                call(codes)
