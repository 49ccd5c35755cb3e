"""docs/compatibility.md, written from result files alone, so that the same files always give the same page."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.versions import NEWEST, NEWEST_SEEN, TRITON_OF, Places, results

LINKS = "../benchmarks/results"
SHOWN = 10  # failures of a version; its file has all
TITLE = """\
# Compatibility

This page says which versions of torch and of Triton Octavo was tried with, and what is off with each.
`python -m tests.versions --page` writes it from the result files that it links, and `make test` compares the two.
"""
SUPPORTED = """\
## Which versions to use

Octavo needs torch {oldest} or newer, and refuses an older one at import. A CUDA build of torch brings its Triton, and
Octavo's kernels are written for Triton {first} to {last}. A CPU build brings none, and needs none to train.

A plain `pip install torch` gets torch {newest} ({seen}). The versions before it:

| torch | Triton of its CUDA build |
|---|---|
{pairs}

## A version that was never tried

Octavo runs with a torch or a Triton newer than those of these tables too. The import warns once. Each fast path checks
itself first. Where the check fails, the path is off, and the plain path gives the same results in more time.
`octavo doctor` lists the fast paths, and says why a path is off.

If something else fails, run the tests from a clone with your own environment, which needs the packages of the tests:

```bash
python -m tests.versions --python /path/to/environment/bin/python
```

## What runs where

A CPU runs the reference, which is plain torch and needs no Triton; `make test-versions` tests that.
{gpu}
[Verification](verification.md) lists what was tested on which device.
"""


def write(places: Places) -> None:
    results.replace(places.page, text(places))


def text(places: Places) -> str:
    """Returns the page for the result files of a checkout."""
    folder, tried = places.results, results.read_all(places.versions)
    parts = [TITLE, glance(tried), *off(tried), *failures(tried), kernels(folder), supported(folder), *matrix(folder)]
    return "\n".join(parts)


# -- torch -------------------------------------------------------------------------------------------------------------


def glance(tried: Sequence[dict[str, Any]]) -> str:
    """The table of torch, Triton, tests and what is off."""
    known = {result["version"] for result in tried}
    missing = [version for version in TRITON_OF if version not in known]
    lines = ["## At a glance\n"]
    if not tried:
        lines += ["No version is on record: `make test-versions` tries them and writes this table.\n"]
        return "\n".join(lines)
    lines += ["The tests that need no GPU, on a CPU, as `make test-versions` runs them:\n"]
    head = ("torch", "Triton", "Python", "passed", "failed", "skipped", "fast paths that are off", "commit")
    lines += table(head, map(row, tried))
    if missing:
        lines += [f"\nNot tried: torch {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def row(result: dict[str, Any]) -> tuple[object, ...]:
    name = f"[{result.get('torch') or result['version']}]({LINKS}/versions/torch-{result['version']}.json)"
    counts, when = result.get("tests"), f"{result['commit']}, {result['date']}"
    triton, python = result.get("triton") or "–", result.get("python") or "–"
    if counts is None:
        return name, triton, python, f"not run: {cell(result['error'])}", "–", "–", "–", when
    note = "" if result["complete"] else f", then stopped: {cell(result['error'])}"
    passed = f"{counts['passed']}{note}"
    return name, triton, python, passed, counts["failed"], counts["skipped"], names_off(result), when


def fast_paths(result: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What `octavo doctor` said of each fast path; None if it did not say."""
    found: list[dict[str, Any]] | None = result.get("doctor", {}).get("fast_paths")
    return found


def names_off(result: dict[str, Any]) -> str:
    paths = fast_paths(result)
    if paths is None:
        return "not recorded"
    return ", ".join(cell(path["name"]) for path in paths if path["on"] is False) or "none"


def off(tried: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The fast paths that are off somewhere: what each does, and why it is off."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for result in tried:
        for path in fast_paths(result) or ():
            if path["on"] is False:
                key = (cell(path["name"]), cell(path.get("what", "")), cell(path.get("why", "")))
                rows.setdefault(key, []).append(result["version"])
    if rows:
        head = ("fast path", "what happens instead", "off with torch", "why")
        cells = [(name, what, ", ".join(versions), why) for (name, what, why), versions in rows.items()]
        yield "\n".join(["### What is off\n", *table(head, cells)]) + "\n"


def failures(tried: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The tests that failed, by version."""
    lines = []
    for result in tried:
        found = result.get("failures") or []
        lines += [f"- torch {result['version']}: `{one['test']}`: {plain(one['said'])}" for one in found[:SHOWN]]
        if len(found) > SHOWN:
            lines += [f"- torch {result['version']}: {len(found) - SHOWN} more, in its result file."]
    if lines:
        yield "\n".join(["### What failed\n", *lines]) + "\n"


# -- Triton ------------------------------------------------------------------------------------------------------------


def kernel_files(folder: Path) -> list[dict[str, Any]]:
    """What was compiled with each Triton, the oldest first."""
    found = [json.loads(path.read_text()) for path in folder.glob("kernels-triton-*.json")]
    return sorted(({"kernels": {}} | one for one in found), key=lambda record: results.numbers(record["triton"]))


def kernels(folder: Path) -> str:
    """The table of kernels that build and that spill, by Triton, and the names of those that do not build."""
    records = kernel_files(folder)
    lines = ["## Kernels by Triton\n"]
    if not records:
        return "\n".join([*lines, "No Triton is on record: `python -m tests.offline --matrix` compiles the kernels.\n"])
    lines += ["One configuration of every kernel, compiled for SM90 (Hopper) without a GPU."]
    lines += ["[Each kernel](#each-kernel) has its registers.\n"]
    head = ("Triton", "kernels that build", "that spill registers")
    if any("every" in record for record in records):
        head += ("all configurations", "that fail", "that spill")
    broken = [f"- Triton {record['triton']}: `{name}`: {plain(one['error'])}"
              for record in records for name, one in record["kernels"].items() if "error" in one]  # fmt: skip
    lines += table(head, (kernel_row(record)[: len(head)] for record in records))
    lines += ["\nThese do not build:\n", *broken] if broken else []
    return "\n".join(lines) + "\n"


def kernel_row(record: dict[str, Any]) -> tuple[object, ...]:
    one_each, every = record["kernels"].values(), record.get("every")
    link = f"[{record['triton']}]({LINKS}/kernels-triton-{record['triton']}.json)"
    first = (link, f"{len(one_each) - failing(one_each)} of {len(one_each)}", spilling(one_each))
    if every is None:
        return (*first, "–", "–", "–")
    notable = every["fail or spill"]
    return (*first, every["configurations"], failing(notable), spilling(notable))


def failing(kernels: Iterable[dict[str, Any]]) -> int:
    return sum("error" in one for one in kernels)


def spilling(kernels: Iterable[dict[str, Any]]) -> int:
    return sum("error" not in one and one["sm90"][1] > 0 for one in kernels)


def matrix(folder: Path) -> Iterator[str]:
    """Registers and spilled bytes of each kernel, a column for each Triton."""
    records = kernel_files(folder)
    names = sorted({name for record in records for name in record["kernels"]})
    rows = [(f"`{name}`", *(reading(record["kernels"].get(name)) for record in records)) for name in names]
    if rows:
        lines = ["## Each kernel\n", "Registers of a thread; after a plus sign, the bytes that it spills.\n"]
        lines += table(("kernel", *(f"Triton {record['triton']}" for record in records)), rows)
        yield "\n".join(lines) + "\n"


def reading(kernel: dict[str, Any] | None) -> str:
    if kernel is None or "error" in kernel:
        return "–" if kernel is None else "does not build"
    registers, spilled = kernel["sm90"]
    return f"{registers} + {spilled}" if spilled else f"{registers}"


# -- words -------------------------------------------------------------------------------------------------------------


def supported(folder: Path) -> str:
    """Which versions to use, what happens with others, and what runs where."""
    minors = sorted({results.numbers(triton)[:2] for triton in TRITON_OF.values()})
    first, last = (".".join(map(str, minor)) for minor in (minors[0], minors[-1]))
    pairs = [f"| {torch} | {triton} |" for torch, triton in reversed(TRITON_OF.items()) if not NEWEST.startswith(torch)]
    oldest = ".".join(next(iter(TRITON_OF)).split(".")[:2])
    return SUPPORTED.format(
        oldest=oldest, first=first, last=last, newest=NEWEST, seen=NEWEST_SEEN, pairs="\n".join(pairs), gpu=gpu(folder)
    )


def gpu(folder: Path) -> str:
    """Sentences about the GPU."""
    said = "The kernels were proven on an H200 with torch 2.11.0 and Triton 3.6.0."
    path = folder / "triton-h200.json"
    if not path.exists():
        return f"{said} No other Triton was run on a GPU."
    others = {name: found for name, found in json.loads(path.read_text())["versions"].items() if name != "3.6.0"}
    compared = [name for name, found in others.items() if "hashes" in found]
    timed = [name for name in others if name not in compared]
    also = f" With Triton {', '.join(timed)} layers were timed there, and no bits compared." if timed else ""
    return (
        f"{said} They ran there with Triton {', '.join(compared)} too ([file]({LINKS}/{path.name})): y, dx and dw of\n"
        "`Linear` and `GroupedLinear` have the same bits in every recipe. Sums in norms, activations and bias\n"
        f"gradients may differ in the last bits: since 3.8 Triton adds what one thread holds in another order.{also}"
    )


# -- Markdown ----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    first, *others = ("| " + " | ".join(map(str, cells)) + " |" for cells in (head, *rows))
    return [first, "|" + "---|" * len(head), *others]


def plain(words: str) -> str:
    """Words of a program, as text that is no Markdown."""
    return re.sub(r"([\\`*_\[\]()<>|#])", r"\\\1", " ".join(str(words).split()))


def cell(words: str) -> str:
    """Words of ours in a cell of a table."""
    return " ".join(str(words).split()).replace("|", "\\|")
