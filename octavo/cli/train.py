"""Train a small language model in bf16 and in recipes, from the same start on the same batches, and compare them.

The model predicts the bytes of a text: "Alice's Adventures in Wonderland", which the package contains, or that of
--data FILE. The table shows the losses on the last tenth of the text, which is held out, how far each is above that of
bf16 in percent (gap), with its standard error over that text, and the speed. The defaults take one to two minutes on a
CPU.

All runs keep float32 master weights and bfloat16 activations (torch.autocast). The bf16 run is plain torch, and is made
once for all recipes. The others apply a recipe to every linear layer except the output head. With --policy each layer
gets the recipe of the first rule that matches it, and a table shows how many layers took each rule.

--model gpt    RMSNorm, attention and a GELU MLP
--model llama  the blocks of Llama: rotary attention with shared keys and values, and a SwiGLU MLP
--model moe    the GPT with a mixture of 8 experts, 2 for a token, in place of each MLP: octavo.MoE in the recipe, and
               plain torch in the bf16 run. A table shows for each layer the smallest and the largest share of the
               held-out text that one expert got

--html FILE writes a page with the curves, what the recipe did to the tensors of each layer at sampled steps, time and
memory, and the environment: one file, nothing else needed. With --every N it looks at the tensors every N steps, and
rewrites the page each time, with their numbers by step.

--out DIR saves all runs: weights by plain names, in safetensors files, and all that --resume needs to go on bit for
bit. Ctrl-C then ends the step, saves, and prints the command that resumes. A recipe that DIR does not have yet starts
beside the runs that it has.

--parallel tp=2,dp=2 splits the layers of the recipe over two ranks and each batch over two, on the four ranks of
torchrun --nproc-per-node 4 -m octavo train ...; fsdp=N shards parameters too, and pp=N makes a pipeline. With dp=N and
--out DIR, ranks that torchrun restarts go on from the last checkpoint.

One small run shows that a recipe trains. It does not rank recipes: another seed moves a gap by half a percent at this
size, and the small model is too small to gain speed.

example: octavo train --model llama --recipe fp8-block --recipe "nvfp4(wgrad='bf16')" --out run
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.cli import machine, options, output
from octavo.demo import corpus, page, saves, split_model
from octavo.demo.gpt import GPT
from octavo.demo.headline import headline
from octavo.demo.saves import Keeper, Saves
from octavo.demo.train_text import render, runs_of
from octavo.demo.training import (
    MODELS,
    SIZES,
    Plan,
    converted,
    gap,
    gap_noise,
    name_of,
    shape_of,
    train,
)
from octavo.errors import UnsupportedConfig, UnsupportedHardware
from octavo.inspection import page_file
from octavo.kernels.gemm import spec_route
from octavo.model.conversion import ConversionReport
from octavo.model.layer_lookup import layers
from octavo.model.policy import Policy
from octavo.recipes import SHIPPED, Recipe, recipe

COMPILERS = ("g++", "clang++", "c++")
DEFAULT = "fp8-current"
SAMPLES = 4  # steps whose tensors a page shows


@dataclass(frozen=True)
class Subject:
    """A run beside the baseline: its name in tables, what it applies to the model, and its folder in --out DIR."""

    name: str
    chosen: Recipe | Policy
    folder: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=MODELS, default="gpt", help="the kind of model, see above; default: %(default)s"
    )
    parser.add_argument(
        "--recipe", action="extend", type=options.recipes, default=None, metavar="RECIPE",
        help=f"one of {', '.join(SHIPPED)}; settings may follow in brackets; may be given several times, or "
        f"comma-separated; default: {DEFAULT}",
    )  # fmt: skip
    parser.add_argument(
        "--policy", action="append", default=None, metavar="FILE",
        help="a TOML file of rules that give each layer its recipe; may be given several times, and beside --recipe; "
        "default: none",
    )  # fmt: skip
    parser.add_argument(
        "--size", default="small", metavar="SIZE",
        help=f"{', '.join(SIZES)}, or width,layers,heads,context; default: %(default)s, which is {_sizes('small')}",
    )  # fmt: skip
    parser.add_argument(
        "--data", default=None, metavar="FILE", help="a file of text to train on; default: the book in the package"
    )
    parser.add_argument(
        "--steps", type=int, default=Plan.steps, metavar="N", help="steps of each run; default: %(default)s"
    )
    parser.add_argument(
        "--batch", type=int, default=Plan.batch, metavar="N",
        help="sequences in a step, each as long as the context of the size; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=options.seed, default=Plan.seed, metavar="N",
        help="seed of the first weights and of the batches; default: %(default)s",
    )  # fmt: skip
    machine.add_device(parser)
    parser.add_argument("--compile", action="store_true", help="run all under torch.compile; default: eager")
    output.add_json(parser, "the loss of every step")
    parser.add_argument(
        "--html", default=None, metavar="FILE",
        help="also write a page to FILE; default: DIR/report.html with --out DIR, else none",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=options.count, default=None, metavar="N",
        help="with a page: look at the tensors, and rewrite it, every N steps; default: look four times",
    )  # fmt: skip
    saves.add_arguments(parser, options.count)
    split_model.add_arguments(parser)


def _sizes(name: str) -> str:
    shape = SIZES[name]
    return f"{shape.width},{shape.layers},{shape.heads},{shape.context}"


def run(arguments: argparse.Namespace) -> int:
    subjects = subjects_of(arguments)
    page_at = arguments.html
    if page_at is None and arguments.out is not None:
        page_at = str(Path(arguments.out) / "report.html")
    if arguments.every is not None and page_at is None:
        raise UnsupportedConfig("--every N rewrites the page of the run, and there is none. Pass --html FILE too.")
    plan = plan_of(arguments, samples=0 if page_at is None else SAMPLES)
    with split_model.first_rank_speaks(plan.ranks, arguments):
        return _report(arguments, plan, subjects, page_at)


def _report(arguments: argparse.Namespace, plan: Plan, subjects: list[Subject], page_at: str | None) -> int:
    saved = saves.from_options(arguments, [subject.folder for subject in subjects])
    if plan.ranks is not None and not plan.ranks.is_first:
        page_at, saved = None, None if saved is None else replace(saved, writes=False)
    try:
        live = page_at if plan.every is not None else None
        fill, head = partial(compare, plan, subjects, saved, live), output.head("train", arguments)
        report = output.produce(fill, render, arguments.json, head=head)
    except output.Interrupted as stop:
        said = [str(stop), *_write_page(stop.report, page_at)]
        if saved is not None:
            again = output.command_line(arguments) + ("" if arguments.resume else " --resume")
            said.append(saves.how_to_resume(saved, again))
        raise output.Interrupted(" ".join(said), stop.report) from None
    for sentence in _write_page(report, page_at):
        print(f"\n{sentence}", file=sys.stderr if arguments.json == "-" else sys.stdout)
    return 0


def plan_of(arguments: argparse.Namespace, samples: int) -> Plan:
    """Return the settings of all runs, checked before any work."""
    device = machine.parse_device(arguments.device)
    if arguments.compile:
        check_compiler(device)
    shape = shape_of(arguments.model, arguments.size)
    corpus.check(arguments.data, shape.context)
    ranks = split_model.start(arguments, device)
    return Plan(
        arguments.steps, arguments.batch, arguments.seed, device, arguments.compile, shape, arguments.data,
        samples if ranks is None else 0, arguments.every, ranks,
    )  # fmt: skip


def subjects_of(arguments: argparse.Namespace) -> list[Subject]:
    """Return the runs beside the baseline: recipes first, then policies, each in their order."""
    policies = arguments.policy or []
    recipes = arguments.recipe or ([] if policies else [DEFAULT])
    chosen: list[tuple[str, Recipe | Policy]] = [(name_of(recipe(text)), recipe(text)) for text in recipes]
    chosen += [(Path(path).name, Policy.load(path)) for path in policies]
    names = [name for name, _ in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UnsupportedConfig(f"{twice} was given twice, and would be one line of the table. Leave one out.")
    return [Subject(name, one, saves.folder_of(name, names)) for name, one in chosen]


def _write_page(report: dict[str, Any], target: str | None) -> list[str]:
    """Write the page of a report that has losses. Return a sentence that says where it is."""
    if target is None or not runs_of(report):
        return []
    page_file.write(Path(target), page.render(report))
    return [f"{headline(runs_of(report), report['plan']['steps'])}. The page of this report is {target}."]


def check_compiler(device: torch.device) -> None:
    """Raise if torch.compile would fail later: for a CPU it generates C++ and needs a compiler."""
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))):
        raise UnsupportedHardware(
            f"torch.compile on a CPU needs a C++ compiler, and none of {', '.join(COMPILERS)} is here. "
            "Install one, or leave out --compile."
        )


def compare(
    plan: Plan, subjects: Sequence[Subject], saved: Saves | None, live: str | None, report: dict[str, Any]
) -> None:
    """Fill the report with all runs, as plain data. An interrupted run has only the losses of its steps. `live` is the
    file of a page that is rewritten after each sample."""
    report |= {"machine": machine.describe(plan.device), "plan": asdict(plan) | {"device": str(plan.device)}}
    report["routes"] = [row for subject in subjects for row in routes(subject, plan.device)]
    for subject in subjects:
        if isinstance(subject.chosen, Policy):  # on a model of its own, so that a policy that is refused costs no run
            report.setdefault("policies", {})[subject.name] = tried(plan, subject.chosen)

    def outcome(name: str, folder: str, chosen: Recipe | Policy | None, add: Any) -> Any:
        losses: list[Tensor] = []
        keeper = None if saved is None else Keeper(saved, folder, settings_of(plan, name, chosen), plan.steps)

        def so_far(losses: list[Tensor], samples: list[dict[str, Any]]) -> None:
            run = {"recipe": name, "loss": None, "losses": torch.stack(losses).tolist(), "numerics": list(samples),
                   "running": True}  # fmt: skip
            _write_live(report, run, live)

        try:
            found = train(plan, chosen, name=name, show=True, losses=losses, keeper=keeper, sampled=so_far)
        except KeyboardInterrupt:
            if losses:
                add({"recipe": name, "loss": None, "losses": torch.stack(losses).tolist()})
            raise
        add(asdict(found))
        return found

    baseline = outcome(name_of(None), saves.BASELINE, None, partial(report.__setitem__, "bf16"))
    report["recipes"] = []
    for subject in subjects:
        found = outcome(subject.name, subject.folder, subject.chosen, report["recipes"].append)
        report["recipes"][-1] |= {
            "gap_percent": gap(found, baseline),
            "gap_noise_percent": gap_noise(found, baseline),
        }


def _write_live(report: dict[str, Any], run: dict[str, Any], live: str | None) -> None:
    """Write the page with a run that has not ended."""
    if live is not None:
        runs = {"recipes": [*report["recipes"], run]} if "bf16" in report else {"bf16": run, "recipes": []}
        page_file.write(Path(live), page.render({**report, **runs, "running": True}))


def tried(plan: Plan, policy: Policy) -> dict[str, Any]:
    """Return a policy as data, with the number of layers that take each rule at the first step."""
    model = GPT(plan.shape, seed=plan.seed)
    made: ConversionReport = converted(model, policy)
    if next(layers(model), None) is None:
        raise UnsupportedConfig(
            f"The policy gives no layer a recipe, so there is nothing to compare. {made.summary()} Add a rule: "
            'layers = "*", recipe = "mxfp8".'
        )
    counts = [sum(row.rule == number for row in made) for number in range(1, len(policy.rules) + 1)]
    return policy.to_dict() | {"layers": counts, "notes": list(made.notes)}


def routes(subject: Subject, device: torch.device) -> list[dict[str, str]]:
    """Return how each GEMM of a linear layer runs on this device, native, emulated or by the reference: for a recipe,
    or for each recipe of a policy."""
    if isinstance(subject.chosen, Recipe):
        return [{"recipe": subject.name, **_routes(subject.chosen, device)}]
    found = dict.fromkeys(rule.recipe for rule in subject.chosen.rules if rule.recipe is not None)
    return [{"recipe": f"{subject.name}: {one}", **_routes(one, device)} for one in found]


def _routes(chosen: Recipe, device: torch.device) -> dict[str, str]:
    gemms = {name: getattr(chosen.linear(), name) for name in ("fprop", "dgrad", "wgrad")}
    return {name: spec_route(gemm.left, gemm.right, device) for name, gemm in gemms.items()}


def settings_of(plan: Plan, name: str, chosen: Recipe | Policy | None) -> dict[str, Any]:
    """Return what decides the numbers of a run, by option."""
    return {
        "--recipe": name, "--policy": str(chosen) if isinstance(chosen, Policy) else None,
        "--model": plan.model(), "--steps": plan.steps, "--batch": plan.batch, "--seed": plan.seed,
        "--device": plan.device.type, "--compile": plan.compile, "--size": plan.shape.sizes(),
        "--data": "the book" if plan.data is None else plan.data, "text": corpus.digest(plan.data),
        "sizes": asdict(plan.shape),
    }  # fmt: skip
