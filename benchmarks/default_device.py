"""Time a linear layer with and without a default device, each in a process of its own: a probe's verdict holds for one.

    python3 -m benchmarks.default_device --json benchmarks/results/default-device-h200.json

Milliseconds are medians of eager steps, forward and backward, of 8192x4096 -> 4096 in bfloat16. The ways take turns, so
that the machine is in the same state for all of them; `ratio` is to the way without a default device.
"""

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

RECIPES = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block")
WAYS = ("none", "set_default_device", "with torch.device")
SHAPE = (8192, 4096, 4096)
TURNS, WARMUP, REPEATS = 2, 10, 60


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.default_device")
    parser.add_argument("--json", default=None, metavar="FILE")
    parser.add_argument("--way", choices=WAYS, default=None, help="time one way in this process, and print it")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(timed(arguments.way)))
        return
    readings: dict[str, dict[str, list[float]]] = {way: {recipe: [] for recipe in RECIPES} for way in WAYS}
    facts = {}
    for _ in range(TURNS):
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.default_device", "--way", way]
            found = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            )
            facts = found.pop("machine")
            for recipe, ms in found.items():
                readings[way][recipe].append(ms)
    ms = {way: {recipe: min(found) for recipe, found in of.items()} for way, of in readings.items()}
    ratio = {way: {recipe: of[recipe] / ms["none"][recipe] for recipe in RECIPES} for way, of in ms.items()}
    report = {"machine": facts, "shape": SHAPE, "readings_ms": readings, "ms": ms, "ratio": ratio}
    for way in WAYS:
        print(way, {recipe: f"{ms[way][recipe]:.3f} ms, {ratio[way][recipe]:.3f}" for recipe in RECIPES})
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def timed(way: str) -> dict:
    import torch

    import octavo
    from octavo.cli import machine

    cuda = torch.device("cuda", 0)
    if way == "set_default_device":
        torch.set_default_device("cuda")
    tokens, inner, out = SHAPE
    found: dict = {"machine": machine.describe(cuda)}
    with torch.device("cuda") if way == "with torch.device" else nullcontext():
        x = torch.randn(tokens, inner, device=cuda, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(tokens, out, device=cuda, dtype=torch.bfloat16)
        for recipe in RECIPES:
            layer = octavo.Linear(inner, out, bias=False, recipe=recipe, device=cuda, dtype=torch.bfloat16)
            times = []
            for i in range(WARMUP + REPEATS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                layer(x).backward(dy)
                end.record()
                x.grad = layer.weight.grad = None
                octavo.step(layer)
                torch.cuda.synchronize()
                times += [begin.elapsed_time(end)] if i >= WARMUP else []
            found[recipe] = statistics.median(times)
    return found


if __name__ == "__main__":
    main()
