"""Report what torch.compile does with your model: graphs, breaks, recompiles, skipped CUDA graphs, and layers.

Write a function without arguments in a module of your own. It returns the model and its inputs, in one of two forms:

    model, x, y                           one call, model(x, y)
    model, [(x1, y1), (x2, y2)]           one call per tuple; another size shows its recompile

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
from octavo.text import plural

CONDITIONS: dict[str, tuple[str, Callable[[CompileReport], Sequence[object]]]] = {
    "break": ("graph break", lambda report: report.breaks),
    "recompile": ("recompile", lambda report: report.recompiles),
    "skip": ("cudagraph skip", lambda report: report.skips),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--mode", default=None,
        help="mode of torch.compile, such as max-autotune; default: reduce-overhead on a GPU, none on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--fail-on", default="", metavar="LIST",
        help=f"exit with code 1 if there is one of these, comma-separated: {', '.join(CONDITIONS)}; default: none",
    )  # fmt: skip
    output.add_json(parser, "the report")


def run(arguments: argparse.Namespace) -> int:
    conditions = parse_conditions(arguments.fail_on)
    with loaded(arguments.target) as (model, batches):
        if arguments.mode is not None:
            check_compiler(next((p.device for p in model.parameters()), torch.device("cpu")))
        report = explain(model, *batches[0], then=batches[1:], mode=arguments.mode)
    output.deliver(report.as_dict(), str(report), arguments.json)
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
