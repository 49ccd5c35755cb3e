"""Convert, train, compile, save and load each model of the zoo, and write docs/models.md:

    python -m tests.integration models                     all of them; or some: llama mixtral --no-compile
    python -m tests.integration models --sample 40         types of transformers' registry that the zoo does not name

One process, half an hour on two cores. Each row is on file as soon as it is there, below build/, and a run that was cut
off goes on where it ended; `--again` begins anew, as does a change of Octavo, of a package or of these files.
"""

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from tests.integration.model_trials import RECIPES, Row, tried
from tests.integration.registry import sampled
from tests.integration.zoo import Entry, entries

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
KEPT = ROOT / "build" / "integration_models"
OWN = tuple(Path(__file__).with_name(f"{name}.py") for name in ("model_trials", "zoo"))
UNUSED = ("cli", "demo", "integrations")  # rooms of Octavo that no trial runs
BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"
WIDTH = 80
SHORT = {r"other matrices\b": "other", r"convolutions?\b": "conv", r"conditionings?\b": "cond", " never called": "*"}
HEAD = ("model", "converted", "trains", "compiled", "loaded", "notes")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration models", description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all if none is given")
    parser.add_argument("--no-write", action="store_true", help="leave docs/models.md as it is")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--again", action="store_true", help="try the models again that are on file")
    parser.add_argument("--sample", type=int, default=0, help="so many types of transformers' registry, and no zoo")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # the sums of a CPU's GEMMs depend on it, and loads are compared bit for bit
    if arguments.sample:
        chosen: Iterable[tuple[str, Entry]] = sampled(arguments.sample, arguments.seed)
    else:
        chosen = [(name, entry) for name, entry in entries() if not arguments.names or name in arguments.names]
    rows = list(rows_of(chosen, compiles=not arguments.no_compile, again=arguments.again))
    failed = [row for row in rows if row.failure]
    print(f"{len(rows)} models, {len(RECIPES)} recipes each, {len(failed)} failed: {', '.join(r.name for r in failed)}")
    if not (arguments.sample or arguments.names or arguments.no_compile or arguments.no_write):
        write(rows)
    return 1 if failed or not rows else 0


def rows_of(chosen: Iterable[tuple[str, Entry]], *, compiles: bool, again: bool) -> Iterator[Row]:
    """Yield the row of each model: from the file if it was tried, passed, and nothing has changed since."""
    path = KEPT / f"{digest(compiles)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {} if again or not path.is_file() else on_file(path)
    with path.open("a" if known else "w") as file:
        for name, entry in chosen:
            started = time.process_time()
            row = known.get(name) or tried(name, entry, compiles=compiles)
            if not row.failure and name not in known:
                print(json.dumps(row), file=file, flush=True)
            seconds = "on file" if name in known else f"{time.process_time() - started:.0f} s"
            print(" | ".join(row[:7]), f"| {seconds}", row.failure, flush=True)
            yield row


def digest(compiles: bool) -> str:
    """Return a hash of what a row depends on: sources, versions of packages, and whether models are compiled."""
    packages = sorted({entry.package for _, entry in entries()})
    hashed = hashlib.sha256(f"{[version(package) for package in packages]} {RECIPES} {compiles}".encode())
    package = ROOT / "octavo"
    sources = (path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in UNUSED)
    for path in (*sorted(sources), *OWN):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def on_file(path: Path) -> dict[str, Row]:
    """Return the rows of a file, by name."""
    rows = (Row(*json.loads(line)) for line in path.read_text().splitlines())
    return {row.name: row for row in rows}


def write(rows: list[Row]) -> None:
    """Put the table into the page, between its two marks."""
    text = PAGE.read_text()
    used = ", ".join(f"{package} {version(package)}" for package in sorted({row.package for row in rows}))
    failed = sum(bool(row.failure) for row in rows)
    said = f"{len(rows)} models in {', '.join(RECIPES)}; failures: {failed}. Tried with\n{used}."
    table = [line(HEAD), "|---" * len(HEAD) + "|", *(line(cells_of(row)) for row in rows)]
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text("\n".join([before + BEGIN, "", said, "", *table, "", END + after]))


def cells_of(row: Row) -> tuple[str, ...]:
    name = re.sub(r"Transformer2DModel|_patch\d+\w*| on experts", "", row.name)
    notes = row.notes
    for word, short in SHORT.items():
        notes = re.sub(word, short, notes)
    return (name, row.share, row.trains, row.compiled, row.loads, notes)


def line(cells: tuple[str, ...]) -> str:
    written = f"| {' | '.join(cells)} |"
    if len(written) > WIDTH:
        raise ValueError(
            f"A row of {len(written)} columns, and {WIDTH} is the most: {written}. Shorten its name or notes."
        )
    return written


if __name__ == "__main__":
    sys.exit(main())
