"""Do vision models train in a recipe as in bf16? A ViT-B/16 that classifies and a DiT-B/2 that denoises drawn pictures.

    python3 -m benchmarks.vision --models vit --json benchmarks/results/vision-vit-h200.json
    python3 -m benchmarks.vision --device cpu --size tiny --steps 60

500 steps of AdamW from random weights, in float32 under autocast, for each of three seeds; runs of one seed see equal
pictures and equal noise. A run's loss is the mean over its last 50 steps, with label smoothing of 0.1 for the ViT. A
recipe's gap, the mean over seeds, is to be within half a percent or within the spread of bf16's seeds, whichever is
more. Convolutions, conditioning and heads are left, as convert leaves them.

On a GPU, forward and backward of a step are a CUDA graph after the first steps, which run eagerly.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from benchmarks import study
from benchmarks.drawn_pictures import CLASSES, draw
from benchmarks.vision_models import SIZES, DiT, Size, ViT
from octavo.cli import machine
from octavo.text import table

BASELINE = "bf16"
RATE, WARMUP, CLIP, SMOOTHING = 3e-4, 50, 1.0, 0.1
EAGER, LAST, LEAST_BAR = 3, 50, 0.5  # steps before the capture, steps of a run's loss, percent
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Task:
    """What a model learns: its class, a batch, and the loss of one."""

    model: Callable[[Size, int], nn.Module]
    batch: Callable[[Size, torch.Generator], Inputs]
    loss: Callable[[nn.Module, Inputs], Tensor]


def classified(size: Size, generator: torch.Generator) -> Inputs:
    return draw(size.batch, size.channels, size.picture, generator)


def noised(size: Size, generator: torch.Generator) -> Inputs:
    """Return latents on the way to noise, their times and classes, and the velocity to be predicted."""
    pictures, classes = draw(size.batch, size.channels, size.picture, generator)
    times = torch.rand(size.batch, generator=generator, device=generator.device)
    noise = torch.randn(pictures.shape, generator=generator, device=generator.device)
    return torch.lerp(pictures, noise, times[:, None, None, None]), times, classes, noise - pictures


def smoothed_entropy(model: nn.Module, inputs: Inputs) -> Tensor:
    pictures, classes = inputs
    return F.cross_entropy(model(pictures).float(), classes, label_smoothing=SMOOTHING)


def squared_error(model: nn.Module, inputs: Inputs) -> Tensor:
    *given, velocity = inputs
    return F.mse_loss(model(*given).float(), velocity)


TASKS = {"vit": Task(ViT, classified, smoothed_entropy), "dit": Task(DiT, noised, squared_error)}


def main(argv: list[str] | None = None) -> int:
    parser = study.parser_of("vision", __doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--recipes", nargs="+", default=["fp8-delayed"])
    parser.add_argument("--size", choices=tuple(SIZES["vit"]), default="base")
    study.add_training(parser, 500, 0, (0, 1, 2))
    return study.run(parser, argv, measure, render)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train every model, seed by seed, so that an interrupted measurement leaves whole seeds behind."""
    report: dict[str, Any] = {
        "machine": machine.describe(device), "steps": arguments.steps, "sizes": {}, "runs": [], "results": [],
    }  # fmt: skip
    for name in arguments.models:
        size = SIZES[name][arguments.size]
        size = replace(size, batch=arguments.batch or size.batch)
        report["sizes"][name] = asdict(size)
        for seed in arguments.seeds:
            for recipe in (BASELINE, *arguments.recipes):
                run = trained(TASKS[name], size, recipe, seed, arguments.steps, device)
                report["runs"].append({"model": name, **run})
                print(f"{name} {recipe} seed {seed}: {run['loss']:.5f}, {run['seconds']:.1f} s", file=sys.stderr)
                report["results"] = [judge(report["runs"], *pair) for pair in pairs(report["runs"])]
                study.write(report, arguments.json)
    return report


def trained(task: Task, size: Size, recipe: str, seed: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Train one model from fresh weights. The baseline is plain torch."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    with device:
        model = task.model(size, CLASSES)
    report = None if recipe == BASELINE else octavo.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    generator = torch.Generator(device).manual_seed(seed)
    losses = torch.zeros(steps, device=device)
    with nullcontext() if report is None else octavo.attach(model, optimizer):
        step = Step(task, model, task.batch(size, generator))
        for number in range(steps):
            losses[number] = step(task.batch(size, generator))
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
    curve = losses.tolist()
    return {
        "recipe": recipe, "seed": seed, "loss": statistics.fmean(curve[-LAST:]), "seconds": time.perf_counter() - began,
        "converted": "" if report is None else report.summary(), "curve": curve[:: max(1, steps // 50)],
    }  # fmt: skip


def rate(step: int, steps: int) -> float:
    """Return the part of the learning rate at a step: up over the first steps, then down by a cosine to a tenth."""
    return min(1, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


class Step:
    """Forward and backward of a batch: eagerly at first, and then, on a GPU, as a CUDA graph. Gradients are written,
    not accumulated."""

    def __init__(self, task: Task, model: nn.Module, inputs: Inputs) -> None:
        self.task, self.model, self.inputs = task, model, inputs
        self.device, self.made = inputs[0].device, 0
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def __call__(self, inputs: Inputs) -> Tensor:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.made += 1
        if self.stream is None:
            return self._run()
        if self.made <= EAGER:  # on a stream of its own, as a capture asks for
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self._run()
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.made == EAGER + 1:
            self.graph = torch.cuda.CUDAGraph()
            self.model.zero_grad()
            with torch.cuda.graph(self.graph):
                self.loss = self._run()
        self.graph.replay()
        return self.loss

    def _run(self) -> Tensor:
        self.model.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.task.loss(self.model, self.inputs)
        loss.backward()
        return loss.detach()


def pairs(runs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return each model and recipe that has been compared with the baseline."""
    return list(dict.fromkeys((run["model"], run["recipe"]) for run in runs if run["recipe"] != BASELINE))


def judge(runs: list[dict[str, Any]], model: str, recipe: str) -> dict[str, Any]:
    """Return the gaps of a recipe, seed by seed, and whether their mean is within the bar."""
    mine, plain = (
        {run["seed"]: run["loss"] for run in runs if (run["model"], run["recipe"]) == (model, name)}
        for name in (recipe, BASELINE)
    )
    gaps = [100 * (loss / plain[seed] - 1) for seed, loss in mine.items()]
    spread = 100 * (max(plain.values()) - min(plain.values())) / statistics.fmean(plain.values())
    bar, mean = max(LEAST_BAR, spread), statistics.fmean(gaps)
    return {
        "model": model, "recipe": recipe, "bf16": list(plain.values()), "gaps_percent": gaps, "mean_percent": mean,
        "spread_percent": spread, "bar_percent": bar, "ok": abs(mean) <= bar,
    }  # fmt: skip


def render(report: dict[str, Any]) -> str:
    rows = [
        [
            row["model"], row["recipe"], study.numbers(row["bf16"], ".4f"), study.numbers(row["gaps_percent"], "+.2f"),
            f"{row['mean_percent']:+.2f}", f"{row['bar_percent']:.2f}", "yes" if row["ok"] else "NO",
        ]
        for row in report["results"]
    ]  # fmt: skip
    said = dict.fromkeys(f"{run['model']}: {run['converted']}" for run in report["runs"] if run["converted"])
    head = ("model", "recipe", "bf16's losses", "gap of each seed, %", "mean", "bar", "within")
    return "\n\n".join((study.heading(report, f"{report['steps']} steps"), table(head, rows), "\n".join(said)))


if __name__ == "__main__":
    sys.exit(main())
