"""Cases in a process of their own: an assertion that fails on the GPU makes every later call of its process fail, and
memory that a case still holds counts in the peak of the next one."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS = 300  # of one process


def report_of(arguments: Sequence[str], module: str = "octavo") -> dict[str, Any]:
    """Run `python -m MODULE ARGUMENTS --json FILE` in another process, and return its report. "said" is added to it:
    the first assertion that failed on the GPU, or "". Raise a RuntimeError if the process wrote no report in time."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "report.json"
        command = [sys.executable, "-m", module, *arguments, "--json", str(target)]
        try:
            done = subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"The process was ended after {SECONDS} seconds.") from None
        if not target.exists():
            raise RuntimeError(_last(done.stderr) or f"The process ended with exit code {done.returncode}.")
        return {**json.loads(target.read_text()), "said": _assertion(done.stderr)}


def _assertion(text: str) -> str:
    """Return the first assertion that the GPU reports as failed, without the place of its thread."""
    lines = [line for line in text.splitlines() if "Assertion" in line and "failed" in line]
    return lines[0][lines[0].index("Assertion") :].strip() if lines else ""


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
