"""Curves over the steps of runs as SVG, for pages. They scale with the window, and their colours follow the page's."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from octavo.inspection.webpage import Markup, folded, table

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 800, 300, 68, 12, 12, 44  # of a figure, and of the margins around its curves
DASHES = ("", "9 4", "3 3", "12 3 3 3", "6 2", "2 5", "14 4")  # of curves after the first: coinciding ones all show
READ, LISTED = 100, 20  # the most steps that a pointer reads, and that a table lists


class Curve(NamedTuple):
    """A line, and the half-width of a band around it at each step, if it has one."""

    name: str
    values: Sequence[float]
    colour: str
    band: Sequence[float] = ()

    def with_band(self) -> list[tuple[int, float, float]]:
        """Return step, value and half-width where both are finite."""
        found = enumerate(zip(self.values, self.band, strict=False), 1)
        return [(step, v, b) for step, (v, b) in found if math.isfinite(v) and math.isfinite(b)]

    def extent(self) -> list[float]:
        """Return all finite values that must be in view. The first steps' bands are as wide as the losses: they may
        be cut."""
        around = [v + side * b for step, v, b in self.with_band() if step > 10 for side in (-1, 1)]
        return [v for v in (*self.values, *around) if math.isfinite(v)]

    def at(self, step: int) -> str:
        value = self.values[step - 1] if step <= len(self.values) else math.nan
        return f"{value:.4g}" if math.isfinite(value) else "–"


class _Scale(NamedTuple):
    """The places of steps and values in a figure."""

    steps: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * (step - 1) / max(self.steps - 1, 1)

    def y(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return TOP + (HIGH - TOP - BOTTOM) * (self.high - inside) / ((self.high - self.low) or 1.0)

    def points(self, places: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in places)


def figure(curves: Sequence[Curve], caption: str, unit: str, *, zero: bool = False) -> Markup:
    """Return curves over the steps, with a legend and the numbers to unfold; `unit` is the title of the upright axis.
    `zero` keeps zero in view, and draws it. The first curve is broad unless zero is, and later ones are dashed: curves
    that coincide show all the same."""
    values = [v for curve in curves for v in curve.extent()]
    if not values:
        return Markup("")
    values += [0.0] if zero else []
    ticks = round_ticks(min(values), max(values))
    scale = _Scale(max(len(curve.values) for curve in curves), min(*values, ticks[0]), max(*values, ticks[-1]))
    strokes = [_stroke(place + zero, many=len(curves) > 1) for place in range(len(curves))]
    drawn = [*_axes(scale, ticks, unit, zero), *_bands(scale, curves)]
    for curve, stroke in zip(curves, strokes, strict=True):
        line = scale.points([(i, v) for i, v in enumerate(curve.values, 1) if math.isfinite(v)])
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{curve.colour}" {stroke}/>')
    drawn += _readings(scale, curves)
    label = escape(f"{caption}: {', '.join(curve.name for curve in curves)}")
    legend = "".join(map(_legend, curves, strokes))
    return Markup(
        f'<figure><svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'
        f"<figcaption>{escape(caption)}. {legend}{_numbers(caption, scale.steps, curves)}</figcaption></figure>"
    )


def _stroke(place: int, *, many: bool) -> str:
    if place == 0:
        return f'stroke-width="{5 if many else 2}"' + (' stroke-opacity="0.6"' if many else "")
    dash = DASHES[(place - 1) % len(DASHES)]
    return 'stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _axes(scale: _Scale, ticks: Sequence[float], unit: str, zero: bool) -> list[str]:
    drawn, middle = [], (TOP + HIGH - BOTTOM) / 2
    for tick in ticks:
        y, stroke = f"{scale.y(tick):.1f}", "var(--soft)" if zero and tick == 0 else "var(--line)"
        drawn.append(f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y}" y2="{y}" stroke="{stroke}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{scale.y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for step in sorted({1, *(round(scale.steps * part / 4) for part in range(1, 5))} - {0}):
        anchor = "start" if step == 1 else "end" if step == scale.steps else "middle"
        drawn.append(f'<text x="{scale.x(step):.1f}" y="{HIGH - 26}" text-anchor="{anchor}">{step}</text>')
    drawn.append(f'<text x="{(LEFT + WIDE - RIGHT) / 2:.0f}" y="{HIGH - 6}" text-anchor="middle">step</text>')
    turned = f'transform="rotate(-90 16 {middle:.0f})" text-anchor="middle"'
    return [*drawn, f'<text x="16" y="{middle:.0f}" {turned}>{escape(unit)}</text>']


def _bands(scale: _Scale, curves: Sequence[Curve]) -> list[str]:
    drawn = []
    for curve in curves:
        if around := curve.with_band():
            outline = [(i, v + b) for i, v, b in around] + [(i, v - b) for i, v, b in reversed(around)]
            drawn.append(f'<polygon points="{scale.points(outline)}" fill="{curve.colour}" fill-opacity="0.18"/>')
    return drawn


def _readings(scale: _Scale, curves: Sequence[Curve]) -> list[str]:
    """Return an unseen column for each of some steps, whose title has the numbers."""
    found = []
    stride = -(-scale.steps // READ)
    width = (WIDE - LEFT - RIGHT) * stride / max(scale.steps - 1, 1)
    for step in range(1, scale.steps + 1, stride):
        said = escape(f"step {step}: " + ", ".join(f"{curve.name} {curve.at(step)}" for curve in curves))
        left = max(scale.x(step) - width / 2, LEFT)
        found.append(
            f'<rect class="step" x="{left:.1f}" y="{TOP}" width="{min(width, WIDE - RIGHT - left):.1f}" '
            f'height="{HIGH - TOP - BOTTOM}"><title>{said}</title></rect>'
        )
    return found


def _legend(curve: Curve, stroke: str) -> str:
    line = f'<line x1="0" x2="28" y1="4" y2="4" stroke="{curve.colour}" {stroke}/>'
    return f'<span><svg width="28" height="8" aria-hidden="true">{line}</svg>{escape(curve.name)}</span>'


def _numbers(caption: str, steps: int, curves: Sequence[Curve]) -> Markup:
    """Return the table of some steps, the last one among them."""
    listed = sorted({max(1, round(steps * n / LISTED)) for n in range(1, LISTED + 1)})
    rows = [[str(step), *(curve.at(step) for curve in curves)] for step in listed]
    return folded("The numbers", table(caption, ("step", *(curve.name for curve in curves)), rows))


def round_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that cover a range."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(n * step, 12) for n in range(first, last + 1)]
