"""The page of an inspection: whether a layer needs a look, its findings, the heat map of each recipe, the pictures of
the worst tensors, and all numbers to unfold."""

from collections.abc import Mapping, Sequence

from octavo.inspection.advice import Advice
from octavo.inspection.heat import HeatMap, Sample, label, scale, shade_of, spoken
from octavo.inspection.picture import picture
from octavo.inspection.tensor_rows import HEADER, LayerState, TensorRow, cells
from octavo.inspection.webpage import (
    Card,
    Markup,
    bullets,
    cards,
    document,
    folded,
    heading,
    joined,
    link,
    paragraph,
    table,
    try_next,
)
from octavo.text import plural

PICTURES = 4  # of the worst tensors
PICTURED = (
    "Bars: the tensor's magnitudes, divided by the scale that its cast used. Ticks: the values that the format can "
    "hold. What is left of the ticks becomes zero, what is right of them saturates. Up to 262,144 values of each call."
)

States = Mapping[str, LayerState]


def page(
    states: States,
    rows: Sequence[TensorRow],
    findings: Sequence[str],
    advice: Sequence[Advice],
    made: str,
    command: str,
) -> str:
    """Return the page; `made` is its provenance, and `command` made it."""
    by_recipe: dict[str, list[str]] = {}
    for layer, state in states.items():
        by_recipe.setdefault(str(state.recipe), []).append(layer)
    heats = {
        recipe: _heat(f"recipe{place}", layers, rows, findings)
        for place, (recipe, layers) in enumerate(by_recipe.items())
    }
    ran = any(row.calls for row in rows)
    parts = [
        paragraph(made, soft=True),
        *([cards([_card(recipe, heat) for recipe, heat in heats.items()])] if ran else []),
        *([heading("Findings"), *(heat.findings() for heat in heats.values())] if findings else []),
        *_tried(advice),
        *([heading("What each recipe does to its layers"), scale()] if ran else []),
        *(heat.html(f"Layers in {recipe}, the worst first") for recipe, heat in heats.items() if ran),
        *_pictures(states, rows),
        *([_next(list(heats), findings, advice, command)] if ran else []),
        folded(
            "All numbers of all tensors",
            paragraph("SQNR of y, dx and dw, and the cosines, compare with the same layer in float32.", soft=True),
            table(HEADER, [cells(row) for row in rows], left=True),
        ),
    ]
    return document(headline(heats, rows), parts)


def headline(heats: Mapping[str, HeatMap], rows: Sequence[TensorRow]) -> str:
    """Return whether a layer needs a look, and which is the worst."""
    if not any(row.calls for row in rows):
        return "Nothing was measured: no layer ran in the block."
    layers, names = sum(len(heat.layers) for heat in heats.values()), ", ".join(heats)
    sick = sum(len(heat.sick) for heat in heats.values())
    found = [worst for heat in heats.values() if (worst := heat.worst()) is not None]
    worst = max(found, key=lambda one: one.shade, default=None)
    last = "" if worst is None else f"; the worst is {worst.name}, {worst.column} {worst.text}"
    if not sick:
        return f"Nothing stands out in {plural(layers, 'layer')} of {names}{last}"
    return f"{sick} of {plural(layers, 'layer')} need{'s' if sick == 1 else ''} a look in {names}{last}"


def _heat(name: str, layers: Sequence[str], rows: Sequence[TensorRow], findings: Sequence[str]) -> HeatMap:
    found: dict[str, dict[str, dict[str, float]]] = {layer: {} for layer in layers}
    for row in rows:
        if row.layer in found:
            found[row.layer][row.tensor] = row.numbers()
    heat = HeatMap(name, [Sample(None, found)], ())
    own = [sentence for sentence in findings if heat.layer_of(sentence) is not None]
    return HeatMap(name, [Sample(None, found)], own)


def _card(recipe: str, heat: HeatMap) -> Card:
    sick, worst = len(heat.sick), heat.worst()
    lines = (
        [] if worst is None else [joined("Worst: ", link(worst.name, worst.anchor), f", {worst.column} {worst.text}")]
    )
    small = f"of {plural(len(heat.layers), 'layer')} with a finding"
    return Card(recipe, str(sick), small, lines, "look" if sick else "ok")


def _pictures(states: States, rows: Sequence[TensorRow]) -> list[Markup]:
    """Return the pictures of the worst tensors that are cast."""
    cast = sorted((row for row in rows if row.cast and row.calls and any(row.values)), key=_badness, reverse=True)
    if not cast:
        return []
    drawn = []
    for row in cast[:PICTURES]:
        spec = states[row.layer].quantizer(row.tensor)
        drawn.append(picture(row, None if spec is None else spec.fmt))
    title = heading(
        f"The {plural(len(drawn), 'worst tensor')[2:] if len(drawn) == 1 else 'worst tensors'} in their formats"
    )
    return [title, paragraph(PICTURED, soft=True), Markup(f'<div class="pictures">{"".join(drawn)}</div>')]


def _badness(row: TensorRow) -> tuple[float, float]:
    """Return how bad a tensor's cast is: its darkest cell, then its underflow."""
    numbers = row.numbers()
    return shade_of(numbers), numbers.get("underflow", 0.0)


def _tried(advice: Sequence[Advice]) -> list[Markup]:
    """Return what other recipes would do."""
    if not advice:
        return []
    rows = [
        [f"{label(one.layer)}, {one.tensor} {one.number}", name, spoken(value, one.number)]
        for one in advice
        for name, value in ((f"{one.in_use}, in use", one.before), *one.tried)
    ]
    numbers = folded("All that were tried", table(("measured", "recipe", ""), rows, left=True))
    return [heading("Tried on the same batches"), bullets([str(one) for one in advice]), numbers]


def _next(recipes: Sequence[str], findings: Sequence[str], advice: Sequence[Advice], command: str) -> Markup:
    target = command.split()[2] if command.startswith("octavo inspect ") else "mymodule:example"
    chosen = f' --recipe "{recipes[0]}"' if len(recipes) == 1 else ""
    if any(one.recipe is not None for one in advice):
        said = "Inspect the model again, with the recipes that helped."
        return try_next(said, [f"octavo inspect {target} --policy policy.toml"])
    if findings:
        said = "Try other recipes for the layers with findings on the same batch, and write the best ones as a policy."
        return try_next(said, [f"octavo inspect {target}{chosen} --write-policy policy.toml"])
    other = "fp8-block" if recipes[0] != "fp8-block" else "mxfp8"
    said = "Compare its gradients with those of another recipe."
    return try_next(said, [f'octavo compare {target} "{recipes[0]}" {other} --html compare.html'])
