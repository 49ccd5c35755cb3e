"""Train a small GPT in bf16 and in a recipe, from the same start on the same batches, and compare their losses.

The model predicts the bytes of "Alice's Adventures in Wonderland", which the package contains. The table shows both
losses on the last tenth of the book, which is held out, their difference in percent (gap), and the speed. The defaults
take one to two minutes on a CPU, with either model.

Both runs keep float32 master weights and bfloat16 activations (torch.autocast). The bf16 run is plain torch. The other
run applies the recipe to every linear layer except the output head. With --policy each layer gets the recipe of the
first rule that matches it, and a table shows how many layers took each rule. With --model moe each MLP is a mixture of
8 experts of which every token takes 2: octavo.MoE in the recipe, and plain torch in the bf16 run. A second table then
shows for each layer the smallest and the largest share of the held-out text that one expert got.

--out DIR saves both runs: weights by plain names, in safetensors files, and all that --resume needs to go on bit for
bit. Ctrl-C then ends the step, saves, and prints the command that resumes.

One small run shows that a recipe trains. It does not rank recipes: a gap of one percent either way is noise at this
size, and the model is too small to gain speed.

--parallel tp=2,dp=2 splits the layers of the recipe over two ranks and each batch over two, on the four ranks of
torchrun --nproc-per-node 4 -m octavo train ...

example: octavo train --recipe "fp8-block(scale='fp32')" --steps 400 --json run.json
"""

import argparse
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from octavo.cli import corpus, machine, options, output, page, parallel, saves, table
from octavo.cli.gpt import GPT, Shape
from octavo.cli.mixture import LoadMeter, MixtureShape, mixtures
from octavo.cli.progress import Progress
from octavo.cli.saves import Keeper, Saves
from octavo.errors import UnsupportedConfig, UnsupportedHardware
from octavo.kernels.gemm import spec_route
from octavo.model.attach import attach
from octavo.model.conversion import ConversionReport
from octavo.model.convert import convert
from octavo.model.layers import layers
from octavo.model.policy import Policy
from octavo.recipes import SHIPPED, Recipe, recipe

RATE, WARMUP, CLIP = 4e-3, 20, 1.0  # AdamW's peak learning rate, the steps up to it, the largest gradient norm
COMPILERS = ("g++", "clang++", "c++")
HEAD = "head"  # stays in high precision: logits tolerate less rounding than the layers before them
BASELINE = "bf16 (torch)"
EVALUATED = 16  # windows in a batch of the evaluation
SHAPE, CPU = Shape(), torch.device("cpu")
MODELS: dict[str, MixtureShape | None] = {"gpt": None, "moe": MixtureShape()}  # the mixture in place of each MLP


@dataclass(frozen=True)
class Plan:
    """The settings that two runs share. Equal plans give equal batches and equal first weights."""

    steps: int = 200
    batch: int = 8
    seed: int = 0
    device: torch.device = CPU
    compile: bool = False
    shape: Shape = SHAPE
    ranks: parallel.Ranks | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise UnsupportedConfig(f"--steps and --batch must be 1 or more, got {self.steps} and {self.batch}.")

    def tokens(self) -> int:
        """Returns the number of bytes predicted in one step."""
        return self.batch * self.shape.context


@dataclass(frozen=True)
class Outcome:
    """One run: its loss on the text held out, its loss at every step, its speed, and of a model with mixtures the share
    of the held-out text that each expert of each layer got."""

    recipe: str
    loss: float
    losses: list[float]
    tokens_per_s: float
    seconds: float
    load: list[list[float]] = field(default_factory=list)


def shape_of(model: str) -> Shape:
    """Returns the sizes of a model by its name."""
    return replace(SHAPE, mixture=MODELS[model])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--recipe", default="fp8-current",
        help=f"one of {', '.join(SHIPPED)}; settings may follow in brackets; default: %(default)s",
    )  # fmt: skip
    how.add_argument(
        "--policy", default=None, metavar="FILE",
        help="a TOML file of rules that give each layer its recipe; default: --recipe for all of them",
    )  # fmt: skip
    parser.add_argument(
        "--model", choices=MODELS, default="gpt",
        help="gpt, or moe: the same with mixtures of experts in place of MLPs; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=Plan.steps, metavar="N", help="steps of each run; default: %(default)s"
    )
    parser.add_argument(
        "--batch", type=int, default=Plan.batch, metavar="N",
        help=f"sequences in a step, each of {SHAPE.context} bytes; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=options.seed, default=Plan.seed, metavar="N",
        help="seed of the first weights and of the batches; default: %(default)s",
    )  # fmt: skip
    machine.add_device(parser)
    parser.add_argument("--compile", action="store_true", help="run both under torch.compile; default: eager")
    output.add_json(parser, "the loss of every step")
    parser.add_argument(
        "--html", default=None, metavar="FILE",
        help="also write a page with curves to FILE; default: DIR/report.html with --out DIR, else none",
    )  # fmt: skip
    saves.add_arguments(parser, options.count)
    parallel.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    chosen = recipe(arguments.recipe) if arguments.policy is None else Policy.load(arguments.policy)
    device = machine.parse_device(arguments.device)
    if arguments.compile:
        check_compiler(device)
    ranks = parallel.start(arguments, device)
    shape = shape_of(arguments.model)
    plan = Plan(arguments.steps, arguments.batch, arguments.seed, device, arguments.compile, shape, ranks)
    with parallel.first_rank_speaks(ranks, arguments):
        return _report(arguments, plan, chosen)


def _report(arguments: argparse.Namespace, plan: Plan, chosen: Recipe | Policy) -> int:
    saved = saves.from_options(arguments)
    report: dict[str, Any] = {}
    target = arguments.html if saved is None or arguments.html is not None else str(saved.folder / "report.html")
    try:
        output.produce(partial(_compare_into, report, plan, chosen, saved), render, arguments.json)
    except output.Interrupted as stop:
        said = [str(stop), *_write_page(report, target)]
        if saved is not None:
            parser = argparse.ArgumentParser()
            add_arguments(parser)
            said.append(saves.how_to_resume(saved, arguments, parser))
        raise output.Interrupted(" ".join(said)) from None
    for sentence in _write_page(report, target):
        print(f"\n{sentence}", file=sys.stderr if arguments.json == "-" else sys.stdout)
    return 0


def _compare_into(
    kept: dict[str, Any], plan: Plan, chosen: Recipe | Policy, saved: Saves | None, report: dict[str, Any]
) -> None:
    """Fills the report, and keeps it for a page, however far it gets."""
    try:
        compare(plan, chosen, saved, report)
    finally:
        kept.update(report)


def _write_page(report: dict[str, Any], target: str | None) -> list[str]:
    """Writes the page of a report that has losses. Returns a sentence that says where it is."""
    if target is None or not any(report.get(name) for name in ("bf16", "recipe")):
        return []
    output.write(Path(target), page.render(report))
    return [f"The page of this report is {target}."]


def check_compiler(device: torch.device) -> None:
    """Raises if torch.compile would fail later: for a CPU it generates C++ and needs a compiler."""
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))):
        raise UnsupportedHardware(
            f"torch.compile on a CPU needs a C++ compiler, and none of {', '.join(COMPILERS)} is here. "
            "Install one, or leave out --compile."
        )


def compare(plan: Plan, chosen: Recipe | Policy, saved: Saves | None, report: dict[str, Any]) -> None:
    """Fills the report with both runs, as plain data. An interrupted run has only the losses of its steps."""
    report |= {"machine": machine.describe(plan.device), "plan": asdict(plan) | {"device": str(plan.device)}}
    if isinstance(chosen, Recipe):
        report["routes"] = [{"recipe": str(chosen), **routes(chosen, plan.device)}]
    if isinstance(chosen, Policy):  # on a model of its own, so that a policy that is refused costs no run
        model = GPT(plan.shape, seed=plan.seed)
        made = converted(model, chosen)
        if next(layers(model), None) is None:
            raise UnsupportedConfig(
                f"The policy gives no layer a recipe, so there is nothing to compare. {made.summary()} Add a rule: "
                'layers = "*", recipe = "mxfp8".'
            )
        report["policy"] = described(chosen, made)
    outcomes = []
    for key, subject in (("bf16", None), ("recipe", chosen)):
        losses: list[Tensor] = []
        keeper = None if saved is None else Keeper(saved, key, settings_of(plan, subject), plan.steps)
        try:
            outcomes.append(train(plan, subject, show=True, losses=losses, keeper=keeper))
        except KeyboardInterrupt:
            if losses:
                report[key] = {"recipe": name_of(subject), "loss": None, "losses": torch.stack(losses).tolist()}
            raise
        report[key] = asdict(outcomes[-1])
    report["gap_percent"] = gap(outcomes[1], outcomes[0])


def routes(chosen: Recipe, device: torch.device) -> dict[str, str]:
    """Returns how each GEMM of a linear layer runs on this device: native, emulated or by the reference."""
    gemms = {name: getattr(chosen.linear(), name) for name in ("fprop", "dgrad", "wgrad")}
    return {name: spec_route(gemm.left, gemm.right, device) for name, gemm in gemms.items()}


def settings_of(plan: Plan, chosen: Recipe | Policy | None) -> dict[str, Any]:
    """Returns what decides the numbers of a run, by option."""
    return {
        "--recipe": name_of(chosen), "--policy": str(chosen) if isinstance(chosen, Policy) else None,
        "--model": "gpt" if plan.shape.mixture is None else "moe", "--steps": plan.steps,
        "--batch": plan.batch, "--seed": plan.seed, "--device": plan.device.type, "--compile": plan.compile,
        "sizes": asdict(plan.shape),
    }  # fmt: skip


def gap(outcome: Outcome, baseline: Outcome) -> float:
    """Returns how much higher the loss is than the baseline's, in percent."""
    return 100 * (outcome.loss / baseline.loss - 1)


def name_of(chosen: Recipe | Policy | None) -> str:
    if isinstance(chosen, Policy):
        return "policy"
    return BASELINE if chosen is None else str(chosen)


def converted(model: nn.Module, chosen: Recipe | Policy, step: int = 0) -> ConversionReport:
    """Converts the model as it is after so many steps, except for its head, unless a rule of a policy names it."""
    if isinstance(chosen, Recipe):
        return convert(model, chosen, exclude=HEAD)
    with warnings.catch_warnings(action="ignore"):  # the command's report has unused rules
        return convert(model, chosen, step=step)


def described(policy: Policy, made: ConversionReport) -> dict[str, Any]:
    """Returns a policy as data, with the number of layers that take each rule at the first step."""
    counts = [sum(row.rule == number for row in made) for number in range(1, len(policy.rules) + 1)]
    return policy.to_dict() | {"layers": counts, "notes": list(made.notes)}


def train(
    plan: Plan,
    chosen: Recipe | Policy | None,
    *,
    show: bool = False,
    losses: list[Tensor] | None = None,
    keeper: Keeper | None = None,
) -> Outcome:
    """Trains from fresh weights, or from those that `keeper` has, and returns the loss on the held-out text with the
    rest of the outcome. None is the baseline: the model as it is. Each step appends its loss to `losses`, so that the
    caller has those of a run that is interrupted."""
    name = name_of(chosen)
    losses = [] if losses is None else losses
    text, held_out = corpus.load()
    torch.manual_seed(plan.seed)  # stochastic rounding follows torch's own seed
    model = GPT(plan.shape, seed=plan.seed, plain=chosen is None).to(plan.device)
    if chosen is not None:
        converted(model, chosen, 0 if keeper is None else keeper.steps_made())
        if plan.ranks is not None:
            parallel.split(model, plan.ranks)
    call: Callable[[Tensor], Tensor] = torch.compile(model, fullgraph=True) if plan.compile else model
    clock, progress = Clock(plan), Progress(name.ljust(len(BASELINE)), plan.steps)

    def note(step: int, loss: Tensor) -> None:
        losses.append(loss)
        clock.tick(step)
        if show and progress.due(step):
            progress.show(step, f"loss {loss.item():.3f}")

    run = None if keeper is None else SavedRun(keeper, losses, clock)
    data = corpus.batches(text, steps=plan.steps, batch=plan.batch, context=plan.shape.context, seed=plan.seed)
    try:
        optimize(model, call, data, plan, note, quantized=chosen is not None, run=run)
    finally:
        progress.close()
    load = LoadMeter(model)
    loss = evaluate(load.around(call), corpus.windows(held_out, context=plan.shape.context), plan)
    return Outcome(name, loss, torch.stack(losses).tolist(), clock.rate(), clock.seconds(), load.shares())


def optimize(
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    data: Iterable[Tensor],
    plan: Plan,
    note: Callable[[int, Tensor], None],
    *,
    quantized: bool,
    run: "SavedRun | None" = None,
) -> None:
    """Runs AdamW on each batch in turn. `call` is the model, or its compiled form; it calls `note(step, loss)` after
    every step, with the loss without that of balance; `quantized` says whether the model has layers of Octavo's; `run`
    saves the run, and skips the steps that it has."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, plan.steps))
    # ends delayed scaling's step at each step of the optimizer
    ranks = plan.ranks
    attached = attach(model, optimizer, None if ranks is None else ranks.everyone) if quantized else None
    balanced = mixtures(model)
    begun = 0 if run is None else run.restore(model, optimizer, schedule)
    with nullcontext() if run is None else run.keeper.finishing_steps():
        for step, batch in islice(enumerate(data, start=1), begun, None):
            loss = loss_of(call, (batch if ranks is None else ranks.own_rows(batch)).to(plan.device))
            sum((mixture.aux_loss for mixture in balanced), loss).backward()  # type: ignore[no-untyped-call]
            if ranks is None:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            else:
                ranks.finish(model, CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            note(step, loss.detach() if ranks is None else ranks.mean(loss.detach()))
            if run is not None:
                run.after(step, model, optimizer, schedule)
    if attached is not None:
        attached.remove()


def rate(step: int, steps: int) -> float:
    """Returns the fraction of the peak learning rate: linear warm-up, then linear decay to a tenth."""
    return min((step + 1) / WARMUP, 1 - 0.9 * step / steps)


def loss_of(call: Callable[[Tensor], Tensor], batch: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns the mean cross entropy of a batch's next bytes, with activations in `dtype`."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    with nullcontext() if dtype == torch.float32 else torch.autocast(batch.device.type, dtype):
        return F.cross_entropy(call(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(call: Callable[[Tensor], Tensor], held_out: Tensor, plan: Plan) -> float:
    """Returns the mean loss over all windows."""
    total = 0.0
    for batch in torch.split(held_out, EVALUATED):
        total += loss_of(call, batch.to(plan.device)).item() * len(batch)
    return total / len(held_out)


class Clock:
    """Measures tokens per second over the second half of the steps, which leaves out warm-up and compilation."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.half = plan, plan.steps // 2
        self.started = self.middle = self.ended = time.perf_counter()

    def tick(self, step: int) -> None:
        if step in (self.half, self.plan.steps):
            if self.plan.device.type == "cuda":
                torch.cuda.synchronize(self.plan.device)
            self.ended = time.perf_counter()
        if step == self.half:
            self.middle = self.ended

    def middle_after(self) -> float:
        """Returns the seconds from the start to the middle; 0 before it."""
        return self.middle - self.started

    def go_on(self, seconds: float, middle: float) -> None:
        """Goes on with the times of a run that was saved after so many seconds."""
        self.ended = time.perf_counter()
        self.started = self.ended - seconds
        self.middle = self.started + middle

    def rate(self) -> float:
        return (self.plan.steps - self.half) * self.plan.tokens() / (self.ended - self.middle)

    def seconds(self) -> float:
        return self.ended - self.started


class SavedRun:
    """A run with a folder: the losses and times of its steps, which a checkpoint has besides model and optimizer."""

    def __init__(self, keeper: Keeper, losses: list[Tensor], clock: Clock) -> None:
        self.keeper, self.losses, self.clock = keeper, losses, clock

    def restore(self, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> int:
        """Loads the newest checkpoint, if there is one, and returns how many steps it has."""
        saved = self.keeper.restore(model, optimizer)
        if saved is None:
            return 0
        self.losses[:] = saved["losses"].to(self.clock.plan.device)
        schedule.load_state_dict(saved["schedule"])
        self.clock.go_on(saved["seconds"], saved["middle"])
        return self.keeper.saved

    def after(self, step: int, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> None:
        def state() -> dict[str, Any]:
            times = {"seconds": time.perf_counter() - self.clock.started, "middle": self.clock.middle_after()}
            return {"losses": torch.stack(self.losses), "schedule": schedule.state_dict(), **times}

        self.keeper.after(step, model, optimizer, state)


def render(report: dict[str, Any]) -> str:
    runs = [report[key] for key in ("bf16", "recipe") if key in report]
    if not runs:
        return ""
    facts, plan = report["machine"], report["plan"]
    ended = [run for run in runs if run["loss"] is not None]
    gaps = ["", f"{report.get('gap_percent', 0):+.2f} %"]
    rows = [
        [r["recipe"], f"{r['loss']:.4f}", gap_text, f"{r['tokens_per_s']:.0f}"]
        for r, gap_text in zip(ended, gaps, strict=False)
    ]
    head = (
        f"{facts['gpu'] or 'CPU'}, torch {facts['torch']}; {plan['steps']} steps of "
        f"{plan['batch']} x {plan['shape']['context']} bytes, seed {plan['seed']}"
    )
    parts = [head, table.render(("recipe", "loss", "gap", "tokens/s"), rows)] if rows else [head]
    parts += [load_table(ended)] if ended and plan["shape"]["mixture"] else []
    parts += [rule_table(report["policy"])] if "policy" in report else []
    for run in runs:
        if run["loss"] is None:
            step, loss = len(run["losses"]), run["losses"][-1]
            parts.append(f"{run['recipe']} was interrupted after step {step}, at a training loss of {loss:.4f}.")
    if facts["gpu"] is None:
        parts.append("A CPU runs the reference: the same codes and scales as a GPU, GEMMs in float64, not faster.")
    return "\n\n".join(parts)


def rule_table(policy: dict[str, Any]) -> str:
    """Returns a table of a policy's rules and the number of layers that took each, with the notes of the conversion."""
    rules = [str(rule) for rule in Policy.from_dict({"rules": policy["rules"]}).rules]
    counted = enumerate(zip(rules, policy["layers"], strict=True), start=1)
    rows = [[str(number), rule, str(count)] for number, (rule, count) in counted]
    return "\n".join([table.render(("rule", "of the policy", "layers"), rows), *policy["notes"]])


def load_table(runs: list[dict[str, Any]]) -> str:
    """Returns a table of the smallest and the largest share of the held-out text that an expert of each layer got."""
    layers = range(1, len(runs[0]["load"]) + 1)
    rows = [
        [run["recipe"], *(f"{100 * min(shares):.1f} - {100 * max(shares):.1f} %" for shares in run["load"])]
        for run in runs
    ]
    even = 100 / len(runs[0]["load"][0])
    return table.render(("expert load", *(f"layer {layer}" for layer in layers)), rows) + f"\neven load: {even:.1f} %"
