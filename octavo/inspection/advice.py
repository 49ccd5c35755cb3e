"""Advice that was tried: other recipes for the layers that an inspection faults, measured on the same batches."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from octavo.errors import Unsupported, UnsupportedConfig
from octavo.inspection.explain import copied
from octavo.inspection.findings import Finding
from octavo.inspection.heat import label, shade_of, spoken
from octavo.inspection.steps import Batch, Loss, seeded_gradients, set_recipe
from octavo.inspection.tensor_rows import TensorRow
from octavo.model.layer_lookup import layers
from octavo.model.policy import Policy
from octavo.model.step import step
from octavo.recipes import recipe as resolve

# fp8-delayed is none: its scales come from steps that a trial does not make. bf16 is none: it always wins.
CANDIDATES = (
    "fp8-current", "fp8-current(grad_format=E4M3)", "fp8-rowwise", "fp8-block", "fp8-block(scale='fp32')",
    "fp8-block(grad_format=E5M2)", "mxfp8", "mxfp8(grad_format=E5M2)", "nvfp4",
)  # fmt: skip
LESS = ("underflow", "saturated")  # numbers of which less is better; of the others more is
SPARE = 0.002  # how much of its worst cosine a layer may lose by a recipe that helps one of its tensors


class Advice(NamedTuple):
    """The recipe that helps a layer most, of those that were tried.

    Attributes:
        layer: the layer's path.
        tensor: the tensor whose number the finding names.
        number: that number: "underflow", "saturated", "sqnr" or "cosine".
        in_use: the layer's recipe.
        before: the number in that recipe.
        recipe: the recipe that helps most; None if none of them helps.
        after: the number in it.
        tried: each recipe that ran, and the number in it.
        left: the tensors and numbers of the layer that still have a finding in the best recipe.
    """

    layer: str
    tensor: str
    number: str
    in_use: str
    before: float
    recipe: str | None
    after: float
    tried: tuple[tuple[str, float], ...]
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"{label(self.layer)}: {self.tensor} {self.number}"
        if self.recipe is None:
            count = len(self.tried)
            return (
                f"{what} {spoken(self.before, self.number)} in {self.in_use}: none of {count} other recipes helps. "
                "Leave this layer in bf16, or look for the cause in the model."
            )
        best = f"{spoken(self.after, self.number)} in {self.recipe}"
        rest = f" It still has a finding there: {', '.join(self.left)}." if self.left else ""
        return f"{what}: {best} instead of {spoken(self.before, self.number)} in {self.in_use}.{rest}"


class _Measured(NamedTuple):
    """A layer's numbers in one recipe."""

    rows: dict[str, TensorRow]
    faults: tuple[str, ...]  # tensors with the number that is at fault

    def number(self, tensor: str, name: str) -> float | None:
        row = self.rows.get(tensor)
        return None if row is None else getattr(row, name)

    def cosine(self) -> float:
        """Return the worst cosine of a result."""
        return min((row.cosine for row in self.rows.values() if row.cosine is not None), default=1.0)

    def shade(self) -> float:
        """Return how bad the worst of all its numbers is."""
        return max((shade_of(row.numbers()) for row in self.rows.values()), default=0.0)


def try_recipes(
    model: nn.Module, batches: Sequence[Batch], faults: Sequence[Finding], inspect: Any, loss: Loss | None
) -> list[Advice]:
    """Run copies of a model, with the layers of faults in each other recipe, and return the best for each layer: that
    with the fewest faults, none of which is new, and of these the one that improves the number of the first fault most.
    `inspect` is `octavo.inspect`, which imports this module."""
    by_layer: dict[str, Finding] = {}
    for fault in faults:
        if fault.number:
            by_layer.setdefault(fault.layer, fault)
    if not by_layer:
        return []
    found = [(layer, own.recipe) for layer, own in layers(model) if layer in by_layer]
    in_use = {layer: None if own is None else str(own) for layer, own in found}
    before = _measured(model, batches, inspect, loss)
    tried: dict[str, dict[str, _Measured]] = {layer: {} for layer in by_layer}
    for name in CANDIDATES:
        own = [layer for layer in by_layer if in_use.get(layer) != str(resolve(name))]
        subject = copied(model, "inspect")
        for layer, module in layers(subject):
            if layer in own:
                set_recipe(module, name)
        try:
            measured = _measured(subject, batches, inspect, loss)
        except Unsupported:  # of one of the layers: its shape, or its device
            continue
        for layer in own:
            tried[layer][name] = measured[layer]
    return [
        _best(fault, in_use.get(layer) or "its recipe", before[layer], tried[layer])
        for layer, fault in by_layer.items()
        if layer in before and before[layer].number(fault.tensor, fault.number) is not None
    ]


def policy_of(advice: Iterable[Advice], in_use: dict[str, str]) -> Policy:
    """Return the policy that gives each layer the recipe that helped it, and the others theirs."""
    chosen = {one.layer: one.recipe for one in advice if one.recipe is not None}
    rules: list[tuple[list[str], str]] = []
    for name in dict.fromkeys(chosen.values()):
        rules.append(([layer for layer, own in chosen.items() if own == name], name))
    kept = Counter([own for layer, own in in_use.items() if layer not in chosen]).most_common()
    for name, _ in kept[1:]:
        rules.append(([path for path, own in in_use.items() if own == name and path not in chosen], name))
    rules += [(["*"], name) for name, _ in kept[:1]]
    if not rules:
        raise UnsupportedConfig("There is no layer to write a policy for.")
    return Policy(rules)


def _measured(model: nn.Module, batches: Sequence[Batch], inspect: Any, loss: Loss | None) -> dict[str, _Measured]:
    """Return the numbers of each layer of a copy over the batches."""
    subject = copied(model, "inspect")
    with torch.enable_grad(), inspect(subject) as report:
        for place, batch in enumerate(batches):
            seeded_gradients(subject, batch, loss, place)
            step(subject)
    faults: dict[str, list[str]] = {}
    for fault in report._faults():
        faults.setdefault(fault.layer, []).append(f"{fault.tensor} {fault.number}".strip() or fault.text)
    found: dict[str, _Measured] = {}
    for row in report.rows():
        found.setdefault(row.layer, _Measured({}, tuple(faults.get(row.layer, ())))).rows[row.tensor] = row
    return found


def _best(fault: Finding, in_use: str, before: _Measured, tried: dict[str, _Measured]) -> Advice:
    was = before.number(fault.tensor, fault.number)
    assert was is not None
    sign = -1.0 if fault.number in LESS else 1.0
    values = {name: measured.number(fault.tensor, fault.number) for name, measured in tried.items()}
    known = {name: value for name, value in values.items() if value is not None}
    fit = {
        name: value
        for name, value in known.items()
        if sign * (value - was) > 0
        and set(tried[name].faults) <= set(before.faults)
        and tried[name].cosine() >= before.cosine() - SPARE
    }
    best = max(
        fit,
        key=lambda name: (
            -len(tried[name].faults),
            round(sign * fit[name], 4),
            -tried[name].shade(),
            tried[name].cosine(),
        ),
        default=None,
    )
    after, left = (was, ()) if best is None else (fit[best], tried[best].faults)
    return Advice(fault.layer, fault.tensor, fault.number, in_use, was, best, after, tuple(known.items()), left)
