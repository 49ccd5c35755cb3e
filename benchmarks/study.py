"""What the studies of this folder share: the options --device and --json, a report that is written after every part of
it, so that a study that is cut off leaves what it had, and exit codes.

Timers, tables, the machine and files are those of `octavo bench`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.cli import machine, output
from octavo.errors import Unsupported

Report = dict[str, Any]


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python3 -m benchmarks.NAME`."""
    parser = argparse.ArgumentParser(prog=f"python3 -m benchmarks.{name}", description=(doc or "").split("\n")[0])
    parser.add_argument("--device", default=None, help="cpu or cuda[:index]; default: the GPU if there is one")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here, after every part")
    return parser


def add_training(parser: argparse.ArgumentParser, steps: int, batch: int, seeds: Sequence[int]) -> None:
    """Add the options of a study that trains the model of `octavo train` from several seeds."""
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))


def run(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace, torch.device], Report],
    render: Callable[[Report], str],
) -> int:
    """Measure and print. Returns the exit code: 1 if the report, or one of its results, is not "ok"."""
    arguments = parser.parse_args(argv)
    try:
        report = measure(arguments, machine.parse_device(arguments.device))
    except Unsupported as unsupported_reason:
        print(f"{parser.prog}: {unsupported_reason}", file=sys.stderr)
        return 2
    print(render(report))
    rows = report["results"] if isinstance(report.get("results"), list) else []
    return 0 if all(part.get("ok", True) for part in (report, *rows)) else 1


def write(report: Report, path: Path | None) -> None:
    if path is not None:
        output.write(path, output.as_json(report) + "\n")


def heading(report: Report, what: str) -> str:
    """Return the first line of a report: the machine, and what was run on it."""
    facts = report["machine"]
    return f"{facts['gpu'] or 'CPU'}, torch {facts['torch']}; {what}"


def numbers(values: Sequence[float], form: str) -> str:
    return " ".join(format(value, form) for value in values)
