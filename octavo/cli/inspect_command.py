"""Report what a recipe does to every tensor of your model: underflow, saturation, noise, and the gradients' errors.

Write a function without arguments in a module of your own. It returns the model and its inputs, in one of two forms:

    model, x, y                           one batch, model(x, y)
    model, [(x1, y1), (x2, y2)]           several batches

Python looks for the module in the current folder first. The command runs forward and backward on the batches, again and
again until --steps is reached, without an optimizer. The loss is the model's output if that is one number, and else its
product with a fixed random direction. Layers run in their own recipes, or in that of --recipe.

example: octavo inspect mymodule:example --recipe nvfp4 --steps 10 --html report.html
"""

import argparse
from pathlib import Path

from octavo.cli import options, output
from octavo.cli.target import add_target, loaded
from octavo.errors import UnsupportedConfig
from octavo.inspection import page_file
from octavo.inspection.inspect import Inspection, inspect
from octavo.inspection.steps import give_recipe, gradients_of
from octavo.model.layer_lookup import layers
from octavo.model.policy import Policy
from octavo.model.step import step
from octavo.recipes import Recipe, recipe
from octavo.text import plural

TRIED = 2  # batches on which other recipes are tried


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--recipe", default=None, help="run the model in this recipe, such as nvfp4; default: as your function made it"
    )
    parser.add_argument(
        "--policy", default=None, metavar="FILE", help="run each layer in the recipe that this TOML file gives it"
    )
    parser.add_argument("--steps", type=options.count, default=4, metavar="N", help="how many steps; default: 4")
    parser.add_argument(
        "--top", type=options.count, default=8, metavar="N",
        help="list N layers, those with findings and then the worst first; default: 8",
    )  # fmt: skip
    parser.add_argument(
        "--no-advice", dest="advice", action="store_false",
        help="do not try other recipes for layers with findings; default: try them on two batches, and print the best",
    )  # fmt: skip
    parser.add_argument(
        "--write-policy", default=None, metavar="FILE",
        help="write a policy with the recipes that helped, as TOML: octavo.Policy.load and --policy read it",
    )  # fmt: skip
    parser.add_argument("--html", default=None, metavar="FILE", help="also write the report as a page to FILE")
    parser.add_argument("--fail", action="store_true", help="exit with code 1 if the report has a finding")
    output.add_json(parser, "the report")


def run(arguments: argparse.Namespace) -> int:
    if arguments.recipe is not None and arguments.policy is not None:
        raise UnsupportedConfig("--recipe and --policy both give each layer its recipe. Leave one out.")
    chosen: Recipe | Policy | None = None if arguments.recipe is None else recipe(arguments.recipe)
    chosen = chosen if arguments.policy is None else Policy.load(arguments.policy)
    with loaded(arguments.target) as (model, batches):
        if chosen is not None:
            give_recipe(model, chosen)
        elif next(layers(model), None) is None:
            raise UnsupportedConfig(
                f"{arguments.target} has no layer of Octavo in its {type(model).__name__}. Name a recipe: --recipe "
                "mxfp8."
            )
        with inspect(model) as report:
            for place in range(arguments.steps):
                model.zero_grad()
                gradients_of(model, batches[place % len(batches)])
                step(model)
                report.next_step()
        if arguments.advice or arguments.write_policy is not None:
            report.try_recipes(batches[:TRIED])
    if arguments.write_policy is not None:
        page_file.write(Path(arguments.write_policy), str(report.policy()))
    if arguments.html is not None:
        page_file.write(Path(arguments.html), report.html(output.command_line(arguments)))
    output.deliver(output.head("inspect", arguments) | as_dict(report), report.text(arguments.top), arguments.json)
    found = report.findings()
    if arguments.fail and found:
        count = plural(len(found), "finding")
        output.say(f"octavo inspect: --fail: {count}. The first: {found[0]}")
        return 1
    return 0


def as_dict(report: Inspection) -> output.Report:
    return {
        "findings": report.findings(),
        "advice": [one._asdict() for one in report._advice],
        "tensors": [
            {"layer": row.layer, "tensor": row.tensor, "cast": row.cast, "calls": row.calls, **row.numbers(),
             "amaxes": row.amaxes, "scales": row.scales, "values": row.values}
            for row in report.rows()
        ],
    }  # fmt: skip
