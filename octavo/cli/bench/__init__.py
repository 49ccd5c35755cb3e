"""Time low-precision layers on this machine's GPU, beside bf16 and other libraries, in one run.

Each suite prints a table; `octavo bench SUITE --help` explains its columns. A suite takes minutes. Its first run takes
longer, because it compiles kernels. The suites also time torchao and transformer_engine where they are installed.

example: octavo bench linear --shape 8192,4096,14336 --recipes fp8-current,fp8-block --json linear.json
"""

import argparse
import sys
from functools import partial
from importlib import import_module
from typing import Any

import torch

from octavo.cli import output
from octavo.cli.bench.cases import begin
from octavo.cli.commands import add_commands
from octavo.errors import UnsupportedHardware

# A suite is a file here. Its docstring is its help text. FACTS is what its report states before the first row,
# `add_arguments(parser)` adds its options, `measure(arguments, report)` fills the report row by row, and
# `render(report)` returns the text of a report, "" while there is no row.
SUITES = ("quantize", "linear", "block", "grouped", "grouped-gemms", "mlp", "moe", "model", "permute", "host")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(print_help=parser.print_help)
    add_json = partial(output.add_json, what="the table and every reading")
    add_commands(parser, "suite", {name: _module(name) for name in SUITES}, add_json)


def run(arguments: argparse.Namespace) -> int:
    if arguments.suite is None:
        arguments.print_help(sys.stderr)
        return 2
    if not torch.cuda.is_available() and getattr(arguments, "device", None) != "cpu":
        raise UnsupportedHardware("A bench times a GPU, and torch sees none here. Run it on a machine that has one.")
    output.produce(partial(measure, arguments), suite_of(arguments.suite).render, arguments.json)
    return 0


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Fill the report of the suite that was asked for."""
    suite = suite_of(arguments.suite)
    begin(report, arguments.suite, arguments, suite.FACTS)
    suite.measure(arguments, report)


def suite_of(name: str) -> Any:
    return import_module(f"octavo.cli.{_module(name)}")


def _module(suite: str) -> str:
    return f"bench.{suite.replace('-', '_')}_bench"
