"""Runs a fixed list of GPU tests under compute-sanitizer: `python3 -m tests.sanitizer`, on a machine that has the tool.

memcheck finds accesses outside of allocations, initcheck reads of memory that nothing wrote, racecheck hazards in
shared memory. Torch gives its memory back after each use here, so that every tensor is an allocation of its own. The
tests are split over processes that run side by side. `--json` writes how many reports each tool made, by which kernels.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "initcheck", "racecheck")
# every kernel family and recipe, in small shapes; none captures a graph, which needs torch's cache of memory
TESTS = (
    *[
        f"tests/ops/test_linear_gpu.py::test_the_gpu_agrees_with_the_cpu[{each}]"
        for each in (
            "bf16-(130, 272, 208)-torch.float32", "fp8-delayed-(130, 272, 208)-torch.bfloat16",
            "fp8-current-(17, 33, 50)-torch.bfloat16", "fp8-rowwise-(130, 272, 208)-torch.float16",
            "fp8-block-(130, 272, 208)-torch.float32", "mxfp8-(130, 272, 208)-torch.float32",
            "nvfp4-(130, 272, 208)-torch.float32",
        )
    ],
    *[
        f"tests/moe/test_experts_gpu.py::test_two_runs_have_the_same_bits[{recipe}]"
        for recipe in ("fp8-delayed", "fp8-block", "nvfp4")
    ],
    *[
        f"tests/quant/test_grouped.py::test_stacked_matrices_on_the_device[{scheme}]"
        for scheme in ("tensorwise", "rowwise", "block-1d", "block-2d", "mx", "nv(rht=True,stochastic=True)")
    ],
    *[
        f"tests/kernels/test_grouped_gemm.py::test_codes_wider_than_the_result_on_the_device[{scheme}]"
        for scheme in ("tensorwise", "rowwise", "mixed", "mx", "nvfp4")
    ],
    "tests/kernels/test_grouped_gemm.py::test_plain_weights_of_any_strides_and_results_in_views[torch.bfloat16]",
    "tests/kernels/test_activation_quantize_groups.py"
    "::test_triton_draws_dropout_by_the_packed_row_and_takes_wider_codes",
    "tests/kernels/test_decode.py::test_every_code_and_scale_on_the_device[mx]",
    "tests/kernels/test_norm.py::test_triton_makes_only_what_is_wanted[128-layer]",
    "tests/kernels/test_norm.py::test_triton_makes_only_what_is_wanted[9000-rms]",
    "tests/kernels/test_norm_quantize.py::test_triton_hardly_any_rows",
    "tests/kernels/test_permute.py::test_an_untouched_tail_is_not_written",
    "tests/kernels/test_column_sums.py::test_the_same_bits_again",
    "tests/quant/test_byte_transpose.py::test_stacked_weights_on_the_device[block-2d]",
)  # fmt: skip
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:errors?|hazards?)")
KERNEL = re.compile(r"=========     at (?:void )?([\w:<>~, ]+?)(?:\(|\+0x)")
RACE = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in ([\w.]+:\d+)")
# no line of Octavo: what initcheck says of it, it says of every result that a GEMM stores by the chip's copy unit
CONTROL = """
import torch
a, b = (torch.randn(n, 272, dtype=torch.bfloat16, device="cuda") for n in (130, 208))
(a @ b.T).double().sum().item()
print("1 passed in control")
"""


def command(tool: str, log: Path, tests: list[str]) -> list[str]:
    settings = ["--tool", tool, "--log-file", str(log), "--print-limit", "100000", "--show-backtrace", "no"]
    return ["compute-sanitizer", *settings, sys.executable, "-m", "pytest", "-q", "-m", "gpu", *tests]


def control(log: Path) -> list[str]:
    return ["compute-sanitizer", "--tool", "initcheck", "--log-file", str(log), "--show-backtrace", "no",
            sys.executable, "-c", CONTROL]  # fmt: skip


def outcome(log: Path, output: Path) -> dict[str, Any]:
    """What one process said: its tests, its reports, and the kernels that the reports name."""
    text = log.read_text(errors="replace") if log.exists() else ""
    closing = re.findall(r"^.*(?:passed|failed|error).* in .*$", output.read_text(errors="replace"), re.MULTILINE)
    found = SUMMARY.findall(text)
    return {
        "tests": closing[-1] if closing else "cut off",
        "reports": int(found[-1]) if found else None,
        "kernels": dict(Counter(name.strip() for name in KERNEL.findall(text)).most_common(20)),
        "races": {" ".join(place): count for place, count in Counter(RACE.findall(text)).most_common()},
        "first": text.splitlines()[:40] if found and int(found[-1]) else [],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.sanitizer", description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", default=TOOLS, metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--processes", type=int, default=5, help="for each tool")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for all of them")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    given = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        print("There is no compute-sanitizer here. It comes with the CUDA toolkit.")
        return 2
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    environment.setdefault("TRITON_CACHE_DIR", str(Path.cwd() / "build" / "triton"))
    deadline, running = time.time() + given.limit, []
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(tool, part) for tool in given.tools for part in range(given.processes)]
        for tool, part in [*jobs, *([("control", 0)] if "initcheck" in given.tools else [])]:
            log, output = (Path(folder) / f"{tool}-{part}.{end}" for end in ("log", "txt"))
            line = control(log) if tool == "control" else command(tool, log, list(TESTS[part :: given.processes]))
            with output.open("w") as out:
                process = subprocess.Popen(line, env=environment, stdout=out, stderr=subprocess.STDOUT)
            running.append((tool, process, log, output))
        report: dict[str, list[dict[str, Any]]] = {tool: [] for tool, _, _, _ in running}
        for tool, process, log, output in running:
            try:
                process.wait(max(1.0, deadline - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
            report[tool].append(outcome(log, output))
    for tool, parts in report.items():
        print(tool, [(part["tests"], part["reports"], part["kernels"]) for part in parts], flush=True)
    if given.json:
        given.json.write_text(json.dumps({"tests": TESTS, "tools": report}, indent=1) + "\n")
    clean = [
        part["reports"] == 0 for tool, parts in report.items() if tool in ("memcheck", "initcheck") for part in parts
    ]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
