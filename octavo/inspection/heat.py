"""The heat map of a recipe: its layers by what they measure, the worst first, each cell shaded by one stated scale."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from octavo.inspection.webpage import Cell, HeatRow, Markup, bullets, folded, heat_map, joined, link, shading
from octavo.text import one_line, plural

# columns of a layer's row: the number, the tensors that have it, the values at which a cell is not and is fully shaded
COLUMNS = (
    ("underflow", ("x", "w", "dy"), 0.02, 0.3),
    ("saturated", ("x", "w", "dy"), 0.0, 0.05),
    ("nonfinite", ("x", "w", "dy", "y", "dx", "dw"), 0.0, 0.01),
    ("sqnr", ("x", "w", "dy", "y"), 24.0, 12.0),  # a bell curve has 25 in E5M2, 31 in E4M3
    ("cosine", ("dx", "dw"), 0.999, 0.95),
)
RARE = ("saturated", "nonfinite")  # a column of zeros would only widen the table
SEEN = 5e-5  # the least share that is not shown as less than a hundredth of a percent
TITLES = {"sqnr": "SQNR", "nonfinite": "not finite"}
SHADING = (
    "A cell is unshaded at 2 % underflow, no saturation, 24 dB or a cosine of 0.999, and fully shaded at 30 % "
    "underflow, 5 % saturation, 12 dB or 0.95; one scale for all recipes, so that pages compare. "
)
MEANING = (
    "Underflow: values that are not zero and become zero; saturated: values beyond the largest code; SQNR: signal to "
    "quantization noise; cosine: that of dx and dw with those of the same layer in float32."
)
FEWEST = 8  # rows that are shown at least

Numbers = Mapping[str, Mapping[str, Mapping[str, float]]]  # by layer, tensor and number


class Sample(NamedTuple):
    """The measures of a step, or of a whole block if `step` is None."""

    step: int | None
    layers: Numbers

    def number(self, layer: str, tensor: str, number: str) -> float | None:
        return self.layers.get(layer, {}).get(tensor, {}).get(number)


class Worst(NamedTuple):
    """The most shaded cell of a recipe."""

    name: str  # of the layer
    anchor: str  # of its row
    column: str
    text: str
    shade: float

    def line(self) -> Markup:
        """Return the line of a card."""
        return joined("Worst: ", link(self.name, self.anchor), f", {self.column} {self.text}")


class HeatMap:
    """A recipe's heat map. `name` tells its anchors from those of other recipes on the page. Findings of other layers
    are left out."""

    def __init__(self, name: str, samples: Sequence[Sample], findings: Sequence[str]) -> None:
        self._samples = samples
        self.layers = list(dict.fromkeys(layer for sample in samples for layer in sample.layers))
        self._columns: list[tuple[str, str, str, float, float]] = []
        for number, tensors, good, bad in COLUMNS:
            for tensor in tensors:
                found = [value for layer in self.layers for value in self._by_step(layer, tensor, number).values()]
                if any(value >= SEEN for value in found) if number in RARE else found:
                    self._columns.append((f"{tensor} {TITLES.get(number, number)}", number, tensor, good, bad))
        rows = [self._row(f"{name}-{place}", layer) for place, layer in enumerate(self.layers)]
        worst_first = sorted(zip(self.layers, rows, strict=True), key=lambda entry: -entry[1].shade)
        self._rows = dict(worst_first)
        starts = sorted(self.layers, key=lambda layer: -len(label(layer)))  # a path may begin with another
        named = [(next((own for own in starts if text.startswith(f"{label(own)}: ")), None), text) for text in findings]
        self._findings = [(layer, text) for layer, text in named if layer is not None]

    @property
    def sick(self) -> list[str]:
        """The layers that have a finding."""
        return list(dict.fromkeys(layer for layer, _ in self._findings))

    def anchor(self, layer: str) -> str:
        return self._rows[layer].anchor if layer in self._rows else ""

    def worst(self) -> Worst | None:
        """Return the most shaded cell; None if none is shaded."""
        found = [
            Worst(row.name, row.anchor, column[0], cell.text, cell.shade)
            for row in self._rows.values()
            for column, cell in zip(self._columns, row.cells, strict=True)
            if cell.shade > 0
        ]
        return max(found, key=lambda worst: worst.shade, default=None)

    def findings(self) -> Markup:
        """Return the findings, each linked to its layer's row; of many the first few, and the rest folded."""
        found = [
            joined(link(label(layer), self.anchor(layer)), link(text.removeprefix(label(layer)), ""))
            for layer, text in self._findings
        ]
        shown = bullets(found[:FEWEST]) if found else Markup("")
        if rest := found[FEWEST:]:
            return joined(shown, folded(f"{plural(len(rest), 'more finding')}", bullets(rest)))
        return shown

    def ordered(self) -> list[str]:
        """Return the layers: those with a finding, then the worst first."""
        sick = set(self.sick)
        return sorted(self._rows, key=lambda layer: layer not in sick)

    def caption(self, recipe: str) -> str:
        """Return what the map shows, and in which order."""
        order = "the worst first" if self.sick or self.worst() is not None else "none of them shaded"
        return f"Layers in {recipe}, {order}"

    def html(self, caption: str) -> Markup:
        """Return the rows; layers without a finding are folded after the worst few."""
        if not self._columns:
            return Markup("")
        ordered, shown = [self._rows[layer] for layer in self.ordered()], max(FEWEST, len(self.sick))
        header = ["layer", *(column[0] for column in self._columns)]
        parts = [heat_map(caption, header, ordered[:shown])]
        if rest := ordered[shown:]:
            said = f"{len(rest)} more layer{'s' if len(rest) > 1 else ''} without a finding"
            parts.append(folded(said, heat_map(f"{caption}, the rest", header, rest)))
        return Markup("\n".join(parts))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _row(self, anchor: str, layer: str) -> HeatRow:
        cells = [
            self._cell(self._by_step(layer, tensor, number), number, (good, bad))
            for _, number, tensor, good, bad in self._columns
        ]
        return HeatRow(label(layer), cells, anchor)

    def _by_step(self, layer: str, tensor: str, number: str) -> dict[int | None, float]:
        """Return a number of a layer's tensor by step, where it exists."""
        found = {sample.step: sample.number(layer, tensor, number) for sample in self._samples}
        return {step: value for step, value in found.items() if value is not None}

    def _cell(self, by_step: Mapping[int | None, float], number: str, bounds: tuple[float, float]) -> Cell:
        """Return the mean, shaded by how bad it is; each step's value is in the title."""
        if not by_step:
            return Cell("–")
        mean = fmean(by_step.values())
        each = ", ".join(f"step {step}: {spoken(value, number)}" for step, value in by_step.items() if step is not None)
        return Cell(spoken(mean, number), shaded(mean, bounds), each)


def shaded(value: float, bounds: tuple[float, float]) -> float:
    """Return how dark a cell is, of the values at which it is not and is fully shaded."""
    good, bad = bounds
    return min(max((value - good) / (bad - good), 0.0), 1.0) if math.isfinite(value) else 1.0


def shade_of(numbers: Mapping[str, float]) -> float:
    """Return how bad the worst of a tensor's numbers is; above 1 it is beyond what a heat map shades."""
    found = [(numbers[name] - good) / (bad - good) for name, _, good, bad in COLUMNS if name in numbers]
    return max(found, default=0.0)


def scale() -> Markup:
    """Return what the shades of all heat maps of a page mean."""
    return shading(SHADING + MEANING)


def label(layer: str) -> str:
    """Return a layer's path as a page and a finding name it."""
    return one_line(layer) or "(model)"


def spoken(value: float, number: str) -> str:
    """Return a number as text."""
    if number == "sqnr":
        return f"{value:.1f} dB"
    if number == "cosine":
        return f"{value:.4f}"
    return "0 %" if value == 0 else f"{100 * value:.2f} %" if value >= 5e-5 else "< 0.01 %"
