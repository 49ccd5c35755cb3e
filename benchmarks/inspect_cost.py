"""Measure the cost of octavo.inspect in a training step: never on, on, on for one step of ten, and off again.

    python3 -m benchmarks.inspect_cost --json benchmarks/results/inspect-cost-h200.json
    python3 -m benchmarks.inspect_cost --device cpu --size 64,1,2,32 --steps 3 --modes eager

The model is that of `octavo train --model llama`, with float32 weights and bfloat16 activations; a step is forward,
backward and AdamW. Milliseconds are medians of single steps, each waited for; with every=10 steps differ, and it is the
mean of ten. `peak` is the most that one step allocates beyond what was there before it. "before" and "after" must
agree: outside of its block octavo.inspect leaves nothing. `seconds` is how long it all took, compiling included. For
steps in a block that are not measured a compiled model has a third graph, so its every=10 is read only with --states.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import octavo
from benchmarks import study
from octavo._torch.compilation import reset as forget_graphs
from octavo.cli import machine, options
from octavo.cli.bench.training_steps import step_seconds
from octavo.demo import corpus
from octavo.demo.gpt import GPT, loss_of
from octavo.demo.training import converted, shape_of
from octavo.text import table

RECIPES = ("fp8-delayed", "fp8-block")
STATES = ("before", "every=1", "every=10", "after")
COMPILED = ("before", "every=1", "after")  # unless asked for otherwise
WARMUP = 2


def main(argv: list[str] | None = None) -> int:
    parser = study.parser_of("inspect_cost", __doc__)
    parser.add_argument("--recipes", type=options.recipes, default=list(RECIPES), help="comma-separated")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--size", default="2048,2,16,512", help="as in octavo train; default: %(default)s")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="steps of each reading but every=10's; default: 5")
    parser.add_argument("--states", nargs="+", choices=STATES, help="default: all; if compiled, all but every=10")
    return study.run(parser, argv, measure, render)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    report: dict[str, Any] = {
        "machine": machine.describe(device), "size": arguments.size, "batch": arguments.batch, "results": []
    }  # fmt: skip
    for mode in arguments.modes:
        for name in arguments.recipes:
            report["results"].append(times_of(name, mode, arguments, device))
            study.write(report, arguments.json)
    return report


def times_of(name: str, mode: str, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The times of one recipe, eager or compiled, in all states, on one model."""
    forget_graphs()
    started = time.perf_counter()
    shape = shape_of("llama", arguments.size)
    model = GPT(shape, seed=0).to(device)
    converted(model, octavo.recipe(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    octavo.attach(model, optimizer)
    text, _ = corpus.load()
    (batch,) = corpus.batches(text, steps=1, batch=arguments.batch, context=shape.context, seed=0)
    batch = batch.to(device)
    call = torch.compile(model, fullgraph=True) if mode == "compiled" else model

    def step() -> None:
        loss_of(call, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, Any] = {"recipe": name, "mode": mode, "ms": {}, "peak_mib": {}}
    for state in arguments.states or (STATES if mode == "eager" else COMPILED):
        every = int(state.partition("=")[2] or 0)
        steps = every if every > 1 else arguments.steps
        with octavo.inspect(model, every=every) if every else nullcontext():
            found["ms"][state], found["peak_mib"][state] = readings(step, steps, device, every)
    found["seconds"] = time.perf_counter() - started
    return found


def readings(step: Callable[[], None], steps: int, device: torch.device, every: int) -> tuple[float, float | None]:
    """The milliseconds of a step, and the most that one allocates."""
    gpu = device.type == "cuda"
    for _ in range(WARMUP):
        step()
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if gpu else 0
    times = [1e3 * step_seconds(step, device) for _ in range(steps)]
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if gpu else None
    return statistics.fmean(times) if every > 1 else statistics.median(times), peak


def render(report: dict[str, Any]) -> str:
    head = study.heading(report, f"a Llama of {report['size']}, {report['batch']} sequences")
    rows = []
    for row in report["results"]:
        base, times = row["ms"].get("before", math.nan), row["ms"]
        cells = [f"{times[state]:.1f} ({times[state] / base:.2f}x)" if state in times else "" for state in STATES]
        peaks = [row["peak_mib"].get(state) for state in ("before", "every=1")]
        shown = ["" if peak is None else f"{peak:.0f}" for peak in peaks]
        rows.append([row["recipe"], row["mode"], *cells, *shown, f"{row['seconds']:.0f}"])
    columns = ("recipe", "", *(f"{state}, ms" for state in STATES), "peak MiB", "inspected", "seconds")
    return head + "\n\n" + table(columns, rows)


if __name__ == "__main__":
    sys.exit(main())
