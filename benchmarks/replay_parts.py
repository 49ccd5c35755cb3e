"""The parts of the replay of calls: host µs of forward and backward of tiny layers, with each part and without it.

    python3 -m benchmarks.replay_parts [--out PATH] [--device cuda] [--seconds 8]

Everything runs in one process and one thread. The variants of a case take turns, 20 steps at a time, and each has its
own recordings. A reading is the time in which the host starts a step; the device is idle when a turn begins. The table
shows medians, and by how many percent a variant is slower than the whole replay in the same round. On a CPU, which
Octavo does not record as a rule, most of the time is arithmetic; it shows that the script works.
"""

import argparse
import json
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import octavo
from octavo.cli import machine
from octavo.runtime import call_cache as calls
from octavo.runtime.replay import recorder

ROWS, WIDTH, GROUPS = 32, 256, 4
STEPS = 20  # of a turn
WHOLE = "whole replay"


# what is replaced while a variant runs: (where, name, by what)
VARIANTS: dict[str, list[tuple[Any, str, Any]]] = {
    WHOLE: [],
    "no replay": [(calls, "DEVICES", set())],
    "no guards": [(calls, "GUARDED", 0)],
    "no in_form": [(recorder, "in_form", lambda lines, forms, returned: lines)],
    "no _SHORT": [(recorder, "_SHORT", {})],
}


@contextmanager
def variant(name: str, recordings: dict[str, Any]) -> Iterator[None]:
    """Octavo as this variant has it, with the variant's own recordings."""
    with ExitStack() as stack:
        kinds, latest = recordings.setdefault(name, (OrderedDict(), {}))
        stack.enter_context(mock.patch.object(calls, "_kinds", kinds))
        stack.enter_context(mock.patch.object(calls, "_latest", latest))
        for where, attribute, value in VARIANTS[name]:
            stack.enter_context(mock.patch.object(where, attribute, value))
        yield


def cases(device: str, backend: str) -> Iterator[tuple[str, "Case"]]:
    where: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    for recipe in ("fp8-delayed", "fp8-current", "fp8-block"):
        linear = octavo.Linear(WIDTH, WIDTH, recipe=recipe, **where)
        yield f"Linear {recipe}", Case(linear, linear)
    mlp = octavo.LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu", recipe="fp8-delayed", **where)
    yield "LayerNormMLP fp8-delayed", Case(mlp, mlp)
    sizes = torch.full((GROUPS,), ROWS // GROUPS, device=device)
    grouped = octavo.GroupedLinear(GROUPS, WIDTH, WIDTH, recipe="fp8-delayed", **where)
    yield f"GroupedLinear of {GROUPS} fp8-delayed", Case(grouped, lambda x: grouped(x, sizes))
    linear = octavo.Linear(WIDTH, WIDTH, recipe="fp8-delayed", **where)
    yield "Linear fp8-delayed, compiled", Case(linear, torch.compile(linear, backend=backend, fullgraph=True))


class Case:
    """One layer and its steps: forward, and backward with gradients of x and of all parameters."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        weight = next(module.parameters())
        self.module, self.call = module, call
        self.x = torch.randn(ROWS, WIDTH, device=weight.device, dtype=torch.bfloat16, requires_grad=True)
        self.leaves = [self.x, *module.parameters()]
        self.dy = torch.randn_like(call(self.x))
        self.step()
        octavo.step(module)  # the first step of delayed scaling measures, and is another call

    def step(self) -> None:
        torch.autograd.grad(self.call(self.x), self.leaves, self.dy)

    def turn(self) -> float:
        """Microseconds of a step."""
        octavo.step(self.module)
        if self.x.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        return (time.perf_counter() - begin) / STEPS * 1e6


def measured(case: Case, seconds: float) -> dict[str, list[float]]:
    """Readings of each variant in µs, round by round."""
    recordings: dict[str, Any] = {}
    readings: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for name in VARIANTS:
        with variant(name, recordings):
            for _ in range(5):  # as written, recorded, replayed
                case.step()
    begin, names = time.perf_counter(), list(VARIANTS)
    while time.perf_counter() - begin < seconds or len(readings[WHOLE]) < 5:
        for name in names:
            with variant(name, recordings):
                readings[name].append(case.turn())
        names = [*names[1:], names[0]]
    return readings


def summary(readings: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Returns each variant's median, and the median percentage by which it is slower than the whole replay."""
    results = {}
    for name, own in readings.items():
        slower = [100 * (a / b - 1) for a, b in zip(own, readings[WHOLE], strict=True)]
        us, percent = (round(statistics.median(values), 2) for values in (own, slower))
        results[name] = {"us": us, "percent": percent, "rounds": len(own)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--seconds", type=float, default=8, help="for each case, default 8")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    arguments = parser.parse_args()
    device = arguments.device
    calls.DEVICES.add(device)
    print(f"{'host us, over the whole replay':34}" + "".join(f"{name:>20}" for name in VARIANTS))
    results = {}
    with torch.autograd.set_multithreading_enabled(False):
        for name, case in cases(device, "inductor" if device == "cuda" else "aot_eager"):
            found = results[name] = summary(measured(case, arguments.seconds))
            cells = [f"{one['us']:.1f} {one['percent']:+.1f} %" for one in found.values()]
            print(f"{name:34}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    if arguments.out:
        about = {"machine": machine.describe(torch.device(device)), "rows": ROWS, "width": WIDTH, "steps": STEPS}
        arguments.out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
