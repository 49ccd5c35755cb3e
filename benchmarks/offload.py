"""What does a step cost when saved tensors wait on the host? A stack of gated MLPs, by the share of bytes that move.

    python3 -m benchmarks.offload --json benchmarks/results/offload-h200.json
    python3 -m benchmarks.offload --device cpu --small

Each MLP is `octavo.LayerNormMLP` with SwiGLU: 8192 tokens, width 4096, 14336 units. A step is forward, under
`octavo.offload(model, share=)`, and backward. ms is the median of the steps after the third, `of_step` its ratio to the
step without offload of the same run, moved and saved are bytes, peak is torch's largest allocation in a step beyond
what the model holds.
"""

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks import study
from octavo.cli import machine
from octavo.text import table

FULL, SMALL = (8192, 4096, 14336, 8), (64, 64, 128, 2)
SHARES = (0.25, 0.3, 0.4, 0.5, 0.75, 1.0)
SKIPPED = 3


def main(argv: list[str] | None = None) -> int:
    parser = study.parser_of("offload", __doc__)
    parser.add_argument("--recipes", nargs="+", default=["fp8-delayed", "fp8-block"])
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="two narrow MLPs, which run on a CPU")
    return study.run(parser, argv, measure, render)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    tokens, width, units, layers = SMALL if arguments.small else FULL
    sizes = {"tokens": tokens, "width": width, "units": units, "layers": layers}
    report: dict[str, Any] = {"machine": machine.describe(device), **sizes, "results": []}
    for recipe in arguments.recipes:
        torch.manual_seed(0)
        made = [
            octavo.LayerNormMLP(width, units, activation="swiglu", recipe=recipe, device=device, dtype=torch.bfloat16)
            for _ in range(layers)
        ]
        model = nn.Sequential(*made)
        x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        plain = run(model, x, None, arguments.steps)
        rows = [run(model, x, share, arguments.steps) for share in arguments.shares]
        for row in (plain, *rows, run(model, x, None, arguments.steps)):
            report["results"].append({"recipe": recipe, **row, "of_step": row["ms"] / plain["ms"]})
        study.write(report, arguments.json)
        del model, made, x
    return report


def run(model: nn.Module, x: Tensor, share: float | None, steps: int) -> dict[str, Any]:
    """Time and memory of a step that moves so large a share, or has no block if that is None."""
    block = None if share is None else octavo.offload(model, share=share, least=1 if x.numel() < 2**20 else 2**20)
    on_gpu = x.device.type == "cuda"
    times: list[float] = []
    held = peak = 0
    for index in range(steps):
        x.grad = None
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        started = time.perf_counter()
        with nullcontext() if block is None else block:
            y = model(x)
        y.backward(x.detach())
        if on_gpu:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - held
        if index >= SKIPPED:
            times.append(1e3 * (time.perf_counter() - started))
        octavo.step(model)
        model.zero_grad(set_to_none=False)  # gradients are held from step to step, and not counted in the peak
    moved = {} if block is None else {"saved_mib": block.saved_bytes / 2**20, "moved_mib": block.moved_bytes / 2**20}
    return {"share": share, "ms": statistics.median(times), **moved, "peak_mib": peak / 2**20 if on_gpu else None}


def render(report: dict[str, Any]) -> str:
    what = f"{report['layers']} MLPs of {report['tokens']}x{report['width']}x{report['units']}, forward and backward"
    rows = []
    for row in report["results"]:
        moved = "" if row["share"] is None else f"{row['moved_mib'] / row['saved_mib']:.0%}"
        mib = "" if row["share"] is None else f"{row['moved_mib']:.0f} of {row['saved_mib']:.0f}"
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        rows.append([row["recipe"], moved or "none", mib, f"{row['ms']:.2f}", f"{row['of_step']:.3f}", peak])
    return f"{study.heading(report, what)}\n\n" + table(
        ("recipe", "moved", "MiB", "ms", "of the step", "peak MiB"), rows
    )


if __name__ == "__main__":
    sys.exit(main())
