"""The numbers that `octavo.inspect` keeps of a layer: one float64 tensor with a row for each of the layer's tensors.

A row holds sums over calls, then largest values, then two histograms over powers of two. Every update is a fixed number
of operations on the tensor's device, and the host reads nothing, so a CUDA graph can capture it.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo.formats import Format

TENSORS = ("x", "w", "dy", "y", "dx", "dw")  # the rows; x, w and dy are cast, the others are results of GEMMs
SUMS = (
    "calls",
    "total",  # elements
    "nonfinite",  # elements that are Inf or NaN
    "nonzero",  # finite elements that are not zero
    "underflow",  # of these, elements that the cast made zero
    "saturated",  # finite elements beyond the largest code by more than rounding
    "compared",  # calls whose result was compared with the values before the cast, or with the shadow's
    "signal",  # the sum of squares of those values
    "noise",  # the sum of squares of the differences
    "silent",  # calls that had elements, all of them zero
    "cosine",  # the sum of the cosines of calls
    "cosines",  # calls that have a cosine: not both tensors are zero
)
LARGEST = ("amax", "deficit")  # deficit: 1 - cosine of the worst call
BINS, LOWEST = 96, -72  # of a histogram: one for each power of two, the first and the last also for what is beyond
AMAXES = slice(len(SUMS) + len(LARGEST), len(SUMS) + len(LARGEST) + BINS)  # one count for each call
SCALES = slice(AMAXES.stop, AMAXES.stop + BINS)  # one count for each element
SHAPE = (len(TENSORS), SCALES.stop)


class Cast(NamedTuple):
    """The result of a cast, in the shape of the tensor that was cast."""

    values: Tensor  # that the codes stand for
    limit: Tensor  # the largest magnitude that the element's scale can represent
    fmt: Format


def record_operand(stats: Tensor, tensor: str, source: Tensor | None, cast: Cast | None) -> None:
    """Add one call's x, w or dy: the values before the cast, None if only codes are left, and the cast, None if the
    recipe does not quantize the tensor."""
    assert source is not None or cast is not None
    values = (source if source is not None else cast.values).float()  # type: ignore[union-attr]
    sums, amax, finite = _plain(values)
    scales = None
    if cast is not None:
        scales = _histogram(cast.limit / cast.fmt.max)
        if source is not None:
            finite &= cast.values.isfinite()  # a value that is not finite takes its block along
            kept = torch.where(finite, values, 0.0)
            sums["underflow"] = ((kept != 0) & (cast.values == 0)).sum()
            beyond = kept.abs() > cast.limit * (1 + _half_step(cast.fmt))
            sums["saturated"] = (beyond & (cast.limit > 0)).sum()  # a scale of zero makes zeros
            sums |= _compared(torch.where(finite, cast.values, 0.0), kept)
    _add(stats, tensor, sums, {"amax": amax}, _histogram(amax.view(1)), scales)


def record_result(stats: Tensor, tensor: str, made: Tensor, exact: Tensor) -> None:
    """Add one call's y, dx or dw, and the same of the high-precision shadow."""
    made, exact = made.float(), exact.float()
    sums, amax, finite = _plain(made)
    finite &= exact.isfinite()
    a, b = torch.where(finite, made, 0.0).double(), torch.where(finite, exact, 0.0).double()
    sums |= _compared(a, b)
    size_a, size_b = a.norm(), b.norm()
    has = (size_a > 0) | (size_b > 0)
    cosine = torch.where(has, (a * b).sum() / (size_a * size_b).clamp_min(1e-300), 0.0)
    sums |= {"cosine": cosine, "cosines": has}
    _add(stats, tensor, sums, {"amax": amax, "deficit": torch.where(has, 1 - cosine, 0.0)}, _histogram(amax.view(1)))


def _plain(values: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Counts of the values alone, their amax, and which are finite."""
    finite = values.isfinite()
    kept = torch.where(finite, values, 0.0)
    amax = kept.abs().amax() if values.numel() else values.new_zeros(())
    one = torch.ones((), dtype=torch.float64, device=values.device)
    sums = {
        "calls": one,
        "total": one * values.numel(),
        "nonfinite": (~finite).sum(),
        "nonzero": (kept != 0).sum(),
        "silent": (amax == 0) & finite.all() & (values.numel() > 0),
    }
    return sums, amax, finite


def _compared(made: Tensor, exact: Tensor) -> dict[str, Tensor]:
    made, exact = made.double(), exact.double()
    one = torch.ones((), dtype=torch.float64, device=made.device)
    return {"compared": one, "signal": exact.square().sum(), "noise": (made - exact).square().sum()}


def _histogram(values: Tensor) -> Tensor:
    """Counts values by power of two; zeros and values that are not finite count nowhere."""
    counted = values.isfinite() & (values > 0)
    exponent = torch.where(counted, values, 1.0).double().log2()
    places = (exponent.floor() - LOWEST).clamp(0, BINS - 1).long()
    counts = torch.zeros(BINS, dtype=torch.float64, device=values.device)
    return counts.scatter_add_(0, places.flatten(), counted.flatten().double())


def _add(
    stats: Tensor, tensor: str, sums: dict[str, Tensor], largest: dict[str, Tensor], amaxes: Tensor,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    row = stats[TENSORS.index(tensor)]
    zero = torch.zeros((), dtype=torch.float64, device=stats.device)
    added = torch.stack([sums.get(name, zero).double() for name in SUMS])
    raised = torch.stack([largest.get(name, zero).double() for name in LARGEST])
    places = slice(len(SUMS), len(SUMS) + len(LARGEST))
    with preserve_version_counter(stats):  # a graph in flight may have saved it
        row[: len(SUMS)] += added
        row[places] = torch.maximum(row[places], raised)
        row[AMAXES] += amaxes
        if scales is not None:
            row[SCALES] += scales


@lru_cache
def _half_step(fmt: Format) -> float:
    """Half the distance of the two largest codes, relative to the largest: what rounding alone may take away."""
    return 2.0**fmt.emax / (fmt.min_normal / fmt.min_subnormal) / 2 / fmt.max


@lru_cache
def largest_byte(fmt: Format) -> int:
    """The stored byte whose codes are all the largest one."""
    codes = fmt.encode(torch.tensor([fmt.max])).view(torch.uint8)
    code = int(codes[0])
    return code | code << 4 if fmt.packed == 2 else code


def largest_codes(codes: Tensor, fmt: Format) -> Tensor:
    """Codes in this shape that are all the largest one."""
    return torch.full(codes.shape, largest_byte(fmt), dtype=torch.uint8, device=codes.device).view(fmt.dtype)
