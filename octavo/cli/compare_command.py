"""Compare the gradients of two recipes on your model: cosine and error of each parameter's gradient, side by side.

Write a function without arguments in a module of your own. It returns the model and its inputs, in one of two forms:

    model, x, y                           one batch, model(x, y)
    model, [(x1, y1), (x2, y2)]           several batches

Python looks for the module in the current folder first. The command runs three copies of the model at the same weights:
one in each recipe, and one unquantized, to which both are compared.

example: octavo compare mymodule:example fp8-block nvfp4 --html report.html
"""

import argparse
from itertools import cycle, islice
from pathlib import Path

from octavo.cli import options, output
from octavo.cli.target import add_target, loaded
from octavo.errors import UnsupportedConfig
from octavo.inspection import page_file
from octavo.inspection.compare import compare
from octavo.model.policy import Policy
from octavo.recipes import recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("first", metavar="A", help="a recipe, such as fp8-block")
    parser.add_argument("second", metavar="B", nargs="?", default=None, help="another recipe, such as nvfp4")
    parser.add_argument(
        "--policy", default=None, metavar="FILE", help="in place of B: give each layer the recipe that this file has"
    )
    parser.add_argument(
        "--steps", type=options.count, default=None, metavar="N",
        help="run N batches, beginning again after the last; default: each batch once",
    )  # fmt: skip
    parser.add_argument(
        "--top", type=options.count, default=16, metavar="N",
        help="list N parameters, those whose errors differ most; default: 16",
    )  # fmt: skip
    parser.add_argument("--html", default=None, metavar="FILE", help="also write the table with a plot to FILE")
    output.add_json(parser, "the table")


def run(arguments: argparse.Namespace) -> int:
    if (arguments.second is None) == (arguments.policy is None):
        raise UnsupportedConfig("octavo compare takes two recipes, or one and --policy FILE. Name both sides once.")
    first = recipe(arguments.first)
    second = recipe(arguments.second) if arguments.policy is None else Policy.load(arguments.policy)
    with loaded(arguments.target) as (model, batches):
        runs = batches if arguments.steps is None else list(islice(cycle(batches), arguments.steps))
        found = compare(model, runs, first, second)
    if arguments.html is not None:
        page_file.write(Path(arguments.html), found.html(output.command_line(arguments)))
    report: output.Report = {"recipes": found.recipes, "batches": found.batches, "losses": found.losses}
    report |= {"gradients": [row._asdict() for row in found.rows]}
    output.deliver(output.head("compare", arguments) | report, found.text(arguments.top), arguments.json)
    return 0
