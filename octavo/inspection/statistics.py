"""The numbers that `octavo.inspect` keeps of a layer: one float64 tensor with a row for each of the layer's tensors.

A row holds sums over calls, then largest values, then three histograms over powers of two. Every update is a fixed
number of operations on the tensor's device, and the host reads nothing, so a CUDA graph can capture it.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo.formats import Format
from octavo.quant import scale_blocks

TENSORS = ("x", "w", "dy", "y", "dx", "dw")  # the rows; x, w and dy are cast, the others are results of GEMMs
SUMS = (
    "calls",
    "total",  # elements
    "nonfinite",  # elements that are Inf or NaN
    "nonzero",  # finite elements that are not zero
    "underflow",  # of these, elements that the cast made zero
    "saturated",  # finite elements beyond the largest code by more than rounding
    "compared",  # calls whose result was compared with the values before the cast, or with the float32 reference's
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
VALUES = slice(SCALES.stop, SCALES.stop + BINS)  # one count for each of up to SAMPLED elements
SHAPE = (len(TENSORS), VALUES.stop)
ROWS = 1024  # copies of a histogram while it is counted
SAMPLED = 2**18


class Cast(NamedTuple):
    """The result of a cast of a matrix."""

    values: Tensor  # [rows, K] float32: what the codes stand for
    limit: Tensor  # [rows or 1, blocks of columns] float32: the largest magnitude that a scale can represent
    block: int | None  # columns that share a scale; None if all do
    fmt: Format

    def spread(self, bounds: Tensor) -> Tensor:
        """Return a bound for each limit, in a shape that broadcasts to the values."""
        return scale_blocks.spread(bounds, (None, self.block), *self.values.shape)

    def in_codes(self, values: Tensor) -> Tensor:
        """Return values of the tensor, divided by their scales: by magnitude, what the format's codes are next to."""
        return values.float() / self.spread(self.limit / self.fmt.max)

    def scales(self) -> Tensor:
        """Return the histogram of the scales: how many values have one there."""
        rows, columns = self.values.shape
        whole = columns if self.block is None else self.block
        first = torch.arange(self.limit.shape[1], dtype=torch.float64, device=self.limit.device) * whole
        heights = rows if self.limit.shape[0] == 1 else 1
        return _histogram(self.limit / self.fmt.max, (columns - first).clamp(0, whole) * heights)


def fold(whole: Tensor, stats: Tensor) -> None:
    """Add the numbers of further calls to those of earlier ones, in place."""
    largest = slice(len(SUMS), len(SUMS) + len(LARGEST))
    maxima = torch.maximum(whole[:, largest], stats[:, largest])
    whole.add_(stats)
    whole[:, largest] = maxima


def record_operand(stats: Tensor, tensor: str, source: Tensor | None, cast: Cast | None) -> None:
    """Add one call's x, w or dy: the values before the cast, None if only codes are left, and the cast, None if the
    recipe does not quantize the tensor."""
    assert source is not None or cast is not None
    values = source if source is not None else cast.values  # type: ignore[union-attr]
    histograms = [(VALUES, _magnitudes(values if cast is None else cast.in_codes(values)))]
    sums, amax = _plain(values)
    if cast is not None and source is not None:
        noise, finite = _difference(cast.values, source)  # a value that is not finite takes its block along
        kept = torch.where(finite, source, 0.0)
        # a scale of zero makes zeros, and does not saturate
        bounds = torch.where(cast.limit > 0, cast.limit * (1 + _half_step(cast.fmt)), math.inf)
        sums["underflow"] = _nonzero(torch.where(cast.values == 0, kept, 0.0))
        sums["saturated"] = _nonzero(torch.where(kept.abs() > cast.spread(bounds), kept, 0.0))
        sums |= {"compared": sums["calls"], "signal": _size(kept).square(), "noise": _size(noise).square()}
    _add(stats, tensor, sums, {"amax": amax}, histograms + ([] if cast is None else [(SCALES, cast.scales())]))


def record_result(stats: Tensor, tensor: str, made: Tensor, exact: Tensor) -> None:
    """Add one call's y, dx or dw, and the same of the float32 reference."""
    sums, amax = _plain(made)
    difference, finite = _difference(made, exact)
    noise = _size(difference)
    a, b = (torch.where(finite, t, 0.0).double() for t in (made, exact))
    size_a, size_b = _size(a), _size(b)
    has = ((size_a > 0) | (size_b > 0)).double()
    cosine = a.mul_(b).sum() / (size_a * size_b).clamp_min(1e-300)
    sums |= {"compared": sums["calls"], "signal": size_b.square(), "noise": noise.square()}
    sums |= {"cosine": cosine, "cosines": has}
    _add(stats, tensor, sums, {"amax": amax, "deficit": has - cosine}, [(VALUES, _magnitudes(made))])


def _plain(values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Count of the values alone, and their amax."""
    kept = torch.nan_to_num(values, 0.0, 0.0, 0.0)
    one = torch.ones((), dtype=torch.float64, device=values.device)
    amax = torch.linalg.vector_norm(kept, math.inf).double() if values.numel() else 0 * one
    nonzero = _nonzero(kept)
    nonfinite = _nonzero(values) - nonzero  # Inf and NaN are not zero
    sums = {"calls": one, "total": one * values.numel(), "nonfinite": nonfinite, "nonzero": nonzero}
    if values.numel():
        sums["silent"] = (amax + nonfinite == 0).double()
    return sums, amax


def _difference(made: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return made - exact, zero where one of them is not finite, and where both are."""
    difference = made - exact
    kept = torch.nan_to_num(difference, 0.0, 0.0, 0.0)
    return kept, kept == difference


def _size(values: Tensor) -> Tensor:
    """Return the Euclidean norm, summed in float64: squares of float32 may overflow or vanish."""
    return torch.linalg.vector_norm(values, dtype=torch.float64)


def _nonzero(values: Tensor) -> Tensor:
    """Return how many values are not zero, in float64. A sum of booleans would first copy them to eight bytes each."""
    dtype = torch.float32 if values.shape[-1] <= 2**24 else torch.float64  # in which the counts of a row are exact
    of_rows: Tensor = torch.linalg.vector_norm(values, 0, dim=-1, dtype=dtype)
    return of_rows.sum(dtype=torch.float64)


def _histogram(values: Tensor, numbers: Tensor) -> Tensor:
    """Count values by power of two, each as often as its number says; `numbers` broadcasts. Zeros and values that are
    not finite count nowhere. Neighbours count in different rows, since atomic additions to one address wait for each
    other."""
    counted = values.isfinite() & (values > 0)
    _, exponents = torch.frexp(torch.where(counted, values, 1.0))  # from 2**(exponent - 1) on
    places = (exponents.long() - (LOWEST + 1)).clamp_(0, BINS - 1).flatten()
    rows = min(max(places.numel(), 1), ROWS)
    if rows > 1:
        places += torch.arange(places.numel(), device=values.device, dtype=torch.int64) % rows * BINS
    counts = torch.zeros(rows * BINS, dtype=torch.float64, device=values.device)
    counts.scatter_add_(0, places, torch.where(counted, numbers, 0.0).flatten())
    return counts.view(rows, BINS).sum(0)


def _magnitudes(values: Tensor) -> Tensor:
    """Return the histogram of magnitudes, of evenly spaced elements if there are many; an odd distance meets all
    columns."""
    flat = values.reshape(-1)
    flat = flat[:: -(-flat.numel() // SAMPLED) | 1].abs()
    return _histogram(flat, torch.ones((), dtype=torch.float64, device=values.device).expand(flat.shape))


def _add(
    stats: Tensor,
    tensor: str,
    sums: dict[str, Tensor],
    largest: dict[str, Tensor],
    histograms: Sequence[tuple[slice, Tensor]],
) -> None:
    row, zero = stats[TENSORS.index(tensor)], 0 * sums["calls"]
    found = torch.stack([*(sums.get(name, zero) for name in SUMS), *(largest.get(name, zero) for name in LARGEST)])
    amaxes = _histogram(largest["amax"].view(1), sums["calls"])
    places = slice(len(SUMS), len(SUMS) + len(LARGEST))
    with preserve_version_counter(stats):  # a graph in flight may have saved it
        row[: len(SUMS)].add_(found[: len(SUMS)])
        row[places] = torch.maximum(row[places], found[places])
        row[AMAXES].add_(amaxes)
        for place, counts in histograms:
            row[place].add_(counts)


@lru_cache
def _half_step(fmt: Format) -> float:
    """Return half the distance of the two largest codes, relative to the largest: what rounding alone may take away."""
    return 2.0**fmt.emax / (fmt.min_normal / fmt.min_subnormal) / 2 / fmt.max
