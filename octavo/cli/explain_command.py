"""Report what torch.compile does with your model: graphs, breaks, recompiles, skipped CUDA graphs, and layers.

Write a function without arguments in a module of your own. It returns the model and its inputs, in one of three forms:

    model, x, y                           one call, model(x, y)
    model, {"input_ids": x, "labels": y}  one call by keyword, as models of transformers take a batch
    model, [(x1, y1), (x2, y2)]           one call per tuple or dict; another size shows its recompile

Python looks for the module in the current folder first. The command runs forward and backward on a copy of the model.
On a GPU it uses Inductor, with CUDA graphs unless --mode says otherwise. On a CPU it captures the graphs and generates
no code, unless --mode is given. It takes as long as torch.compile takes for your model. The exit code is 1 if a
condition of --fail-on is met.

example: octavo explain mymodule:example --fail-on break,recompile,skip
"""

import argparse
from collections.abc import Callable, Sequence

import torch

from octavo.cli import output
from octavo.cli.target import add_target, loaded
from octavo.cli.train import check_compiler
from octavo.errors import UnsupportedConfig
from octavo.inspection.explain import explain
from octavo.inspection.report import CompileReport
from octavo.inspection.steps import give_recipe
from octavo.recipes import recipe
from octavo.text import plural

CONDITIONS: dict[str, tuple[str, Callable[[CompileReport], Sequence[object]]]] = {
    "break": ("graph break", lambda report: report.breaks),
    "recompile": ("recompile", lambda report: report.recompiles),
    "skip": ("cudagraph skip", lambda report: report.skips),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--recipe", default=None, help="explain the model in this recipe; default: as it is")
    parser.add_argument(
        "--mode", default=None,
        help="mode of torch.compile, such as max-autotune; default: reduce-overhead on a GPU, none on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--fail-on", default="", metavar="LIST",
        help=f"exit with code 1 if there is one of these, comma-separated: {', '.join(CONDITIONS)}; default: none",
    )  # fmt: skip
    parser.add_argument("--memory", action="store_true", help="also count the memory of a step by module; default: no")
    output.add_json(parser, "the report")


def run(arguments: argparse.Namespace) -> int:
    conditions = parse_conditions(arguments.fail_on)
    chosen = None if arguments.recipe is None else recipe(arguments.recipe)
    with loaded(arguments.target) as (model, batches):
        if chosen is not None:
            give_recipe(model, chosen)
        if arguments.mode is not None:
            check_compiler(next((p.device for p in model.parameters()), torch.device("cpu")))
        first, *rest = batches
        inputs, named = (first, {}) if isinstance(first, tuple) else ((), first)
        report = explain(model, *inputs, kwargs=named, then=rest, mode=arguments.mode, memory=arguments.memory)
    output.deliver(output.head("explain", arguments) | report.as_dict(), str(report), arguments.json)
    if "skip" in conditions and not report.cudagraphs:
        output.say("--fail-on skip: this run used no CUDA graphs, so none could be skipped.")
    failed = failures(report, conditions)
    for sentence in failed:
        output.say(f"octavo explain: {sentence}")
    return 1 if failed else 0


def parse_conditions(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in CONDITIONS:
            raise UnsupportedConfig(f"--fail-on takes a list of {', '.join(CONDITIONS)}, got {word!r}. Correct it.")
    return words


def failures(report: CompileReport, conditions: Sequence[str]) -> list[str]:
    """Return a sentence for each condition that is met."""
    sentences = []
    for word in conditions:
        noun, find = CONDITIONS[word]
        if found := find(report):
            sentences.append(f"--fail-on {word}: {plural(len(found), noun)}. The first: {found[0]}")
    return sentences
