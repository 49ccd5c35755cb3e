"""List the host's work in a step of one layer, tiny and at size: events of torch's profiler, and how they grow.

    python3 -m benchmarks.host_trace [--device cuda] [--recipes bf16,fp8-delayed] [--out PATH]

The device is idle when a step begins, and the host does not wait for it: what takes longer at size, in a mode where all
sizes are known, is a wait or a slower way of the driver or of the allocator. For each case and mode the table has the
microseconds of a step without the profiler, then the events whose own time grows most, with calls and microseconds of a
step under the profiler, tiny and at size. The JSON file has all events.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import octavo
from octavo._torch.compilation import any_number_of_graphs, reset
from octavo.cli import machine
from octavo.cli.bench.on_device import compiled

SIZES = {
    "cuda": {"tiny": (32, 256, 256), "at size": (8192, 4096, 4096)},
    "cpu": {"tiny": (2, 16, 16), "at size": (8, 64, 64)},
}
WARMUP, STEPS, TRACED, LISTED = 8, 40, 20, 10

Events = dict[str, tuple[float, float]]  # name -> calls, microseconds of a step


def layer(case: str, k: int, n: int, device: torch.device) -> nn.Module:
    where: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
    return nn.Linear(k, n, **where) if case == "nn.Linear" else octavo.Linear(k, n, recipe=case, **where)


def steps(case: str, size: tuple[int, int, int], device: torch.device) -> dict[str, Callable[[], None]]:
    """A training step, eager and compiled. Delayed scales have settled."""
    tokens, k, n = size
    module = layer(case, k, n, device)
    x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)

    def of(call: Callable[..., Any]) -> Callable[[], None]:
        def step() -> None:
            x.grad = None
            for p in module.parameters():
                p.grad = None
            call(x).backward(dy)

        return step

    found = {"eager": of(module)}
    for _ in range(2):
        found["eager"]()
        octavo.step(module)
    found["compiled"] = of(compiled(module, device))
    return found


def waited(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def host_us(step: Callable[[], None], device: torch.device) -> float:
    """The median microseconds until the host has started a step."""
    readings = []
    for _ in range(STEPS):
        waited(device)
        begin = time.perf_counter()
        step()
        readings.append((time.perf_counter() - begin) * 1e6)
    waited(device)
    return statistics.median(readings)


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
                found[mode][size] = {"us": host_us(step, device), "events": events(step, device)}
    return found


def render(case: str, mode: str, by_size: dict[str, Any]) -> str:
    tiny, large = by_size["tiny"], by_size["at size"]
    rows = [f"{case}, {mode}: {tiny['us']:.0f} us tiny, {large['us']:.0f} at size"]
    names = set(tiny["events"]) | set(large["events"])
    grown = {n: large["events"].get(n, (0, 0))[1] - tiny["events"].get(n, (0, 0))[1] for n in names}
    for name in sorted(names, key=lambda n: -grown[n])[:LISTED]:
        a, b = (one["events"].get(name, (0, 0)) for one in (tiny, large))
        rows.append(f"  {grown[name]:+8.1f} us  {a[0]:5.1f} x {a[1]:7.1f}  ->  {b[0]:5.1f} x {b[1]:7.1f}  {name[:80]}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=tuple(SIZES), help="cuda (default) or cpu")
    parser.add_argument("--recipes", default="bf16,fp8-delayed", help="comma-separated; default: %(default)s")
    parser.add_argument("--out", type=Path, help="write all events to this JSON file")
    arguments = parser.parse_args()
    device, results = torch.device(arguments.device), {}
    for case in ("nn.Linear", *arguments.recipes.split(",")):
        results[case] = measured(case, device)
        for mode, by_size in results[case].items():
            print(render(case, mode, by_size) + "\n", flush=True)
    if arguments.out:
        about = {"machine": machine.describe(device), "sizes": SIZES[arguments.device]}
        arguments.out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
