"""A layer's numbers by step: what its casts make zero, how well its gradients agree with float32, and its scales."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from octavo.inspection.heat import HeatMap, Sample, label, spoken
from octavo.inspection.webpage import Markup, folded, heading, joined, link, paragraph, section, table

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 320, 130, 54, 8, 22, 24  # of a chart, and the margins around its lines
POINTS, LISTED = 60, 12  # the most steps of a line, and of a table
OPEN, DRAWN, BUDGET = 4, 64, 2400  # layers that are not folded; those that are drawn; points of all layers together
SAID = (
    "One point for each measured step. Scale: the geometric mean of the scales, to a power of two; a scale multiplies "
    "codes back to values."
)
LINES = {"x": ("#2f7ed8", ""), "w": ("#2a9d6f", "7 3"), "dy": ("#d9822b", "2 3"), "dx": ("#a855c7", ""),
         "dw": ("#c2416b", "7 3")}  # fmt: skip

SIGNS = {"": "—", "7 3": "‒‒", "2 3": "···"}  # of dashes, in a legend


class Measure(NamedTuple):
    """A chart: its title, the number, the tensors that have it, and the value that is drawn for a number."""

    title: str
    number: str
    tensors: tuple[str, ...]
    drawn: Callable[[float], float]


MEASURES = (
    Measure("become zero, %", "underflow", ("x", "w", "dy"), lambda value: 100 * value),
    Measure("cosine with float32", "cosine", ("dx", "dw"), lambda value: value),
    Measure("scale, log₂", "scale", ("x", "w", "dy"), math.log2),
)


def timelines(samples: Sequence[Sample], heat: HeatMap, recipe: str) -> Markup:
    """Return the charts of each layer by step, in the order of the heat map; nothing for fewer than two steps."""
    found = [sample for sample in samples if sample.step is not None]
    if len(found) < 2:
        return Markup("")
    layers = heat.ordered()
    drawn = [_layer(found, layer, heat, recipe, min(POINTS, max(8, BUDGET // len(layers)))) for layer in layers[:DRAWN]]
    rest = "".join(drawn[OPEN:])
    more = len(layers) - DRAWN
    parts = [paragraph(SAID, soft=True), *drawn[:OPEN]]
    if rest:
        count = len(drawn) - OPEN
        parts.append(folded(f"{count} more layer{'s' if count > 1 else ''} by step", Markup(rest)))
    if more > 0:
        parts.append(paragraph(f"{more} more layers are not drawn: report.to_dict() has their numbers.", soft=True))
    return section(f"By step: {recipe}", *parts)


def _layer(samples: Sequence[Sample], layer: str, heat: HeatMap, recipe: str, most: int) -> Markup:
    taken = _spaced(samples, most)
    charts = "".join(_chart(taken, layer, measure) for measure in MEASURES)
    title = heading(joined(link(label(layer), heat.anchor(layer))), 3)
    columns = [(measure, tensor) for measure in MEASURES for tensor in measure.tensors]
    listed = _spaced(samples, LISTED)
    rows = [
        [str(sample.step), *(_said(sample.number(layer, tensor, m.number), m.number) for m, tensor in columns)]
        for sample in listed
    ]
    header = ["step", *(f"{tensor} {measure.number}" for measure, tensor in columns)]
    numbers = folded("The numbers", table(f"{label(layer)} in {recipe} by step", header, rows))
    return Markup(f'{title}<div class="charts">{charts}</div>{numbers}')


def _spaced(samples: Sequence[Sample], most: int) -> list[Sample]:
    """Return so many samples, evenly spaced, the last one among them."""
    stride = -(-len(samples) // most)
    return list(samples[::-1][::stride][::-1])


def _said(value: float | None, number: str) -> str:
    if value is None:
        return "–"
    return f"2^{math.log2(value):.1f}" if number == "scale" else spoken(value, number)


def _chart(samples: Sequence[Sample], layer: str, measure: Measure) -> str:
    lines: dict[str, list[tuple[int, float]]] = {}
    for tensor in measure.tensors:
        values = [(sample.step or 0, sample.number(layer, tensor, measure.number)) for sample in samples]
        known = [(step, measure.drawn(value)) for step, value in values if value is not None]
        if known:
            lines[tensor] = known
    if not lines:
        return ""
    every = [value for line in lines.values() for _, value in line]
    low, high = min(every), max(every)
    low, high = (low, high) if high - low > 1e-9 * max(abs(high), 1e-9) else (low - 1e-3, high + 1e-3)
    digits = 4 if measure.number == "cosine" else 3
    first, last = samples[0].step or 0, samples[-1].step or 0

    def x(step: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return TOP + (HIGH - TOP - BOTTOM) * (high - value) / (high - low)

    drawn = [
        f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(v):.0f}" y2="{y(v):.0f}" stroke="var(--line)"/>'
        f'<text x="{LEFT - 5}" y="{y(v) + 4:.0f}" text-anchor="end">{v:.{digits}g}</text>'
        for v in (low, high)
    ]
    for step, anchor in ((first, "start"), (last, "end")):
        drawn.append(f'<text x="{x(step):.0f}" y="{HIGH - 8}" text-anchor="{anchor}">{step}</text>')
    drawn.append(f'<text x="{(LEFT + WIDE - RIGHT) / 2:.0f}" y="{HIGH - 8}" text-anchor="middle">step</text>')
    drawn.append(f'<text x="{LEFT}" y="12">{escape(measure.title)}</text>')
    for tensor, line in lines.items():
        colour, dash = LINES[tensor]
        points = " ".join(f"{x(step):.0f},{y(value):.1f}" for step, value in line)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        said = f"{tensor}: {line[0][1]:.4g} at step {line[0][0]}, {line[-1][1]:.4g} at step {line[-1][0]}"
        drawn.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashed}>'
            f"<title>{said}</title></polyline>"
        )
    names = " ".join(f'{tensor} <tspan fill="{LINES[tensor][0]}">{SIGNS[LINES[tensor][1]]}</tspan>' for tensor in lines)
    drawn.append(f'<text x="{WIDE - RIGHT}" y="12" text-anchor="end">{names}</text>')
    said = escape(f"{measure.title} of {label(layer)} by step: {', '.join(lines)}")
    return f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{said}">{"".join(drawn)}</svg>'
