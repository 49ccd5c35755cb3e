"""List the host's work in a step of one layer, tiny and at size: events of torch's profiler, and how they grow.

    python3 -m benchmarks.host_trace [--device cuda] [--recipes bf16,fp8-delayed] [--json FILE]

The device is idle when a step begins, and the host does not wait for it: what takes longer at size, in a mode where all
sizes are known, is a wait or a slower way of the driver or of the allocator. For each case and mode the table has the
microseconds of a step without the profiler, then the events whose own time grows most, with calls and microseconds of a
step under the profiler, tiny and at size. The JSON file has all events.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import study
from octavo._torch.compilation import any_number_of_graphs, reset
from octavo.cli import machine, options
from octavo.cli.bench import linear_bench
from octavo.cli.bench.training_steps import batch, calibrated_step, compiled, step_ms, training_step
from octavo.cli.timing import host_us

SIZES = {
    "cuda": {"tiny": (32, 256, 256), "at size": (8192, 4096, 4096)},
    "cpu": {"tiny": (2, 16, 16), "at size": (8, 64, 64)},
}
WARMUP, STEPS, TRACED, LISTED = 8, 40, 20, 10

Events = dict[str, tuple[float, float]]  # name -> calls, microseconds of a step


def steps(case: str, size: tuple[int, int, int], device: torch.device) -> dict[str, Callable[[], None]]:
    """A training step, eager and compiled. Delayed scales have settled."""
    tokens, k, n = size
    stock = case == "nn.Linear"
    module = linear_bench.stock(k, n, device) if stock else linear_bench.low(k, n, case, device)
    x, dy = batch(tokens, k, n, device)
    found = {"eager": calibrated_step(module, x, dy)}
    return found | {"compiled": training_step(module, x, dy, compiled(module, device))}


def waited(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def us_of(step: Callable[[], None], device: torch.device) -> float:
    """The median microseconds until the host has started a step."""
    return host_us(step, repeats=STEPS) if device.type == "cuda" else step_ms(step, device)[0] * 1e3


def events(step: Callable[[], None], device: torch.device) -> Events:
    """The host's events in a step: operators, calls of CUDA's runtime and driver, parts of compiled graphs."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as trace:
        for _ in range(TRACED):
            waited(device)
            step()
        waited(device)
    found: Events = {}
    for e in trace.key_averages():
        calls, us = found.get(e.key, (0.0, 0.0))
        found[e.key] = calls + e.count / TRACED, us + e.self_cpu_time_total / TRACED
    # the wait between steps is no part of them; a wait for a stream or an event is
    return {name: one for name, one in found.items() if one[1] > 0 and name != "cudaDeviceSynchronize"}


def measured(case: str, device: torch.device) -> dict[str, dict[str, Any]]:
    """Host time and events of each mode, by size."""
    found: dict[str, dict[str, Any]] = {"eager": {}, "compiled": {}}
    for size, numbers in SIZES[device.type].items():
        reset()
        with any_number_of_graphs():
            for mode, step in steps(case, numbers, device).items():
                for _ in range(WARMUP):
                    step()
                found[mode][size] = {"us": us_of(step, device), "events": events(step, device)}
    return found


def render(report: dict[str, Any]) -> str:
    cases = report["results"].items()
    return "\n\n".join(grown(case, mode, by_size) for case, modes in cases for mode, by_size in modes.items())


def grown(case: str, mode: str, by_size: dict[str, Any]) -> str:
    """Return the times of a case, and the events whose time grows most with the size."""
    tiny, large = by_size["tiny"], by_size["at size"]
    rows = [f"{case}, {mode}: {tiny['us']:.0f} us tiny, {large['us']:.0f} at size"]
    names = set(tiny["events"]) | set(large["events"])
    more = {n: large["events"].get(n, (0, 0))[1] - tiny["events"].get(n, (0, 0))[1] for n in names}
    for name in sorted(names, key=lambda n: -more[n])[:LISTED]:
        a, b = (one["events"].get(name, (0, 0)) for one in (tiny, large))
        rows.append(f"  {more[name]:+8.1f} us  {a[0]:5.1f} x {a[1]:7.1f}  ->  {b[0]:5.1f} x {b[1]:7.1f}  {name[:80]}")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    parser = study.parser_of("host_trace", __doc__)
    parser.add_argument("--recipes", type=options.recipes, default=["bf16", "fp8-delayed"], help="comma-separated")
    return study.run(parser, argv, measure, render)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    report = {"machine": machine.describe(device), "sizes": SIZES[device.type], "results": {}}
    for case in ("nn.Linear", *arguments.recipes):
        report["results"][case] = measured(case, device)
        study.write(report, arguments.json)
    return report


if __name__ == "__main__":
    sys.exit(main())
