"""Is this checkout slower on the host than an older one? An eager step of small layers, two checkouts in turns.

    mkdir -p build/before && git archive COMMIT octavo | tar -x -C build/before
    python3 -m benchmarks.host_turns build/before --json host-turns.json

Each turn is a process of its own: before, after, before, after. The table has the least median of a checkout's turns,
in microseconds of the host for one step, forward and backward, of x [32, 256].
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parent.parent
ROWS, WIDTH, STACK, EXPERTS = 32, 256, 16, 4
RECIPES = ("fp8-delayed", "fp8-current", "fp8-block")
MARK = "READINGS "  # of the line that a turn prints

Readings = dict[str, float]


def layers(device: torch.device) -> dict[str, tuple[nn.Module, tuple[Any, ...], int]]:
    """Return each layer, what it takes besides x, and by how many its time is divided."""
    import octavo  # of the checkout whose turn it is

    where: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    found: dict[str, tuple[nn.Module, tuple[Any, ...], int]] = {}
    plain = [nn.Linear(WIDTH, WIDTH, bias=False, **where) for _ in range(STACK)]
    found["nn.Linear, of a stack"] = nn.Sequential(*plain), (), STACK
    sizes = torch.full((EXPERTS,), ROWS // EXPERTS, device=device)
    for recipe in RECIPES:
        own = [octavo.Linear(WIDTH, WIDTH, bias=False, recipe=recipe, **where) for _ in range(STACK)]
        found[f"{recipe}, of a stack"] = nn.Sequential(*own), (), STACK
        found[f"{recipe}, LayerNormMLP"] = octavo.LayerNormMLP(WIDTH, 2 * WIDTH, recipe=recipe, **where), (), 1
        grouped = octavo.GroupedLinear(EXPERTS, WIDTH, WIDTH, bias=False, recipe=recipe, **where)
        found[f"{recipe}, GroupedLinear"] = grouped, (sizes,), 1
        found[f"{recipe}, MoE"] = octavo.MoE(WIDTH, WIDTH, EXPERTS, 2, recipe=recipe, **where), (), 1
    return found


def turn(device: torch.device, rounds: int, steps: int) -> Readings:
    """Measure every layer of the checkout that this process imports."""
    torch.manual_seed(0)
    found = {}
    for name, (module, more, parts) in layers(device).items():
        step = step_of(module, more, device)
        for _ in range(steps):
            step()
        found[name] = statistics.median(started(step, steps, device) for _ in range(rounds)) / parts
    return found


def step_of(module: nn.Module, more: tuple[Any, ...], device: torch.device) -> Callable[[], None]:
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    def step() -> None:
        module(x, *more).backward(dy)
        for tensor in (x, *module.parameters()):
            tensor.grad = None

    return step


def started(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Return the microseconds until the host has started a step, of an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return 1e6 * (time.perf_counter() - began) / steps


def turn_of(checkout: Path, options: list[str]) -> Readings:
    """Run a turn in a process that imports Octavo from this folder."""
    command = [sys.executable, __file__, str(checkout), "--turn", *options]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(checkout)}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit(f"A turn of {checkout} failed:\n{done.stderr[-2000:]}")
    readings: Readings = json.loads(lines[0].removeprefix(MARK))
    return readings


def render(turns: dict[str, list[Readings]]) -> str:
    """Return a row for each layer: both checkouts, their ratio, and the multiple of nn.Linear in a stack."""
    least = {name: {row: min(one[row] for one in found) for row in found[0]} for name, found in turns.items()}
    plain = least["after"]["nn.Linear, of a stack"]
    lines = [f"{'layer':32}{'before':>9}{'after':>9}{'ratio':>8}{'nn.Linears':>12}"]
    for row, after in least["after"].items():
        before = least["before"][row]
        lines.append(f"{row:32}{before:9.0f}{after:9.0f}{after / before:8.3f}{after / plain:12.2f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.host_turns", description=str(__doc__).split("\n")[0])
    parser.add_argument("before", type=Path, help="a folder with the older octavo/ in it")
    parser.add_argument("--turns", type=int, default=2, help="of each checkout")
    parser.add_argument("--rounds", type=int, default=9, help="of a turn, whose median counts")
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if not (given.before / "octavo" / "__init__.py").exists():
        parser.error(f"{given.before} has no octavo/: unpack an older one there, as the first lines of this file say.")
    if given.turn:
        print(MARK + json.dumps(turn(torch.device(given.device), given.rounds, given.steps)))
        return 0
    options = ["--rounds", str(given.rounds), "--steps", str(given.steps), "--device", given.device]
    turns: dict[str, list[Readings]] = {"before": [], "after": []}
    for _ in range(given.turns):
        for name, checkout in (("before", given.before.resolve()), ("after", ROOT)):
            turns[name].append(turn_of(checkout, options))
            if given.json is not None:
                given.json.write_text(json.dumps({"torch": torch.__version__, "us": turns}, indent=1) + "\n")
    print(render(turns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
