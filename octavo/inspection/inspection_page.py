"""The page of an inspection: whether a layer needs a look, its findings, the heat map of each recipe, the pictures of
the worst tensors, and all numbers to unfold."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from octavo.inspection import webpage as web
from octavo.inspection.advice import Advice, policy_of
from octavo.inspection.findings import TRY
from octavo.inspection.heat import HeatMap, Sample, label, scale, spoken
from octavo.inspection.picture import pictures, worst_of
from octavo.inspection.provenance import Subject, provenance
from octavo.inspection.tensor_rows import HEADER, LayerState, TensorRow, by_layer, cells
from octavo.inspection.timeline import timelines
from octavo.text import plural

RELOAD = 30  # seconds, while the block runs
RUNNING = f"The program still runs: this page is rewritten at each measured step, and reloads every {RELOAD} seconds."
POLICY_FILE = "policy.toml"

States = Mapping[str, LayerState]


class Made(NamedTuple):
    """How an inspection was made."""

    subject: Subject
    measured: str  # how many layers and steps
    command: str = ""
    running: bool = False


def page(
    states: States,
    rows: Sequence[TensorRow],
    findings: Sequence[str],
    advice: Sequence[Advice],
    samples: Sequence[Sample],
    made: Made,
) -> str:
    """Return the page. `samples` are the numbers of single steps, of which a live page has a time axis."""
    by_recipe: dict[str, list[str]] = {}
    for layer, state in states.items():
        by_recipe.setdefault(str(state.recipe), []).append(layer)
    heats = {
        recipe: _heat(f"recipe{place}", layers, rows, findings)
        for place, (recipe, layers) in enumerate(by_recipe.items())
    }
    ran = any(row.calls for row in rows)
    maps = [heat.html(heat.caption(recipe)) for recipe, heat in heats.items() if ran]
    parts = [
        *([web.paragraph(RUNNING)] if made.running else []),
        *([web.cards([_card(recipe, heat) for recipe, heat in heats.items()])] if ran else []),
        *([_found(heats, bool(advice))] if findings else []),
        _tried(states, advice, heats.values()),
        *([web.section("What each recipe does to its layers", scale(), *maps)] if ran else []),
        *(timelines(_own(samples, heat), heat, recipe) for recipe, heat in heats.items()),
        pictures({"": worst_of(states, rows)}),
        *([_next(list(heats), findings, advice, made.command)] if ran else []),
        web.folded(
            "All numbers of all tensors",
            web.paragraph("SQNR of y, dx and dw, and the cosines, compare with the same layer in float32.", soft=True),
            web.table("All numbers of all tensors", HEADER, [cells(row) for row in rows], left=True),
        ),
    ]
    how = provenance(
        model=made.subject.model,
        recipes=", ".join(by_recipe),
        measured=made.measured,
        device=made.subject.device,
        command=made.command,
    )
    return web.document(headline(heats, rows), how, parts, reload=RELOAD if made.running else 0)


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
    own = set(layers)
    return HeatMap(name, [Sample(None, by_layer(row for row in rows if row.layer in own))], findings)


def _own(samples: Sequence[Sample], heat: HeatMap) -> list[Sample]:
    """Return the samples of the layers of one heat map."""
    own = set(heat.layers)
    return [Sample(step, {layer: found for layer, found in layers.items() if layer in own}) for step, layers in samples]


def _card(recipe: str, heat: HeatMap) -> web.Card:
    sick, worst = len(heat.sick), heat.worst()
    lines = [] if worst is None else [worst.line()]
    small = f"of {plural(len(heat.layers), 'layer')} with a finding"
    return web.Card(recipe, str(sick), small, lines, "look" if sick else "ok")


def _found(heats: Mapping[str, HeatMap], advised: bool) -> web.Markup:
    """Return the findings of all recipes, and how to get advice where there is none yet."""
    return web.section(
        "Findings", *(heat.findings() for heat in heats.values()), *([] if advised else [web.paragraph(TRY)])
    )


def _tried(states: States, advice: Sequence[Advice], heats: Iterable[HeatMap]) -> web.Markup:
    """Return what other recipes would do, and the policy of those that helped."""
    if not advice:
        return web.Markup("")
    rows = [
        [f"{label(one.layer)}, {one.tensor} {one.number}", name, spoken(value, one.number)]
        for one in advice
        for name, value in ((f"{one.in_use}, in use", one.before), *one.tried)
    ]
    parts = [
        web.folded(
            "All that were tried", web.table("All that were tried", ("measured", "recipe", "number"), rows, left=True)
        )
    ]
    if any(one.recipe is not None for one in advice):
        policy = policy_of(advice, {layer: str(state.recipe) for layer, state in states.items()})
        parts.append(web.folded(f"The policy of those that helped, {POLICY_FILE}", web.plain_text(str(policy))))
    anchors = {layer: heat.anchor(layer) for heat in heats for layer in heat.layers}
    said = [
        web.joined(web.link(label(one.layer), anchors.get(one.layer, "")), str(one).removeprefix(label(one.layer)))
        for one in advice
    ]
    return web.section("Tried on the same batches", web.bullets(said), *parts)


def _next(recipes: Sequence[str], findings: Sequence[str], advice: Sequence[Advice], command: str) -> web.Markup:
    target = command.split()[2] if command.startswith("octavo inspect ") else web.EXAMPLE
    given = re.search(r" --policy (\S+)", command)
    # the policy that was in use is the one to go on from, or its own cures would be found and written anew
    chosen = f" --policy {given[1]}" if given else f' --recipe "{recipes[0]}"' if len(recipes) == 1 else ""
    if any(one.recipe is not None for one in advice):
        said = "Write the recipes that helped as a policy, and run the model in it. octavo.convert takes it too."
        again = f"octavo inspect {target} --policy {POLICY_FILE} --html cured.html"
        return web.try_next(said, [f"octavo inspect {target}{chosen} --write-policy {POLICY_FILE}", again])
    if findings and not advice:
        said = "Try other recipes for the layers with findings on the same batch, and write the best ones as a policy."
        return web.try_next(said, [f"octavo inspect {target}{chosen} --write-policy {POLICY_FILE}"])
    other = "fp8-block" if recipes[0] != "fp8-block" else "mxfp8"
    said = "Compare its gradients with those of another recipe."
    return web.try_next(said, [f'octavo compare {target} "{recipes[0]}" "{other}" --html compare.html'])
