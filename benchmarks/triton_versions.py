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
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import study

BENCHES = {
    "linear": ["--shape", "8192,4096,14336", "--recipes", "fp8-delayed,fp8-current,fp8-rowwise,fp8-block,mxfp8"],
    "grouped": ["--shape", "8,16384,4096,14336", "--shape", "64,32768,2048,2048",
                "--recipes", "bf16,fp8-delayed,fp8-block,fp8-rowwise"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.triton_versions")
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=["hashes", *BENCHES], choices=["hashes", *BENCHES])
    parser.add_argument("--cases", default="", metavar="PATTERN", help="of the hashes: a part of a case's name")
    parser.add_argument("--workers", type=int, default=16)
    arguments = parser.parse_args()
    places = {version(""): "", **{version(folder): folder for folder in arguments.folders}}
    report: dict[str, Any] = {"versions": {name: {"triton": name, "ms": {}} for name in places}}
    for _ in range(arguments.turns):
        for suite in (suite for suite in BENCHES if suite in arguments.only):
            for name, folder in places.items():
                measured = bench(suite, folder)
                report["machine"] = measured["machine"] | {"triton": None}
                ms = report["versions"][name]["ms"]
                for row, value in rows(suite, measured).items():
                    ms[row] = min(value, ms.get(row, value))
            report["ratio"] = ratios(report["versions"])
            study.write(report, arguments.json)
    for name, found in report.get("ratio", {}).items():
        print(name, {row: round(ratio, 3) for row, ratio in found.items()}, flush=True)
    for name, folder in places.items() if "hashes" in arguments.only else ():
        report["versions"][name]["hashes"] = found = hashes(folder, arguments.workers, arguments.cases)
        print(name, {key: value for key, value in found.items() if key != "notable"}, flush=True)
        study.write(report, arguments.json)


def ratios(versions: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Milliseconds over those of the first version, row by row."""
    base = next(iter(versions.values()))["ms"]
    return {name: {row: ms / base[row] for row, ms in found["ms"].items()} for name, found in versions.items()}


def run(command: list[str], folder: str) -> str:
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
    found = subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    return found.stdout + found.stderr


def version(folder: str) -> str:
    return run(["-c", "import triton; print(triton.__version__)"], folder).split()[-1]


def hashes(folder: str, workers: int, cases: str) -> dict[str, Any]:
    """The summary of `tests.hashes`, the results that changed by name, and the cases that changed or failed."""
    command = ["-m", "tests.hashes", "--device", "cuda", "--eager", "--workers", str(workers), "--only", cases]
    printed = run(command, folder)
    found = re.search(r"(\d+) cases ran, (\d+) failed, (\d+) changed", printed)
    if found is None:
        return {"notable": printed.splitlines()[-5:]}
    notable = [line for line in printed.splitlines() if line.startswith(("changed", "failed"))]
    results = Counter(name for line in notable for name in re.findall(r"(\w+) \w{4} -> \w{4}", line))
    counts = dict(zip(("ran", "failed", "changed"), map(int, found.groups()), strict=True))
    return counts | {"results": dict(results), "notable": notable}


def bench(suite: str, folder: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "report.json"
        printed = run(["-m", "octavo", "bench", suite, *BENCHES[suite], "--no-peers", "--json", str(file)], folder)
        if not file.exists():
            raise SystemExit(printed)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def rows(suite: str, report: dict[str, Any]) -> dict[str, float]:
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
