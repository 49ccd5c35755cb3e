"""Curves over the steps of runs, as SVG that scales with the window. Colours follow the page's."""

import math
from collections.abc import Sequence
from html import escape
from statistics import fmean, stdev
from typing import NamedTuple

from octavo.inspection.webpage import key

SMOOTH = 0.05  # of the steps: how far the running mean of a curve reaches
WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 800, 300, 52, 12, 12, 28


class Curve(NamedTuple):
    """A line, and the half-width of a band around it at each step, if it has one."""

    name: str
    values: Sequence[float]
    colour: str
    band: Sequence[float] = ()


def figure(curves: Sequence[Curve], caption: str, *, zero: bool = False) -> str:
    """Returns curves over the steps, with a legend. `zero` keeps zero in view, and draws it."""
    values = [v for curve in curves for v in _extent(curve) if math.isfinite(v)]
    if not values:
        return ""
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    ticks = round_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    steps = max(len(curve.values) for curve in curves)

    def x(step: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * (step - 1) / max(steps - 1, 1)

    def y(value: float) -> float:
        return TOP + (HIGH - TOP - BOTTOM) * (high - min(max(value, low), high)) / ((high - low) or 1.0)

    drawn = []
    for tick in ticks:
        stroke = "var(--soft)" if zero and tick == 0 else "var(--line)"
        drawn.append(f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="{stroke}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for step in sorted({1, *(round(steps * part / 4) for part in range(1, 5))} - {0}):
        anchor = "start" if step == 1 else "end" if step == steps else "middle"
        drawn.append(f'<text x="{x(step):.1f}" y="{HIGH - 8}" text-anchor="{anchor}">{step}</text>')
    for curve in curves:
        around = [(i, v, b) for i, (v, b) in enumerate(zip(curve.values, curve.band, strict=False), 1) if _drawn(v, b)]
        outline = [(i, v + b) for i, v, b in around] + [(i, v - b) for i, v, b in reversed(around)]
        if outline:
            points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in outline)
            drawn.append(f'<polygon points="{points}" fill="{curve.colour}" fill-opacity="0.18"/>')
    for curve in curves:
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(curve.values, 1) if math.isfinite(v))
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{curve.colour}" stroke-width="2"/>')
    legend = " ".join(f"<span>{key(curve.colour)}{escape(curve.name)}</span>" for curve in curves)
    names = ", ".join(curve.name for curve in curves)
    return (
        f'<figure><svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(caption)}: {escape(names)}">'
        + "".join(drawn)
        + f"</svg><figcaption>{escape(caption)}. {legend}</figcaption></figure>"
    )


def has_band(curves: Sequence[Curve]) -> bool:
    """Whether a band is drawn around one of the curves."""
    return any(_drawn(value, band) for curve in curves for value, band in zip(curve.values, curve.band, strict=False))


def _extent(curve: Curve) -> list[float]:
    """The values of a curve; those of its band only after the first steps, whose bands are as wide as the losses."""
    band = [v + side * b for v, b in list(zip(curve.values, curve.band, strict=False))[10:] for side in (-1, 1)]
    return [*curve.values, *band]


def _drawn(value: float, band: float) -> bool:
    return math.isfinite(value) and math.isfinite(band)


def round_ticks(low: float, high: float) -> list[float]:
    """Returns about five round numbers that cover a range."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(n * step, 12) for n in range(first, last + 1)]


def smooth(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and those before it."""
    return [fmean(values[first:end]) for first, end in _reaches(len(values))]


def gaps(losses: Sequence[float], base: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns how far losses are above those of a baseline on the same batches, in percent of its mean, smoothed; and
    two standard errors of that. It is NaN where the baseline is zero."""
    steps = min(len(losses), len(base))
    found, noise = [], []
    for first, end in _reaches(steps, len(losses)):
        differences = [mine - theirs for mine, theirs in zip(losses[first:end], base[first:end], strict=True)]
        mean = fmean(base[first:end])
        unit = 100 / mean if mean else math.nan
        found.append(unit * fmean(differences))
        spread = all(map(math.isfinite, differences)) and len(differences) > 1
        noise.append(abs(unit) * 2 * stdev(differences) / len(differences) ** 0.5 if spread else math.nan)
    return found, noise


def _reaches(steps: int, whole: int | None = None) -> list[tuple[int, int]]:
    """The steps that the running mean at each step covers, of a run of `whole` steps."""
    reach = max(1, round(SMOOTH * (steps if whole is None else whole)))
    return [(max(0, end - reach), end) for end in range(1, steps + 1)]
