"""Show what octavo.convert would make of your model: the recipe and the route of each layer, and why others stay.

Write a function without arguments in a module of your own, which returns the model and its inputs, as octavo explain
--help says. Python looks for the module in the current folder first. The model is converted in this process alone, and
nothing is run or written: a program of yours converts it by octavo.convert(model, recipe).

example: octavo convert --dry-run mymodule:example --recipe fp8-block
"""

import argparse
import warnings

from octavo.cli import output
from octavo.cli.target import add_target, loaded
from octavo.errors import UnsupportedConfig
from octavo.model.convert import convert
from octavo.model.policy import Policy
from octavo.recipes import recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the report; needed, since no model is written")
    parser.add_argument("--recipe", default=None, help="the recipe, such as fp8-block")
    parser.add_argument(
        "--policy", default=None, metavar="FILE", help="in place of --recipe: the recipe of each layer, as TOML"
    )
    output.add_json(parser, "the report")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.dry_run:
        raise UnsupportedConfig(
            "octavo convert shows a report and writes no model. Pass --dry-run; your program calls octavo.convert."
        )
    if (arguments.recipe is None) == (arguments.policy is None):
        raise UnsupportedConfig("octavo convert takes one of --recipe R and --policy FILE. Name one of them.")
    chosen = recipe(arguments.recipe) if arguments.policy is None else Policy.load(arguments.policy)
    with loaded(arguments.target) as (model, _), warnings.catch_warnings(action="ignore"):  # the report has the notes
        report = convert(model, chosen, strict=False)
    output.deliver(output.head("convert", arguments) | report.as_dict(), str(report), arguments.json)
    return 0
