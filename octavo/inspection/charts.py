"""Charts as SVG, for pages: curves over the steps of runs, which scale with the window, and small ones for the cells of
tables. Colours follow the page's."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from octavo.inspection.webpage import Markup, named

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 800, 300, 52, 12, 12, 28  # of a figure, and of the margins around its curves
BAR = 240  # pixels of the longest bar of a pair
CELL = (96, 24)  # width and height of a histogram


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


def figure(curves: Sequence[Curve], caption: str, *, zero: bool = False) -> Markup:
    """Return curves over the steps, with a legend. `zero` keeps zero in view, and draws it."""
    values = [v for curve in curves for v in curve.extent()]
    if not values:
        return Markup("")
    values += [0.0] if zero else []
    low, high = min(values), max(values)
    ticks = round_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    steps = max(len(curve.values) for curve in curves)

    def x(step: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * (step - 1) / max(steps - 1, 1)

    def y(value: float) -> float:
        return TOP + (HIGH - TOP - BOTTOM) * (high - min(max(value, low), high)) / ((high - low) or 1.0)

    def points(places: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in places)

    drawn = []
    for tick in ticks:
        stroke = "var(--soft)" if zero and tick == 0 else "var(--line)"
        drawn.append(f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="{stroke}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for step in sorted({1, *(round(steps * part / 4) for part in range(1, 5))} - {0}):
        anchor = "start" if step == 1 else "end" if step == steps else "middle"
        drawn.append(f'<text x="{x(step):.1f}" y="{HIGH - 8}" text-anchor="{anchor}">{step}</text>')
    for curve in curves:
        if around := curve.with_band():
            outline = [(i, v + b) for i, v, b in around] + [(i, v - b) for i, v, b in reversed(around)]
            drawn.append(f'<polygon points="{points(outline)}" fill="{curve.colour}" fill-opacity="0.18"/>')
    for curve in curves:
        line = points([(i, v) for i, v in enumerate(curve.values, 1) if math.isfinite(v)])
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{curve.colour}" stroke-width="2"/>')
    legend = " ".join(f"<span>{named(curve.colour, curve.name)}</span>" for curve in curves)
    label = escape(f"{caption}: {', '.join(curve.name for curve in curves)}")
    return Markup(
        f'<figure><svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'
        f"<figcaption>{escape(caption)}. {legend}</figcaption></figure>"
    )


def round_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that cover a range."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(n * step, 12) for n in range(first, last + 1)]


def histogram(counts: Sequence[float], shown: range, mark: int, title: Callable[[int], str]) -> Markup:
    """Return a bar for each bin of `shown` that has a count, as high as its share of the largest; its title says the
    share in numbers, and where the bin is. A dashed line is at the beginning of the bin `mark`."""
    highest = max(counts, default=0)
    if not highest:
        return Markup("")
    width, height = CELL
    step = width / len(shown)
    bars = "".join(
        f'<rect x="{(i - shown.start) * step:.1f}" y="{height - height * n / highest:.1f}" width="{step:.1f}" '
        f'height="{height * n / highest:.1f}"><title>{n / sum(counts):.1%} {escape(title(i))}</title></rect>'
        for i, n in enumerate(counts)
        if n
    )
    line = f"{(mark - shown.start) * step:.1f}"
    return Markup(
        f'<svg width="{width}" height="{height}" role="img">{bars}'
        f'<line x1="{line}" x2="{line}" y1="0" y2="{height}"/></svg>'
    )


def bars(first: float, second: float, largest: float) -> Markup:
    """Return two bars, one above the other, in parts of the largest of the table; a value that is not finite has
    none."""
    wide = [BAR * (value if math.isfinite(value) else 0.0) / largest for value in (first, second)]
    return Markup(
        f'<svg width="{BAR}" height="18" role="img"><rect y="1" height="7" width="{wide[0]:.1f}"/>'
        f'<rect y="10" height="7" width="{wide[1]:.1f}" class="second"/></svg>'
    )
