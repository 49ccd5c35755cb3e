"""One run of `octavo train`: a small language model trained from fresh weights, in plain torch or in a recipe.

Equal plans give equal batches and equal first weights, so that runs which differ only in their recipes can be compared.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from octavo._torch.compilation import reset as forget_graphs
from octavo.communication.groups import rank_of
from octavo.demo import corpus, split_model
from octavo.demo.gpt import GPT, Shape, cross_entropy, loss_of
from octavo.demo.moe_gpt import LoadMeter, MixtureShape, mixtures
from octavo.demo.numerics import Sampler
from octavo.demo.pipeline_stages import Pipeline, Stage
from octavo.demo.progress import Progress
from octavo.demo.saves import Keeper
from octavo.errors import UnsupportedConfig
from octavo.model.attach import attach
from octavo.model.conversion import ConversionReport
from octavo.model.convert import convert
from octavo.model.high_precision import HIGH_PRECISION
from octavo.model.policy import Policy
from octavo.model.refresh import quantize_weights
from octavo.optim import AdamW
from octavo.recipes import Recipe

RATE, WARMUP, CLIP = 4e-3, 20, 1.0  # AdamW's peak learning rate, the steps up to it, the largest gradient norm
REFERENCE_WIDTH = 128  # of the model that RATE was chosen for; wider ones learn at a lower rate
HEAD = "head"  # stays in high precision: logits tolerate less rounding than the layers before them
BASELINE = "bf16 (torch)"
EVALUATED = 16  # windows in a batch of the evaluation
CPU = torch.device("cpu")
SIZES = {
    "small": Shape(),
    "medium": Shape(512, 6, 8, 256),
    "large": Shape(1024, 12, 16, 512),
    "huge": Shape(2048, 16, 16, 1024),
}
MODELS: dict[str, dict[str, Any]] = {  # what each changes in a shape
    "gpt": {},
    "llama": {"family": "llama"},
    "moe": {"mixture": MixtureShape()},
}


@dataclass(frozen=True)
class Plan:
    """The settings that all runs of a command share."""

    steps: int = 200
    batch: int = 8
    seed: int = 0
    device: torch.device = CPU
    compile: bool = False
    shape: Shape = SIZES["small"]
    data: str | None = None  # a file of text; None is the book that the package contains
    samples: int = 0  # steps at which the tensors of quantized layers are inspected
    every: int | None = None  # in place of so many evenly spaced ones: the distance of these steps
    ranks: split_model.Ranks | None = None  # None in one process
    codes: bool = False  # the weights of converted layers are codes, and the optimizer has their float32 values

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise UnsupportedConfig(f"--steps and --batch must be 1 or more, got {self.steps} and {self.batch}.")

    def tokens(self) -> int:
        """Return the number of bytes predicted in one step."""
        return self.batch * self.shape.context

    def pipeline(self, model: GPT) -> Pipeline | None:
        """Return this rank's stage of a model, with the others; None if there is one stage."""
        ranks = self.ranks
        if ranks is None or ranks.pp == 1:
            return None
        stage = Stage(model, rank_of(ranks.pp_group), ranks.pp)
        return Pipeline(stage, ranks.pp_group, self.batch // (ranks.dp * ranks.fsdp), self.shape.width)

    def model(self) -> str:
        """Return the name of the model, as --model takes it."""
        return "moe" if self.shape.mixture is not None else self.shape.family


@dataclass(frozen=True)
class Outcome:
    """One run, as plain data but for the name of its class."""

    recipe: str
    loss: float  # on the text held out
    losses: list[float]  # of every step
    tokens_per_s: float
    seconds: float
    windows: list[float] = field(default_factory=list)  # the losses of the pieces of the text held out
    load: list[list[float]] = field(default_factory=list)  # of a model with mixtures: the share of each layer's experts
    first_step_s: float = 0.0  # with the compilation of kernels and graphs
    kept_mib: float | None = None  # what one step keeps for backward, without the parameters; only with samples
    peak_mib: float | None = None  # the most that the GPU held; None on a CPU
    numerics: list[dict[str, Any]] = field(default_factory=list)  # of sampled steps


def shape_of(model: str, size: str = "small") -> Shape:
    """Return the sizes of a model by its name, and the name of a size or the numbers of one."""
    found = SIZES.get(size)
    if found is None:
        numbers = size.split(",")
        if len(numbers) != 4 or not all(number.strip().isdecimal() for number in numbers):
            raise UnsupportedConfig(
                f"--size is one of {', '.join(SIZES)}, or width,layers,heads,context such as 256,4,4,128, got {size!r}."
            )
        width, layers, heads, context = map(int, numbers)
        found = Shape(width, layers, heads, context)
    return replace(found, **MODELS[model])


def gap(outcome: Outcome, baseline: Outcome) -> float:
    """Return how much higher the loss is than the baseline's, in percent."""
    return 100 * (outcome.loss / baseline.loss - 1)


def gap_noise(outcome: Outcome, baseline: Outcome) -> float | None:
    """Return the standard error of the gap, in percent, from the differences of the two losses over the pieces of the
    held-out text: how far the gap would move with another text. That of another seed is not in it."""
    differences = [a - b for a, b in zip(outcome.windows, baseline.windows, strict=False)]
    if len(differences) < 2:
        return None
    return float(100 * stdev(differences) / len(differences) ** 0.5 / baseline.loss)


def name_of(chosen: Recipe | Policy | None) -> str:
    if isinstance(chosen, Policy):
        return "policy"
    return BASELINE if chosen is None else str(chosen)


def converted(model: nn.Module, chosen: Recipe | Policy, step: int = 0) -> ConversionReport:
    """Convert the model as it is after so many steps, except for its head, unless a rule of a policy names it."""
    named = isinstance(chosen, Policy) and any(HEAD in rule.layers for rule in chosen.rules)
    # convert knows a head by its 256 outputs, which other layers of these models may have
    kinds = [kind for kind in HIGH_PRECISION if kind != "head"]
    with warnings.catch_warnings(action="ignore"):  # the command's report has unused rules
        return convert(model, chosen, exclude=() if named else HEAD, high_precision=kinds, step=step)


def train(
    plan: Plan,
    chosen: Recipe | Policy | None,
    *,
    name: str = "",
    show: bool = False,
    losses: list[Tensor] | None = None,
    keeper: Keeper | None = None,
    ended: Callable[[nn.Module], None] | None = None,
    sampled: Callable[[list[Tensor], list[dict[str, Any]]], None] | None = None,
) -> Outcome:
    """Train from fresh weights, or from those that `keeper` has, and return the loss on the held-out text with the
    rest of the outcome. None is the baseline: the model as it is. Each step appends its loss to `losses`, so that the
    caller has those of a run that is interrupted. `ended` gets the trained model, `sampled`
    the losses and samples so far, after each sample."""
    name = name or name_of(chosen)
    losses = [] if losses is None else losses
    text, held_out = corpus.load(plan.data)
    if plan.compile:
        forget_graphs()  # a function is compiled for eight models at most
    torch.manual_seed(plan.seed)  # stochastic rounding follows torch's own seed
    model = GPT(plan.shape, seed=plan.seed, plain=chosen is None).to(plan.device)
    if chosen is not None:
        converted(model, chosen, 0 if keeper is None else keeper.steps_made())
        if plan.codes:
            quantize_weights(model, trainable=True, preserve_high_precision=True)
        if plan.ranks is not None:
            split_model.split(model, plan.ranks)
    pipeline = None if plan.ranks is None else plan.pipeline(model)
    own: nn.Module = model if pipeline is None else pipeline.stage  # what this rank has
    if plan.ranks is not None:
        plan.ranks.shard(own)
    call: Callable[[Tensor], Tensor] = torch.compile(model, fullgraph=True) if plan.compile else pipeline or model
    clock, progress = Clock(plan), Progress(name.ljust(len(BASELINE)), plan.steps)
    sampler = Sampler(plan.steps, plan.samples, plan.every)

    def note(step: int, loss: Tensor) -> None:
        losses.append(loss)
        clock.tick(step)
        if show and progress.due(step):
            progress.show(step, f"loss {loss.item():.3f}  {clock.so_far():.0f} tokens/s  {clock.text(step)}")
        if sampler.due(step):
            with clock.stopped():
                sampler.take(step, model)
                if sampled is not None:
                    sampled(losses, sampler.samples)

    run = None if keeper is None else SavedRun(keeper, losses, clock, sampler)
    data = corpus.batches(text, steps=plan.steps, batch=plan.batch, context=plan.shape.context, seed=plan.seed)
    try:
        optimize(own, call, sampler.following(data, plan.device), plan, note, quantized=chosen is not None, run=run)
    finally:
        progress.close()
    peak = clock.peak_mib()
    load = LoadMeter(model)
    windows = evaluate(load.around(call), corpus.windows(held_out, context=plan.shape.context), plan)
    if ended is not None:
        ended(model)
    return Outcome(
        name, fmean(windows), torch.stack(losses).tolist(), clock.rate(), clock.ended, windows, load.shares(),
        clock.first, sampler.kept_mib, peak, sampler.samples,
    )  # fmt: skip


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
    """Run AdamW on each batch in turn. `call` is the model, or its compiled form; it calls `note(step, loss)` after
    every step, with the loss without that of balance; `quantized` says whether the model has layers of Octavo's; `run`
    saves the run, and skips the steps that it has."""
    peak = RATE * min(1.0, REFERENCE_WIDTH / plan.shape.width)
    kind = AdamW if plan.codes and quantized else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, plan.steps))
    # ends delayed scaling's step at each step of the optimizer
    ranks = plan.ranks
    attached = attach(model, optimizer, None if ranks is None else ranks.stage_group) if quantized else None
    balanced = mixtures(model)
    begun = 0 if run is None else run.restore(model, optimizer, schedule)
    if ranks is not None:
        ranks.wait()  # all have read the checkpoint before one of them writes the next
    # a rank that stops at Ctrl-C would leave the others waiting: all of them end at once then
    with nullcontext() if run is None or ranks is not None else run.keeper.finishing_steps():
        for step, batch in islice(enumerate(data, start=1), begun, None):
            rows = (batch if ranks is None else ranks.own_rows(batch)).to(plan.device)
            if isinstance(call, Pipeline):
                loss = call.backward(rows[:, :-1], rows[:, 1:], cross_entropy)
            else:
                loss = loss_of(call, rows)
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
    """Return the fraction of the peak learning rate: linear warm-up, then linear decay to a tenth."""
    return min((step + 1) / WARMUP, 1 - 0.9 * step / steps)


@torch.no_grad()
def evaluate(call: Callable[[Tensor], Tensor], held_out: Tensor, plan: Plan) -> list[float]:
    """Return the mean loss of each window."""
    found: list[float] = []
    for batch in torch.split(held_out, EVALUATED):
        found += loss_of(call, batch.to(plan.device), reduction="none").double().mean(1).tolist()
    return found


class Clock:
    """Measure tokens per second over the second half of the steps, which leaves out warm-up and compilation, and the
    most memory that a GPU held. Its time is the seconds of training: those of a run that goes on are in it, and work in
    `stopped` is not."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.half, self.on_gpu = plan, plan.steps // 2, plan.device.type == "cuda"
        self.zero = time.perf_counter()  # when this clock would have shown 0
        self.first = self.middle = self.ended = 0.0  # the ends of the first step, of the half and of the last
        self.begun: float | None = None  # the end of this process's first step, which compiles
        self.steps = 0  # those that this process made after it
        self.peak = 0
        self._reset_peak()

    def tick(self, step: int) -> None:
        if step in (1, self.half, self.plan.steps):
            self.ended = self._waited()
        if step == 1:
            self.first = self.ended
        if step == self.half:
            self.middle = self.ended
        if self.begun is None:
            self.begun = self._now()
        else:
            self.steps += 1

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave the time and the memory of a block out."""
        before, self.peak = self._waited(), self._peak()
        try:
            yield
        finally:
            self.zero += self._waited() - before
            self._reset_peak()

    def times(self) -> dict[str, float]:
        """Return the time and the marks, for `go_on`."""
        return {"first": self.first, "middle": self.middle, "seconds": self._now()}

    def go_on(self, times: dict[str, float]) -> None:
        """Go on with the times of a run that was saved."""
        self.zero = time.perf_counter() - times["seconds"]
        self.first, self.middle, self.ended = times["first"], times["middle"], times["seconds"]

    def rate(self) -> float:
        return (self.plan.steps - self.half) * self.plan.tokens() / (self.ended - self.middle)

    def so_far(self) -> float:
        """Return the tokens per second of this process after its first step, as far as the host knows; 0 before."""
        return self.steps * self.plan.tokens() / max(self._now() - (self.begun or 0.0), 1e-9)

    def text(self, step: int) -> str:
        """Return the seconds so far and those left, as a text. A step takes as long as those of this process did, its
        first left out unless it is the only one."""
        now, left = self._now(), self.plan.steps - step
        each = (now - (self.begun or 0.0)) / self.steps if self.steps else now
        return f"{now:.0f} s" + (f", {each * left:.0f} s left" if left else "")

    def peak_mib(self) -> float | None:
        return self._peak() / 2**20 if self.on_gpu else None

    def _now(self) -> float:
        return time.perf_counter() - self.zero

    def _waited(self) -> float:
        """Return the time when the GPU has ended what it has to do."""
        if self.on_gpu:
            torch.cuda.synchronize(self.plan.device)
        return self._now()

    def _peak(self) -> int:
        return max(self.peak, torch.cuda.max_memory_allocated(self.plan.device) if self.on_gpu else 0)

    def _reset_peak(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.plan.device)


class SavedRun:
    """A run with a folder: the losses, samples and times of its steps, which a checkpoint has besides model and
    optimizer."""

    def __init__(self, keeper: Keeper, losses: list[Tensor], clock: Clock, sampler: Sampler) -> None:
        self.keeper, self.losses, self.clock, self.sampler = keeper, losses, clock, sampler

    def restore(self, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> int:
        """Load the newest checkpoint, if there is one, and return how many steps it has."""
        saved = self.keeper.restore(model, optimizer)
        if saved is None:
            return 0
        self.losses[:] = saved["losses"].to(self.clock.plan.device)
        self.sampler.go_on(saved["samples"], saved["kept_mib"])
        schedule.load_state_dict(saved["schedule"])
        self.clock.go_on(saved["times"])
        return self.keeper.saved

    def after(self, step: int, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> None:
        def state() -> dict[str, Any]:
            return {
                "losses": torch.stack(self.losses), "schedule": schedule.state_dict(), "times": self.clock.times(),
                "samples": self.sampler.samples, "kept_mib": self.sampler.kept_mib,
            }  # fmt: skip

        self.keeper.after(step, model, optimizer, state)
