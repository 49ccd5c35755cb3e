"""Training in float16 with a GradScaler: do the scale and the loss of every recipe behave as those of nn.Linear?

    python3 -m benchmarks.fp16_scaler --json benchmarks/results/fp16-scaler-h200.json
    python3 -m benchmarks.fp16_scaler --device cpu --steps 20 --width 32 --layers 1 --context 16 --recipes fp8-block

The model, text and optimizer are those of `octavo train`; activations are float16 (torch.autocast), master weights
float32. All linear layers are converted, the head too, so that nothing but the recipe sees an overflow. The scale
starts so high that the first steps overflow, and grows after few good steps, so that every run has overflows at its
start and at each growth that went too far. A run that skipped no step, or whose loss on the text held out ends more
than 10 % above the baseline's, makes the exit code 1: a quantizer that hides an overflow trains on wrong gradients.
"""

import argparse
import math
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks import study
from octavo.cli import machine
from octavo.demo import corpus
from octavo.demo.gpt import GPT, Shape, loss_of
from octavo.demo.training import CLIP, EVALUATED, HEAD, RATE, Plan, rate
from octavo.recipes import SHIPPED
from octavo.text import table

BASELINE = "nn.Linear"
STEPS, BATCH, SCALE, INTERVAL = 300, 16, 2.0**24, 50
POINTS = 60  # of a loss curve on file
LIMIT = 10.0  # percent


@dataclass(frozen=True)
class Scaling:
    """Settings of the GradScaler."""

    init_scale: float = SCALE
    growth_interval: int = INTERVAL


@dataclass(frozen=True)
class Outcome:
    """One run. `scales` has (step, scale) of each change; `nonfinite` is what fp8-delayed counted, by slot."""

    recipe: str
    loss: float
    losses: list[tuple[int, float]]
    scales: list[tuple[int, float]]
    skipped: list[int]
    nonfinite: dict[str, list[int]]
    seconds: float


def main(argv: list[str] | None = None) -> int:
    parser = study.parser_of("fp16_scaler", __doc__)
    parser.add_argument("--recipes", nargs="+", default=list(SHIPPED))
    for name, default in (("steps", STEPS), ("batch", BATCH), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("width", "layers", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape, name))
    parser.add_argument("--scale", type=float, default=SCALE, help="the first one; default: 2^24")
    parser.add_argument("--interval", type=int, default=INTERVAL, help="good steps before the scale is doubled")
    parser.add_argument("--keep-head", action="store_true", help="leave the output head an nn.Linear, as large runs do")
    return study.run(parser, argv, measure, render)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every run, one after the other, so that an interrupted measurement leaves whole runs behind."""
    shape = Shape(width=arguments.width, layers=arguments.layers, context=arguments.context)
    plan = Plan(arguments.steps, arguments.batch, arguments.seed, device, shape=shape)
    scaling = Scaling(arguments.scale, arguments.interval)
    report: dict[str, Any] = {
        "machine": machine.describe(device),
        "plan": asdict(plan) | {"device": str(device)},
        "scaler": asdict(scaling),
        "keep_head": arguments.keep_head,
        "results": [],
    }
    for name in (None, *arguments.recipes):
        outcome = train(plan, scaling, name, keep_head=arguments.keep_head)
        report["results"].append(asdict(outcome) | judge(outcome, report["results"]))
        print(f"{outcome.recipe}: loss {outcome.loss:.4f}, {outcome.seconds:.0f} s", file=sys.stderr)
        study.write(report, arguments.json)
    return report


def judge(outcome: Outcome, before: list[dict[str, Any]]) -> dict[str, Any]:
    """How far the loss is above that of the first run, and whether the run is as it should be."""
    gap = 100 * (outcome.loss / before[0]["loss"] - 1) if before else 0.0
    return {"gap_percent": gap, "ok": len(outcome.skipped) > 0 and gap <= LIMIT}  # a NaN is not below it


def train(plan: Plan, scaling: Scaling, name: str | None, *, keep_head: bool = False) -> Outcome:
    """One run from fresh weights. None is the model as it is, of nn.Linear."""
    text, held_out = corpus.load()
    torch.manual_seed(plan.seed)
    model = GPT(plan.shape, seed=plan.seed).to(plan.device)
    if name is not None:
        octavo.convert(model, name, exclude=HEAD if keep_head else (), high_precision=())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, plan.steps))
    attached = None if name is None else octavo.attach(model, optimizer)
    scaler = torch.amp.GradScaler(plan.device.type, **asdict(scaling))
    losses: list[Tensor] = []
    scales, skipped = [(0, scaler.get_scale())], []
    started = time.perf_counter()
    data = corpus.batches(text, steps=plan.steps, batch=plan.batch, context=plan.shape.context, seed=plan.seed)
    for step, batch in enumerate(data, start=1):
        loss = loss_of(model, batch.to(plan.device), torch.float16)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scale = scaler.get_scale()
        if scale < scales[-1][1]:
            skipped.append(step)
        else:
            schedule.step()
        if scale != scales[-1][1]:
            scales.append((step, scale))
        losses.append(loss.detach())
    if attached is not None:
        attached.remove()
    curve = torch.stack(losses).tolist()
    kept = sorted({*range(0, plan.steps, max(1, plan.steps // POINTS)), plan.steps - 1})
    return Outcome(
        recipe=BASELINE if name is None else name,
        loss=evaluate(model, corpus.windows(held_out, context=plan.shape.context), plan),
        losses=[(i + 1, curve[i]) for i in kept],
        scales=scales,
        skipped=skipped,
        nonfinite={k: t.tolist() for k, t in octavo.state_dict(model).items() if k.endswith("nonfinite")},
        seconds=time.perf_counter() - started,
    )


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor, plan: Plan) -> float:
    """Mean loss over the text held out, in float16."""
    total = 0.0
    for batch in torch.split(held_out, EVALUATED):
        total += loss_of(model, batch.to(plan.device), torch.float16).item() * len(batch)
    return total / len(held_out)


def render(report: dict[str, Any]) -> str:
    plan, scaler = report["plan"], report["scaler"]
    what = f"{plan['steps']} steps of {plan['batch']} x {plan['shape']['context']} bytes in float16"
    head = (
        f"{study.heading(report, what)}\n"
        f"scale from 2^{math.log2(scaler['init_scale']):g}, doubled after {scaler['growth_interval']} good steps"
    )
    rows = [
        [
            row["recipe"],
            f"{row['loss']:.4f}",
            f"{row['gap_percent']:+.2f} %",
            str(len(row["skipped"])),
            " ".join(map(str, row["skipped"][:8])) + (" ..." if len(row["skipped"]) > 8 else ""),
            f"2^{math.log2(row['scales'][-1][1]):g}",
            "yes" if row["ok"] else "NO",
        ]
        for row in report["results"]
    ]
    return head + "\n\n" + table(("recipe", "loss", "gap", "skipped", "at steps", "last scale", "ok"), rows)


if __name__ == "__main__":
    sys.exit(main())
