"""Time low-precision layers on this machine's GPU, beside bf16 and other libraries, in one run.

Each suite prints a table; `octavo bench SUITE --help` explains its columns. A suite takes minutes. Its first run takes
longer, because it compiles kernels. The suites also time torchao and transformer_engine where they are installed.

example: octavo bench linear --shape 8192,4096,14336 --recipes fp8-current,fp8-block --json linear.json
"""

import argparse
import sys
from functools import partial

import torch

from octavo.cli import output
from octavo.cli.bench import (
    block_bench,
    grouped_bench,
    grouped_gemms_bench,
    host_bench,
    linear_bench,
    mlp_bench,
    model_bench,
    moe_bench,
    permute_bench,
    quantize_bench,
)
from octavo.errors import UnsupportedHardware

# a suite is a file here with `add_arguments(parser)`, `measure(arguments, report)`, which fills the report row by row,
# and `render(report) -> text`, which returns "" while there is no row; its module docstring is its help text
SUITES = {
    "quantize": quantize_bench, "linear": linear_bench, "block": block_bench, "grouped": grouped_bench,
    "grouped-gemms": grouped_gemms_bench, "mlp": mlp_bench, "moe": moe_bench, "model": model_bench,
    "permute": permute_bench, "host": host_bench,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(print_help=parser.print_help)
    suites = parser.add_subparsers(dest="suite", metavar="SUITE", title="suites")
    for name, module in SUITES.items():
        text = module.__doc__ or ""
        suite = suites.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(suite)
        output.add_json(suite, "the table and every reading")


def run(arguments: argparse.Namespace) -> int:
    if arguments.suite is None:
        arguments.print_help(sys.stderr)
        return 2
    if not torch.cuda.is_available() and getattr(arguments, "device", None) != "cpu":
        raise UnsupportedHardware("A bench times a GPU, and torch sees none here. Run it on a machine that has one.")
    suite = SUITES[arguments.suite]
    output.produce(partial(suite.measure, arguments), suite.render, arguments.json)
    return 0
