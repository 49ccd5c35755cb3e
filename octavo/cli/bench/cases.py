"""A suite's report: what all suites state, a row for each case, and the tables of rows.

A case that fails leaves its error in its row, and the suite goes on."""

import gc
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from octavo.cli import machine
from octavo.cli.bench import peers
from octavo.cli.timing import REPEATS, WARMUP
from octavo.text import table

Row = dict[str, Any]
Columns = Sequence[tuple[str, str, str]]  # the header, the key of the number in a row, the number's format
SHAPES = {  # what the numbers of a shape are, by suite
    "linear": ("tokens", "in", "out"), "grouped": ("experts", "tokens", "in", "out"),
    "moe": ("tokens", "experts", "top_k", "hidden", "feed-forward"),
    "permute": ("tokens", "experts", "assignments", "hidden"),
}  # fmt: skip
SHAPES["grouped-gemms"] = SHAPES["grouped"]
LONGEST = 200  # characters of an error in a row
LISTED = 24  # kernels in a table
LAYER = "bfloat16, no bias, forward + backward"
MEDIAN = {"warmup": WARMUP, "repeats": REPEATS, "statistic": "median"}
REPLAYS = MEDIAN | {"statistic": "median of CUDA graph replays, timed by events"}


def begin(report: Row, suite: str, arguments: Namespace, facts: Row) -> None:
    """Fill in what a report states before its first row: the machine, other libraries, and the suite's own facts."""
    device = machine.parse_device(getattr(arguments, "device", "cuda"))
    report |= {"suite": suite, "machine": machine.describe(device), "dtype": "bfloat16", **facts}
    if hasattr(arguments, "no_peers"):
        report["peers"] = peers.versions()


def attempt(case: str, measure: Callable[[], Row]) -> Row:
    """Return {"case": case} and the results of `measure`, or {"case": case, "error": the first line} if it raises.
    Frees the memory of the case either way. Ctrl-C is no failure: it ends the suite."""
    try:
        return {"case": case, **measure()}
    except Exception as error:
        return {"case": case, "error": first_line(error)}
    finally:
        release()


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:LONGEST]


def release() -> None:
    """Free the GPU memory of what is no longer used. Modules that were compiled are in reference cycles."""
    if not torch.cuda.is_available():
        return
    gc.collect()
    with suppress(RuntimeError):  # after a failed assertion on the GPU every call raises
        torch.cuda.empty_cache()


# -- as text -----------------------------------------------------------------------------------------------------------


def has_rows(report: Row) -> bool:
    """Return whether a report has a row, of its own or of one of its shapes."""
    rows = [report.get(name) for name in ("results", "host_us", "subjects")]
    return any([*rows, *(entry["results"] for entry in report.get("shapes", ()))])


def heading(report: Row, what: str) -> str:
    """Return the first line of a suite's text: the machine, and what was timed."""
    facts = report["machine"]
    return f"{facts['gpu'] or 'CPU'}, torch {facts['torch']}, triton {facts['triton']}; {what}"


def render(columns: Columns, results: Sequence[Row]) -> str:
    """Return a table of the cases that succeeded, where - is a number that a case has not, and a line for each that
    failed."""
    rows = [[r["case"], *_cells(columns, r)] for r in results if "error" not in r]
    header = ("case", *(name for name, _, _ in columns))
    failed = [f"{r['case']}  failed: {r['error']}" for r in results if "error" in r]
    return "\n".join([*([table(header, rows)] if rows else []), *failed])


def _cells(columns: Columns, row: Row) -> list[str]:
    return ["-" if row.get(key) is None else format(row[key], form) for _, key, form in columns]


def kernel_table(kernels: Sequence[Row], title: str = "kernel") -> str:
    """Return the longest GPU kernels of a step, as `kernels_ms` lists them, or the error that took their place."""
    if any("error" in e for e in kernels):
        return f"{title}  failed: {kernels[0]['error']}"
    rows = [[e["kernel"][:72], f"{e['calls']:.0f}", f"{e['ms']:.3f}"] for e in kernels[:LISTED]]
    return table((title, "calls", "ms a step"), rows)
