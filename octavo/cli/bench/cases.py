"""Rows of a suite's report: a case that fails leaves its error in its row, and the suite goes on."""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from octavo.inspection import table

Row = dict[str, Any]
LONGEST = 200  # characters of an error in a row


def attempt(case: str, measure: Callable[[], Row]) -> Row:
    """Returns {"case": case} and the results of `measure`, or {"case": case, "error": the first line} if it raises.
    Frees the memory of the case either way. Ctrl-C is no failure: it ends the suite."""
    try:
        return {"case": case, **measure()}
    except Exception as error:
        return {"case": case, "error": first_line(error)}
    finally:
        release()


def first_line(error: Exception) -> str:
    """Returns the kind of an error and the first line of its text that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:LONGEST]


def release() -> None:
    """Frees the GPU memory of what is no longer used. Modules that were compiled are in reference cycles."""
    if not torch.cuda.is_available():
        return
    gc.collect()
    with suppress(RuntimeError):  # after a failed assertion on the GPU every call raises
        torch.cuda.empty_cache()


def render(header: Sequence[str], results: Sequence[Row], cells: Callable[[Row], Sequence[str]]) -> str:
    """Returns a table of the cases that succeeded, and a line for each that failed."""
    rows = [[r["case"], *cells(r)] for r in results if "error" not in r]
    failed = [f"{r['case']}  failed: {r['error']}" for r in results if "error" in r]
    return "\n".join([*([table.render(header, rows)] if rows else []), *failed])
