"""The picture of a format: a tensor's magnitudes as a histogram, over the values that its format can hold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from octavo.errors import UnsupportedConfig
from octavo.formats import Format
from octavo.inspection.statistics import LOWEST
from octavo.inspection.tensor_rows import LayerState, TensorRow, percent
from octavo.inspection.webpage import Markup
from octavo.text import path_names

WIDE, HIGH, SIDE, TOP, FLOOR = 480, 200, 12, 26, 136  # of a picture; where its bars stand
INK, SOFT, BAR, BAD = "var(--ink,#1d2129)", "var(--soft,#5b6270)", "var(--first,#2f6fde)", "rgb(var(--bad,194 65 12))"
OWN_STYLE = (  # of a picture that is no part of a page
    "svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#5b6270}@media(prefers-color-scheme:dark){"
    "svg{background:#15181d;--ink:#e8eaee;--soft:#a3abb8;--first:#6ea0f5;--bad:226 96 36}text{fill:#a3abb8}}"
)


@dataclass(frozen=True)
class Picture:
    """A drawing, which notebooks show by itself. `octavo.inspect(model).draw(layer, tensor)` returns one.

    Args:
        svg: the text of an SVG file.
    """

    svg: str

    def save(self, path: str) -> None:
        """Write the SVG file.

        Args:
            path: the file.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)

    def _repr_svg_(self) -> str:
        return self.svg


def picture(row: TensorRow, fmt: Format | None) -> Markup:
    """Return a row's picture as a figure of a page."""
    return Markup(f"<figure>{_drawn(row, fmt, '')}<figcaption>{escape(caption(row, fmt))}</figcaption></figure>")


def drawing(states: Mapping[str, LayerState], rows: Sequence[TensorRow], layer: str, tensor: str) -> Picture:
    """Return a tensor's picture as a file of its own. Raise if nothing was measured of it."""
    row = next((row for row in rows if (row.layer, row.tensor) == (layer, tensor) and row.calls), None)
    if row is None:
        own = ", ".join(row.tensor for row in rows if row.layer == layer and row.calls)
        raise UnsupportedConfig(
            f"Nothing was measured of {tensor!r} of {layer!r}. "
            + (f"Measured there: {own}." if own else f"Layers of this report: {path_names(states)}.")
        )
    spec = states[layer].quantizer(tensor)
    style = f"<style>{OWN_STYLE}</style>"
    return Picture(_drawn(row, None if spec is None else spec.fmt, style, ' xmlns="http://www.w3.org/2000/svg"'))


def caption(row: TensorRow, fmt: Format | None) -> str:
    """Return in words what a picture shows."""
    name = f"{row.layer or '(model)'}, {row.tensor}"
    if fmt is None or row.underflow is None or row.saturated is None:
        return f"{name}: amax {row.amax:.3g}."
    return (
        f"{name} in {row.cast}: {percent(row.underflow)} of its values become zero, {percent(row.saturated)} are "
        f"beyond the largest code; amax {row.amax:.3g}."
    )


def codes_of(fmt: Format) -> list[float]:
    """Return the magnitudes that a format can hold, without zero."""
    steps = round(fmt.min_normal / fmt.min_subnormal)
    found = [k * fmt.min_subnormal for k in range(1, steps)]
    unit = fmt.min_normal
    while unit <= fmt.max:
        found += [unit * (1 + k / steps) for k in range(steps)]
        unit *= 2
    return [value for value in found if value <= fmt.max]


class _Axis:
    """Powers of two from left to right."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.unit = (WIDE - 2 * SIDE) / (high - low)

    def x(self, exponent: float) -> float:
        return SIDE + self.unit * (min(max(exponent, self.low), self.high) - self.low)


def _drawn(row: TensorRow, fmt: Format | None, style: str, attributes: str = "") -> str:
    codes = [] if fmt is None else codes_of(fmt)
    axis = _axis(row.values, codes)
    parts = [*_lost(axis, codes), *_bars(axis, row.values), *_ticks(axis, codes), *_axis_text(axis, fmt)]
    label = escape(f"Histogram of magnitudes. {caption(row, fmt)}")
    return f'<svg{attributes} viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{label}">{style}{"".join(parts)}</svg>'


def _axis(counts: Sequence[float], codes: Sequence[float]) -> _Axis:
    """Return the range of the values that occur and of those that the format can hold."""
    ends = [LOWEST + i for i, n in enumerate(counts) if n] + [math.floor(math.log2(code)) for code in codes]
    low, high = min(ends, default=-1), max(ends, default=1) + 1
    return _Axis(low - 2, high + 2) if codes else _Axis(low, high)


def _lost(axis: _Axis, codes: Sequence[float]) -> list[str]:
    """Return the ranges in which values become zero, and saturate."""
    if not codes:
        return []
    zero, largest = axis.x(math.log2(codes[0]) - 1), axis.x(math.log2(codes[-1]))
    shade = f'y="{TOP}" height="{FLOOR - TOP}" fill="{BAD}" fill-opacity="0.16"'
    return [
        f'<rect x="{SIDE}" width="{zero - SIDE:.1f}" {shade}/>',
        f'<rect x="{largest:.1f}" width="{WIDE - SIDE - largest:.1f}" {shade}/>',
        f'<text x="{SIDE}" y="{TOP - 8}">becomes zero</text>',
        f'<text x="{WIDE - SIDE}" y="{TOP - 8}" text-anchor="end">saturates</text>',
    ]


def _bars(axis: _Axis, counts: Sequence[float]) -> list[str]:
    whole, highest = sum(counts), max(counts, default=0)
    found = []
    for place, count in enumerate(counts):
        if count:
            x, height = axis.x(LOWEST + place), (FLOOR - TOP) * count / highest
            found.append(
                f'<rect x="{x + 0.5:.1f}" y="{FLOOR - height:.1f}" width="{max(axis.unit - 1, 0.5):.1f}" '
                f'height="{height:.1f}" fill="{BAR}"><title>{count / whole:.2%} from 2^{LOWEST + place}</title></rect>'
            )
    return found


def _ticks(axis: _Axis, codes: Sequence[float]) -> list[str]:
    """Return a tick for each value that the format can hold."""
    places = "".join(f"M{axis.x(math.log2(code)):.1f} {FLOOR + 4}v12" for code in codes)
    return [f'<path d="{places}" stroke="{INK}" stroke-width="0.7" fill="none"/>'] if places else []


def _axis_text(axis: _Axis, fmt: Format | None) -> list[str]:
    stride = next(n for n in (1, 2, 4, 8, 16, 32, 64) if (axis.high - axis.low) / n <= 10)
    first = -(-axis.low // stride) * stride
    found = [f'<line x1="{SIDE}" x2="{WIDE - SIDE}" y1="{FLOOR}" y2="{FLOOR}" stroke="{SOFT}"/>']
    for exponent in range(first, axis.high + 1, stride):
        if SIDE + 8 < axis.x(exponent) < WIDE - SIDE - 8:
            found.append(f'<text x="{axis.x(exponent):.1f}" y="{FLOOR + 34}" text-anchor="middle">2^{exponent}</text>')
    title = "magnitude" if fmt is None else f"magnitude over its scale; a tick for each value of {fmt.name}"
    return [*found, f'<text x="{WIDE / 2}" y="{HIGH - 6}" text-anchor="middle">{title}</text>']
