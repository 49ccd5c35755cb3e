"""Convert, train, compile, save and load each model of the zoo, and write docs/models.md:

python -m tests.integration.models [names] [--write]
"""

import argparse
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import octavo
from octavo.model.conversion import ConversionReport
from octavo.recipes.ambient import process
from tests.integration.subject import expect
from tests.integration.zoo import Entry, entries

RECIPES = ("fp8-delayed", "fp8-current", "fp8-block")
COMPILED = "fp8-current"
STEPS = 3
BOUND = 0.1  # of the first loss, relative
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all if none is given")
    parser.add_argument("--write", action="store_true", help="write the table into docs/models.md")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for name, entry in entries():
        if arguments.names and name not in arguments.names:
            continue
        started = time.process_time()
        rows.append(tried(name, entry, compiles=not arguments.no_compile))
        row = rows[-1]
        print(" | ".join(row[:7]), f"| {time.process_time() - started:.0f} s", row.failure, flush=True)
    failed = [row for row in rows if row.failure]
    print(f"{len(rows)} models, {len(RECIPES)} recipes each, {len(failed)} failed: {', '.join(r.name for r in failed)}")
    if arguments.write:
        write(rows)
    return 1 if failed else 0


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
    shown = "–" if share is None else f"{share.layers} layers, {share.share:.0%}"
    notes = [notes_of(reports[0]), *uncalled(str(each.message) for each in said)]
    return Row(name, entry.package, shown, "yes", compiled, "yes", "; ".join(filter(None, notes)))


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
    """Compile a converted model, and compare it with eager mode."""
    eager, model = built(entry, 0), built(entry, 0)
    for one in (eager, model):
        octavo.convert(one, COMPILED)
    torch.compiler.reset()
    model.compile(backend="aot_eager")
    batch = entry.batch(0)
    wanted, found = measured(entry, eager, batch), measured(entry, model, batch)
    expect(torch.allclose(wanted, found, rtol=2e-3), f"compiled, the loss is {found.item()}, eager {wanted.item()}")
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.utils.counters.clear()
    return "whole" if not breaks else "with breaks"


def notes_of(report: ConversionReport) -> str:
    left = {reason: share for reason, share in report.shares().items() if reason != "converted"}
    return ", ".join(f"{share.layers} {reason}" for reason, share in left.items())


def uncalled(messages: Iterable[str]) -> list[str]:
    """Return which layers no forward called, as octavo.attach warns."""
    found = (re.match(r"No forward has called (.*?), and (its|their)", message) for message in messages)
    return list(dict.fromkeys(f"never called: {match[1]}" for match in found if match))


def write(rows: list[Row]) -> None:
    """Put rows into the table of the page, between its two marks; rows of other models stay."""
    text = PAGE.read_text()
    before, kept, after = text.partition(BEGIN)[0], text.partition(BEGIN)[2].partition(END)[0], text.partition(END)[2]
    lines = {
        line.split(" | ")[0][2:]: line for line in kept.splitlines() if line.startswith("| ") and "---" not in line
    }
    lines.pop("model", None)
    lines |= {row.name: f"| {row.name} | {' | '.join(row[2:7])} |" for row in rows}
    ordered = [lines[name] for name, _ in entries() if name in lines]
    used = ", ".join(f"{package} {version(package)}" for package in sorted({entry.package for _, entry in entries()}))
    head = ["| model | converted | trains | compiled | saved and loaded | left |", "|---|---|---|---|---|---|"]
    said = f"{len(ordered)} models in {', '.join(RECIPES)}, with {used}."
    PAGE.write_text("\n".join([before + BEGIN, "", said, "", *head, *ordered, "", END + after]))


if __name__ == "__main__":
    sys.exit(main())
