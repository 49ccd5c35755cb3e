"""The trial of a model of the zoo: converted, compared with the model as it was, trained, saved, loaded, reverted,
compiled."""

import re
import tempfile
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import octavo
from octavo.model.conversion import ConversionReport
from octavo.recipes.ambient import process
from tests.integration.subject import expect
from tests.integration.zoo import Entry

RECIPES = ("fp8-delayed", "fp8-block", "mxfp8")
COMPILED = "fp8-delayed"
STEPS = 3
BOUND = 0.1  # of the first loss, relative
COMPILED_BOUND = 0.02  # of a gradient, relative
PLURALS = {"other matrices": "other matrices", "stacked matrices": "stacked", "parametrized": "parametrized"}
UNSAID = ("converted", "embedding", "output head")  # of the notes: what every language model has


class Row(NamedTuple):
    """What was found of one model."""

    name: str
    package: str
    share: str
    trains: str
    compiled: str
    loads: str
    notes: str
    failure: str = ""


def tried(name: str, entry: Entry, *, compiles: bool) -> Row:
    """Try a model in each recipe."""
    warnings.simplefilter("always")
    process.has_traced = False  # graphs of models before this one say nothing of it
    try:
        with warnings.catch_warnings(record=True) as said:
            reports = [trial(entry, recipe) for recipe in RECIPES]
        compiled = compiled_as(entry) if compiles else "not tried"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({last.name}:{last.lineno})"
        return Row(name, entry.package, "–", "no", "–", "–", "", said[:300])
    share = reports[0].shares().get("converted")
    shown = "–" if share is None else f"{share.share:.0%} in {share.layers}"
    notes = [*notes_of(reports[0]), *uncalled(str(each.message) for each in said)]
    return Row(name, entry.package, shown, "yes", compiled, "yes", ", ".join(notes))


def trial(entry: Entry, recipe: str) -> ConversionReport:
    """Convert, compare with the model as it was, train, save, load, revert."""
    plain = built(entry, 0)
    batch = entry.batch(0)
    wanted, without = first(entry, plain, batch)
    model = built(entry, 0)
    report = octavo.convert(model, recipe)
    expect(sorted(model.state_dict()) == sorted(plain.state_dict()), "the state dict has other names")
    loss, missing = first(entry, model, batch)
    # two examples of a random classifier: a bound for what is wrong, not for precision
    expect(abs(loss - wanted) <= BOUND * max(abs(wanted), 1), f"{recipe}: the first loss is {loss}, was {wanted}")
    expect(missing == without, f"{recipe}: no gradient for {sorted(missing ^ without)[:3]}")
    for (path, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        same = p.grad is None or p.grad.stride() == other.grad.stride()
        expect(same, f"{recipe}: the gradient of {path} has another layout")
    model.zero_grad()
    trained(entry, model)
    with tempfile.TemporaryDirectory() as folder:
        torch.save([model.state_dict(), octavo.state_dict(model)], Path(folder) / "model.pt")
        weights, state = torch.load(Path(folder) / "model.pt", weights_only=True)
    other = built(entry, 1)
    octavo.convert(other, recipe)
    other.load_state_dict(weights)
    octavo.load_state_dict(other, state)
    batch = entry.batch(9)
    one, two = (measured(entry, each, batch) for each in (model, other))
    expect(torch.equal(one, two), f"{recipe}: loaded, the loss is {two.item()}, was {one.item()}")
    octavo.revert(model)
    kinds = ([type(m).__qualname__ for m in one.modules()] for one in (model, plain))
    expect(next(kinds) == next(kinds), f"{recipe}: revert left classes")
    return report


def built(entry: Entry, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return entry.build().train()


def measured(entry: Entry, model: nn.Module, batch: dict) -> Tensor:
    torch.manual_seed(3)  # some models draw in their forward
    return entry.loss(model, batch).detach()


def first(entry: Entry, model: nn.Module, batch: dict) -> tuple[float, set[str]]:
    """Return the loss of a batch, and the parameters that its backward gives no gradient."""
    torch.manual_seed(3)
    loss = entry.loss(model, batch)
    loss.backward()
    return loss.item(), {name for name, p in model.named_parameters() if p.grad is None}


def trained(entry: Entry, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    batch, losses = entry.batch(0), []
    with octavo.attach(model, optimizer) if has_layers(model) else warnings.catch_warnings():
        for _ in range(STEPS):
            loss = entry.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    expect(losses[-1] < losses[0], f"the losses are {losses}")


def has_layers(model: nn.Module) -> bool:
    return any(isinstance(module, octavo.Linear | octavo.GroupedLinear) for module in model.modules())


def compiled_as(entry: Entry) -> str:
    """Compile a converted model, and compare its loss and gradients with eager mode; return whether it is one graph."""
    eager, model = built(entry, 0), built(entry, 0)
    for one in (eager, model):
        octavo.convert(one, COMPILED)
    batch = entry.batch(0)
    loss, missing = first(entry, eager, batch)
    breaks, (found, others) = breaks_of(entry, model, batch)
    expect(abs(found - loss) <= 2e-3 * max(abs(loss), 1), f"compiled, the loss is {found}, eager {loss}")
    expect(others == missing, f"compiled, no gradient for {sorted(others ^ missing)[:3]}")
    for (path, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        if p.grad is not None and q.grad.norm() > 1e-6:
            error = ((p.grad - q.grad).norm() / q.grad.norm()).item()
            expect(error <= COMPILED_BOUND, f"compiled, the gradient of {path} has an error of {error:.3f}")
    if not breaks:
        return "whole"
    own, _ = breaks_of(entry, built(entry, 0), batch)
    expect(own > 0, f"{breaks} breaks of the graph, and none without the conversion")
    return "in parts"


def breaks_of(entry: Entry, model: nn.Module, batch: dict) -> tuple[int, tuple[float, set[str]]]:
    """Compile a model and return how often its graph breaks, and what `first` returns."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model.compile(backend="aot_eager")
    found = first(entry, model, batch)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch.compiler.reset()
    return breaks, found


def notes_of(report: ConversionReport) -> list[str]:
    """Return how many layers were left, by reason."""
    left = {reason: share.layers for reason, share in report.shares().items() if reason not in UNSAID}
    return [f"{count} {PLURALS.get(reason, reason + 's' * (count > 1))}" for reason, count in left.items()]


def uncalled(messages: Iterable[str]) -> list[str]:
    """Return the names of layers that no forward called, as octavo.attach warns."""
    found = (re.match(r"No forward has called (.*?), and (its|their)", message) for message in messages)
    names = (path.rpartition(".")[2] for match in found if match for path in match[1].split(", "))
    return [f"{name} never called" for name in dict.fromkeys(names)]
