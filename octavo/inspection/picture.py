"""The picture of a format: a tensor's magnitudes as a histogram, over the values that its format can hold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import NamedTuple

import torch

from octavo.errors import UnsupportedConfig
from octavo.formats import FORMATS, Format
from octavo.inspection.heat import shade_of, spoken
from octavo.inspection.raster import Box, Colour, Label, png
from octavo.inspection.statistics import LOWEST
from octavo.inspection.tensor_rows import LayerState, TensorRow
from octavo.inspection.webpage import Markup, heading, paragraph, section
from octavo.text import path_names

WIDE, HIGH, SIDE, TOP, FLOOR = 480, 200, 30, 26, 136  # of a picture; where its bars stand
PICTURES = 4  # of the worst tensors on a page
PICTURED = (
    "Bars: the tensor's magnitudes, divided by the scale that its cast used, as shares of the values that are not "
    "zero. Ticks: the values that the format can hold. Values below the first tick become zero, values above the last "
    "one saturate. Up to 262,144 values of each call."
)
SVG_COLOURS = {
    "bar": "var(--first,#2f6fde)", "lost": "rgb(var(--bad,194 65 12))", "tick": "var(--ink,#1d2129)",
    "axis": "var(--soft,#5b6270)",
}  # fmt: skip
PNG_COLOURS: dict[str, Colour] = {
    "bar": (47, 111, 222), "lost": (194, 65, 12), "tick": (29, 33, 41), "axis": (91, 98, 112), "text": (60, 66, 80),
    "ground": (255, 255, 255),
}  # fmt: skip
OWN_STYLE = (  # of a picture that is no part of a page
    "svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#5b6270}@media(prefers-color-scheme:dark){"
    "svg{background:#15181d;--ink:#e8eaee;--soft:#a3abb8;--first:#6ea0f5;--bad:226 96 36}text{fill:#a3abb8}}"
)
RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


class Histogram(NamedTuple):
    """The numbers of a picture, as plain data.

    Args:
        layer: the layer's path.
        tensor: the tensor's name.
        cast: the quantizer's string; "" if the tensor is not cast.
        format: its format's name, or "".
        underflow: the share of values that become zero; None without a cast.
        saturated: the share of values beyond the largest code; None without a cast.
        amax: the largest magnitude.
        counts: how many magnitudes are in each power of two.
    """

    layer: str
    tensor: str
    cast: str
    format: str
    underflow: float | None
    saturated: float | None
    amax: float
    counts: Sequence[float]


def caption(found: Histogram) -> str:
    """Return in words what the picture shows."""
    name = f"{found.layer or '(model)'}, {found.tensor}"
    if found.underflow is None or found.saturated is None:
        return f"{name}: amax {found.amax:.3g}."
    zero, beyond = spoken(found.underflow, "underflow"), spoken(found.saturated, "saturated")
    return (
        f"{name} in {found.cast}: {zero} of its values become zero, {beyond} are beyond the largest code; "
        f"amax {found.amax:.3g}."
    )


@dataclass(frozen=True)
class Picture:
    """A drawing, which notebooks show by itself. `octavo.inspect(model).draw(layer, tensor)` returns one.

    Args:
        histogram: the numbers that are drawn.

    Example:
        >>> model = nn.Sequential(octavo.Linear(64, 32, recipe="mxfp8"))
        >>> with octavo.inspect(model) as report:
        ...     y = model(torch.randn(16, 64))
        >>> picture = report.draw("0", "x")
        >>> picture.svg[:4], picture.png[1:4]
        ('<svg', b'PNG')
    """

    histogram: Histogram

    @cached_property
    def svg(self) -> str:
        """The text of an SVG file."""
        return _svg(self.histogram, f"<style>{OWN_STYLE}</style>", ' xmlns="http://www.w3.org/2000/svg"')

    @cached_property
    def png(self) -> bytes:
        """The bytes of a PNG file."""
        return png(WIDE, HIGH, _shapes(self.histogram), PNG_COLOURS)

    def save(self, path: str) -> None:
        """Write a file.

        Args:
            path: the file; one that ends in .png is a PNG file, and any other an SVG file.
        """
        data = self.png if str(path).lower().endswith(".png") else self.svg.encode()
        with open(path, "wb") as file:
            file.write(data)

    def _repr_html_(self) -> str:
        return f"<figure>{self.svg}<figcaption>{escape(caption(self.histogram))}</figcaption></figure>"


def worst_of(states: Mapping[str, LayerState], rows: Sequence[TensorRow], most: int = PICTURES) -> list[Histogram]:
    """Return the histograms of the tensors whose casts are worst: by their darkest cell, then by underflow."""

    def badness(row: TensorRow) -> tuple[float, float]:
        numbers = row.numbers()
        return shade_of(numbers), numbers.get("underflow", 0.0)

    cast = sorted((row for row in rows if row.cast and row.calls and any(row.values)), key=badness, reverse=True)
    return [_histogram(states, row) for row in cast[:most]]


def pictures(by_recipe: Mapping[str, Sequence[Histogram]]) -> Markup:
    """Return the part of a page with the pictures of tensors; nothing if there are none."""
    drawn = []
    for recipe, found in by_recipe.items():
        figures = "".join(
            f"<figure>{_svg(one, '')}<figcaption>{escape(caption(one))}</figcaption></figure>" for one in found
        )
        if figures:
            drawn += [
                *([heading(recipe, 3)] if len(by_recipe) > 1 else []),
                Markup(f'<div class="pictures">{figures}</div>'),
            ]
    return (
        section("The worst tensors in their formats", paragraph(PICTURED, soft=True), *drawn) if drawn else Markup("")
    )


def drawing(states: Mapping[str, LayerState], rows: Sequence[TensorRow], layer: str, tensor: str) -> Picture:
    """Return a tensor's picture as a file of its own. Raise if nothing was measured of it."""
    row = next((row for row in rows if (row.layer, row.tensor) == (layer, tensor) and row.calls), None)
    if row is None:
        own = ", ".join(row.tensor for row in rows if row.layer == layer and row.calls)
        raise UnsupportedConfig(
            f"Nothing was measured of {tensor!r} of {layer!r}. "
            + (f"Measured there: {own}." if own else f"Layers of this report: {path_names(states)}.")
        )
    return Picture(_histogram(states, row))


def codes_of(fmt: Format) -> list[float]:
    """Return the magnitudes that a format can hold, without zero."""
    values = fmt.decode(torch.arange(2**fmt.bits, dtype=torch.uint8, device="cpu")).tolist()
    return sorted({value for value in values if 0 < value <= fmt.max})


def _histogram(states: Mapping[str, LayerState], row: TensorRow) -> Histogram:
    spec = states[row.layer].quantizer(row.tensor)
    name = "" if spec is None else spec.fmt.name
    return Histogram(row.layer, row.tensor, row.cast, name, row.underflow, row.saturated, row.amax, row.values)


# -- the drawing -------------------------------------------------------------------------------------------------------


class _Axis:
    """Powers of two from left to right."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.unit = (WIDE - 2 * SIDE) / (high - low)

    def x(self, exponent: float) -> float:
        return SIDE + self.unit * (min(max(exponent, self.low), self.high) - self.low)


def _svg(found: Histogram, style: str, attributes: str = "") -> str:
    drawn = "".join(map(_element, _shapes(found)))
    label = escape(f"Histogram of magnitudes. {caption(found)}")
    return f'<svg{attributes} viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{label}">{style}{drawn}</svg>'


def _element(shape: Box | Label) -> str:
    if isinstance(shape, Label):
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        return f'<text x="{shape.x:.1f}" y="{shape.y:.0f}"{anchor}>{escape(shape.text)}</text>'
    opacity = "" if shape.opacity == 1 else f' fill-opacity="{shape.opacity}"'
    box = (
        f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" '
        f'fill="{SVG_COLOURS[shape.colour]}"{opacity}'
    )
    return f"{box}><title>{escape(shape.title)}</title></rect>" if shape.title else f"{box}/>"


def _shapes(found: Histogram) -> list[Box | Label]:
    fmt = FORMATS[found.format] if found.format else None
    codes = [] if fmt is None else codes_of(fmt)
    axis = _axis(found.counts, codes)
    ticks = [Box(axis.x(math.log2(code)), FLOOR + 4, 0.7, 12, "tick") for code in codes]
    return [*_lost(axis, codes), *_bars(axis, found.counts), *ticks, *_axis_text(axis, found.counts, fmt)]


def _axis(counts: Sequence[float], codes: Sequence[float]) -> _Axis:
    """Return the range of the values that occur and of those that the format can hold."""
    ends = [LOWEST + i for i, n in enumerate(counts) if n] + [math.floor(math.log2(code)) for code in codes]
    low, high = min(ends, default=-1), max(ends, default=1) + 1
    return _Axis(low - 2, high + 2) if codes else _Axis(low, high)


def _lost(axis: _Axis, codes: Sequence[float]) -> list[Box | Label]:
    """Return the ranges in which values become zero, and saturate."""
    if not codes:
        return []
    zero, largest = axis.x(math.log2(codes[0]) - 1), axis.x(math.log2(codes[-1]))
    return [
        Box(SIDE, TOP, zero - SIDE, FLOOR - TOP, "lost", 0.16),
        Box(largest, TOP, WIDE - SIDE - largest, FLOOR - TOP, "lost", 0.16),
        Label(SIDE, TOP - 8, "becomes zero"),
        Label(WIDE - SIDE, TOP - 8, "saturates", "end"),
    ]


def _bars(axis: _Axis, counts: Sequence[float]) -> list[Box | Label]:
    whole, highest = sum(counts), max(counts, default=0)
    found: list[Box | Label] = []
    for place, count in enumerate(counts):
        if count:
            x, height = axis.x(LOWEST + place), (FLOOR - TOP) * count / highest
            said = f"{100 * count / whole:.2f} % from {_power(LOWEST + place)}"
            found.append(Box(x + 0.5, FLOOR - height, max(axis.unit - 1, 0.5), height, "bar", 1.0, said))
    return found


def _axis_text(axis: _Axis, counts: Sequence[float], fmt: Format | None) -> list[Box | Label]:
    stride = next(n for n in (1, 2, 4, 8, 16, 32, 64) if (axis.high - axis.low) / n <= 10)
    first = -(-axis.low // stride) * stride
    found: list[Box | Label] = [Box(SIDE, FLOOR, WIDE - 2 * SIDE, 1, "axis")]
    for exponent in range(first, axis.high + 1, stride):
        found.append(Label(axis.x(exponent), FLOOR + 34, _power(exponent), "middle"))
    if whole := sum(counts):
        found += [
            Label(SIDE - 4, TOP + 10, f"{max(counts) / whole:.0%}", "end"),
            Label(SIDE - 4, FLOOR, "0", "end"),
        ]
    title = "magnitude" if fmt is None else f"magnitude over its scale; a tick for each value of {fmt.name}"
    return [*found, Label(WIDE / 2, HIGH - 6, title, "middle")]


def _power(exponent: int) -> str:
    return "2" + str(exponent).translate(RAISED)
