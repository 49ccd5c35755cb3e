"""Time low-precision layers on this machine's GPU, beside bf16 and other libraries, in one run.

Each suite prints a table; `octavo bench SUITE --help` explains its columns. A suite takes minutes. Its first run takes
longer, because it compiles kernels. The suites also time torchao and transformer_engine where they are installed.

example: octavo bench linear --shape 8192,4096,14336 --recipes fp8-current,fp8-block --json linear.json
"""

import argparse
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from octavo.cli import output
from octavo.cli.bench import bench_page
from octavo.cli.bench.cases import begin, has_rows
from octavo.cli.commands import add_commands
from octavo.errors import UnsupportedHardware
from octavo.inspection import page_file

# A suite is a file here. Its docstring is its help text. FACTS is what its report states before the first row,
# `add_arguments(parser)` adds its options, `measure(arguments, report)` fills the report row by row, and
# `render(report)` returns the text of a report that has a row.
SUITES = ("quantize", "linear", "block", "grouped", "grouped-gemms", "mlp", "moe", "model", "permute", "host")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(print_help=parser.print_help)
    add_commands(parser, "suite", {name: _module(name) for name in SUITES}, _add_files)


def _add_files(parser: argparse.ArgumentParser) -> None:
    output.add_json(parser, what="the table and every reading")
    parser.add_argument(
        "--html", default=None, metavar="FILE", help="also write a page with bars to FILE; default: none"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.suite is None:
        arguments.print_help(sys.stderr)
        return 2
    if not torch.cuda.is_available() and getattr(arguments, "device", None) != "cpu":
        raise UnsupportedHardware("A bench times a GPU, and torch sees none here. Run it on a machine that has one.")
    try:
        fill, head = partial(measure, arguments), output.head("bench", arguments)
        report = output.produce(fill, render, arguments.json, head=head)
    except output.Interrupted as stop:
        raise output.Interrupted(" ".join([str(stop), *_write_page(stop.report, arguments)]), stop.report) from None
    for sentence in _write_page(report, arguments):
        output.say(sentence)
    return 0


def _write_page(report: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """Write the page of a report that has rows. Returns a sentence that says where it is."""
    if arguments.html is None or not (text := render(report)):
        return []
    page = bench_page.render(report, getattr(suite_of(arguments.suite), "COLUMNS", ()), text)
    page_file.write(Path(arguments.html), page)
    return [f"{bench_page.headline(bench_page.sections_of(report))}. The page of this report is {arguments.html}."]


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Fill the report of the suite that was asked for."""
    suite = suite_of(arguments.suite)
    begin(report, arguments.suite, arguments, suite.FACTS)
    suite.measure(arguments, report)


def render(report: dict[str, Any]) -> str:
    """Return a report as text; "" while it has no row."""
    return suite_of(report["suite"]).render(report) if has_rows(report) else ""


def suite_of(name: str) -> Any:
    return import_module(f"octavo.cli.{_module(name)}")


def _module(suite: str) -> str:
    return f"bench.{suite.replace('-', '_')}_bench"
