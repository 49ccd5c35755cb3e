"""Time a linear layer with and without a default device, each in a process of its own: a probe's verdict holds for one.

    python3 -m benchmarks.default_device --json benchmarks/results/default-device-h200.json

Each process runs `octavo bench linear` for 8192x4096 -> 4096 in a state of torch. The states take turns, so that the
machine is alike for all of them; `ms` is the least of their medians, and `ratio` is to the state without a device.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

RECIPES = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block")
STATES = ("none", "set_default_device", "with torch.device")
SHAPE = "8192,4096,4096"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.default_device")
    parser.add_argument("--json", default=None, metavar="FILE")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--state", choices=STATES, default=None, help="run in this state, in this process")
    arguments = parser.parse_args()
    if arguments.state:
        bench(arguments.state, arguments.json)
        return
    readings: dict[str, dict[str, list[float]]] = {state: {recipe: [] for recipe in RECIPES} for state in STATES}
    machine: dict[str, Any] = {}
    for _ in range(arguments.turns):
        for state in STATES:
            report = apart(state)
            machine = report["machine"]
            for row in report["shapes"][0]["results"]:
                readings[state].get(row["case"].removeprefix("octavo "), []).append(row["ms"])
    ms = {state: {recipe: min(found) for recipe, found in of.items()} for state, of in readings.items()}
    ratio = {state: {recipe: of[recipe] / ms["none"][recipe] for recipe in RECIPES} for state, of in ms.items()}
    for state in STATES:
        print(state, {recipe: f"{ms[state][recipe]:.3f} ms, {ratio[state][recipe]:.3f}" for recipe in RECIPES})
    if arguments.json:
        report = {"machine": machine, "shape": SHAPE, "readings_ms": readings, "ms": ms, "ratio": ratio}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def apart(state: str) -> dict[str, Any]:
    """The report of the benchmark in a state of torch, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "benchmarks.default_device", "--state", state, "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def bench(state: str, file: str) -> None:
    import torch

    from octavo.cli import main as octavo

    if state == "set_default_device":
        torch.set_default_device("cuda")
    with torch.device("cuda") if state == "with torch.device" else nullcontext():
        code = octavo(
            ["bench", "linear", "--shape", SHAPE, "--recipes", ",".join(RECIPES), "--no-peers", "--json", file]
        )
    sys.exit(code)


if __name__ == "__main__":
    main()
