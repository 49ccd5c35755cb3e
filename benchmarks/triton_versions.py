"""Compare versions of Triton on one GPU: the bits of layers, and the time of a linear layer and of experts.

    python3 -m benchmarks.triton_versions /path/to/triton-3.9 --json benchmarks/results/triton-h200.json

A folder holds the package `triton` with its dist-info, and goes first on the path; torch stays the same. Bits are those
of `tests.hashes`, in eager mode, against the record of the installed Triton. Times are rows of `octavo bench linear`
and `octavo bench grouped`; versions take turns, and `ratio` is to the installed one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BENCHES = {
    "linear": ["--shape", "8192,4096,14336", "--recipes", "fp8-delayed,fp8-current,fp8-rowwise,fp8-block,mxfp8"],
    "grouped": ["--shape", "8,16384,4096,14336", "--shape", "64,32768,2048,2048",
                "--recipes", "bf16,fp8-delayed,fp8-block,fp8-rowwise"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.triton_versions")
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--json", default=None, metavar="FILE")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--workers", type=int, default=16)
    arguments = parser.parse_args()
    places = {version(""): "", **{version(folder): folder for folder in arguments.folders}}
    report: dict = {"versions": {}}
    for name, folder in places.items():
        report["versions"][name] = {"triton": name, "hashes": hashes(folder, arguments.workers), "ms": {}}
        print(name, report["versions"][name]["hashes"], flush=True)
    for _ in range(arguments.turns):
        for name, folder in places.items():
            for suite in BENCHES:
                measured = bench(suite, folder)
                report["machine"] = measured["machine"] | {"triton": None}
                ms = report["versions"][name]["ms"]
                for row, value in rows(suite, measured).items():
                    ms[row] = min(value, ms.get(row, value))
    first = next(iter(places))
    report["ratio"] = {
        name: {row: value / report["versions"][first]["ms"][row] for row, value in found["ms"].items()}
        for name, found in report["versions"].items()
    }
    for name, ratios in report["ratio"].items():
        print(name, {row: round(ratio, 3) for row, ratio in ratios.items()}, flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def run(command: list[str], folder: str) -> str:
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
    found = subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    return found.stdout + found.stderr


def version(folder: str) -> str:
    return run(["-c", "import triton; print(triton.__version__)"], folder).split()[-1]


def hashes(folder: str, workers: int) -> dict:
    """The summary of `tests.hashes`, and the first cases that changed or failed."""
    printed = run(["-m", "tests.hashes", "--device", "cuda", "--eager", "--workers", str(workers)], folder)
    found = re.search(r"(\d+) cases ran, (\d+) failed, (\d+) changed", printed)
    notable = [line for line in printed.splitlines() if line.startswith(("changed", "failed"))][:20]
    counts = dict(zip(("ran", "failed", "changed"), map(int, found.groups()), strict=True)) if found else {}
    return counts | {"notable": notable if found else printed.splitlines()[-5:]}


def bench(suite: str, folder: str) -> dict:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "report.json"
        printed = run(["-m", "octavo", "bench", suite, *BENCHES[suite], "--no-peers", "--json", str(file)], folder)
        if not file.exists():
            raise SystemExit(printed)
        found: dict = json.loads(file.read_text())
        return found


def rows(suite: str, report: dict) -> dict[str, float]:
    """Milliseconds of eager steps and of captured ones, by suite, shape and case."""
    found = {}
    for shape in report["shapes"]:
        for row in shape["results"]:
            where = f"{suite} {'x'.join(map(str, shape['shape']))} {row['case']}"
            found |= {
                f"{where}{how}": row[key] for how, key in (("", "ms"), (", captured", "graph_ms")) if row.get(key)
            }
    return found


if __name__ == "__main__":
    main()
