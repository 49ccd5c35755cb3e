"""The rows of an inspection's report: the numbers of one tensor of one layer, as values and as text."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from octavo.inspection.heat import shade_of
from octavo.inspection.statistics import AMAXES, LARGEST, LOWEST, SCALES, SUMS, VALUES
from octavo.quant.quantizer import Quantizer
from octavo.recipes import Recipe
from octavo.text import columns, one_line, plural

NUMBERS = ("underflow", "saturated", "nonfinite", "sqnr", "amax", "cosine", "worst_cosine", "scale")
HEADER = ("layer", "tensor", "cast", "calls", "underflow", "saturated", "not finite", "SQNR", "amax", "cosine", "worst")


class LayerState(NamedTuple):
    """Facts about a layer that are not measured."""

    recipe: Recipe
    updates: int  # of its weight, since delayed scaling's last step

    def quantizer(self, tensor: str) -> Quantizer | None:
        """Return the quantizer of x, w or dy that the report measures; None for the results of GEMMs."""
        quant = self.recipe.linear()
        return {"x": quant.fprop.left, "w": quant.fprop.right, "dy": quant.dgrad.left}.get(tensor)

    @property
    def bits(self) -> int:
        """The fewest bits of a quantizer; 16 if there is none."""
        found = [self.quantizer(name) for name in ("x", "w", "dy")]
        return min([spec.fmt.bits for spec in found if spec is not None], default=16)


class TensorRow(NamedTuple):
    """The numbers of one tensor of one layer, over all calls that were measured.

    Attributes:
        layer: the layer's path in the model.
        tensor: "x", "w", "dy", "y", "dx" or "dw".
        cast: the quantizer's string for x, w and dy; empty if the recipe does not quantize it.
        calls: how many calls were measured.
        underflow: the share of values that are not zero and that the cast made zero; None without a cast.
        saturated: the share of values beyond the largest code by more than rounding; None without a cast.
        nonfinite: the share of values that are Inf or NaN.
        sqnr: the signal-to-noise ratio in dB: of the cast, or of y, dx and dw against the float32 reference's. None if
            there was nothing to compare; math.inf if nothing differs.
        amax: the largest magnitude.
        cosine: for y, dx and dw the mean cosine with the float32 reference's; else None.
        worst_cosine: the smallest cosine of a call.
        zero: the share of calls in which all values were zero.
        scale: the geometric mean of the scales, each rounded down to a power of two; None without a cast.
        amaxes: how many calls had an amax from each power of two up to the next, the first from 2**-72.
        scales: how many values had a scale there.
        values: how many magnitudes were there, of up to 262,144 values of each call; those of x, w and dy divided by
            the scale of their cast, if there is one.
    """

    layer: str
    tensor: str
    cast: str
    calls: int
    underflow: float | None
    saturated: float | None
    nonfinite: float
    sqnr: float | None
    amax: float
    cosine: float | None
    worst_cosine: float | None
    zero: float
    scale: float | None
    amaxes: tuple[float, ...]
    scales: tuple[float, ...]
    values: tuple[float, ...]

    def numbers(self) -> dict[str, float]:
        """Return the numbers that exist and are finite, by name.

        Returns:
            Those of underflow, saturated, nonfinite, sqnr, amax, cosine, worst_cosine and scale.
        """
        found = {name: getattr(self, name) for name in NUMBERS}
        return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def row_of(path: str, state: LayerState, tensor: str, numbers: list[float]) -> TensorRow:
    """Return the row from the numbers of `octavo.inspection.statistics`."""
    sums = dict(zip((*SUMS, *LARGEST), numbers, strict=False))
    spec, compared = state.quantizer(tensor), sums["compared"] > 0
    is_cast = spec is not None and compared
    return TensorRow(
        layer=path,
        tensor=tensor,
        cast="" if spec is None else str(spec),
        calls=int(sums["calls"]),
        underflow=_share(sums["underflow"], sums["nonzero"]) if is_cast else None,
        saturated=_share(sums["saturated"], sums["total"]) if is_cast else None,
        nonfinite=_share(sums["nonfinite"], sums["total"]),
        sqnr=_decibels(sums["signal"], sums["noise"]) if compared else None,
        amax=sums["amax"],
        cosine=sums["cosine"] / sums["cosines"] if sums["cosines"] else None,
        worst_cosine=1 - sums["deficit"] if sums["cosines"] else None,
        zero=_share(sums["silent"], sums["calls"]),
        scale=_mean_scale(numbers[SCALES]),
        amaxes=tuple(numbers[AMAXES]),
        scales=tuple(numbers[SCALES]),
        values=tuple(numbers[VALUES]),
    )


def by_layer(rows: Iterable[TensorRow]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the numbers of rows by layer, tensor and name."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        found.setdefault(row.layer, {})[row.tensor] = row.numbers()
    return found


def table(states: Mapping[str, LayerState], rows: Sequence[TensorRow]) -> str:
    """Return the rows as text of 80 columns: a line for each layer, and its tensors under it. What is zero in all rows
    has no column."""
    header = ["  tensor", "format", "underflow", "saturated", "SQNR", "amax", "cosine"]
    rare = "not finite" if any(row.nonfinite for row in rows) else "worst"
    lines = columns([[*header, rare], *[_short(states[row.layer], row, rare) for row in rows]])
    found, last = [lines[0]], None
    for row, line in zip(rows, lines[1:], strict=True):
        if row.layer != last:
            state, last = states[row.layer], row.layer
            found.append(one_line(f"{row.layer or '(model)'}: {state.recipe}, {plural(row.calls, 'call')}"))
        found.append(line)
    return "\n".join(found)


def _short(state: LayerState, row: TensorRow, rare: str) -> tuple[str, ...]:
    spec = state.quantizer(row.tensor)
    last = percent(row.nonfinite) if rare == "not finite" else _cosine(row.worst_cosine)
    return (
        f"  {row.tensor}", "-" if spec is None else spec.fmt.name, percent(row.underflow), percent(row.saturated),
        _noise(row.sqnr), f"{row.amax:.3g}", _cosine(row.cosine), last,
    )  # fmt: skip


def worst_first(rows: Sequence[TensorRow], sick: Collection[str], top: int) -> tuple[list[TensorRow], list[str]]:
    """Return the rows of so many layers, the sick ones and then the worst first, and a sentence about the others."""
    badness = dict.fromkeys([row.layer for row in rows], 0.0)
    for row in rows:
        badness[row.layer] = max(badness[row.layer], shade_of(row.numbers()))
    ordered = sorted(badness, key=lambda layer: (layer not in sick, -badness[layer]))
    shown, rest = ordered[:top], ordered[top:]
    found = [row for layer in shown for row in rows if row.layer == layer]
    if not rest:
        return found, []
    left = sum(layer in sick for layer in rest)
    return found, [f"Left out: {plural(len(rest), 'layer')}, {left or 'none'} of them with a finding."]


def cells(row: TensorRow) -> tuple[str, ...]:
    """Return the text of a row's columns."""
    return (
        row.layer or "(model)", row.tensor, row.cast or "-", str(row.calls), percent(row.underflow),
        percent(row.saturated), percent(row.nonfinite), _noise(row.sqnr),
        f"{row.amax:.3g}", _cosine(row.cosine), _cosine(row.worst_cosine),
    )  # fmt: skip


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _mean_scale(counts: Sequence[float]) -> float | None:
    whole = sum(counts)
    if not whole:
        return None
    return 2.0 ** (sum((LOWEST + place) * count for place, count in enumerate(counts)) / whole)


def _decibels(signal: float, noise: float) -> float | None:
    if signal == 0:
        return None
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def _noise(sqnr: float | None) -> str:
    return "-" if sqnr is None else "exact" if sqnr == math.inf else f"{sqnr:.1f} dB"


def percent(share: float | None) -> str:
    """Return a share as a text. A small one is not shown as zero."""
    if share is None:
        return "-"
    return f"{share:.2%}" if share == 0 or share >= 5e-5 else f"{100 * share:.1g}%"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"
