"""Python scripts run in a process of their own, with this checkout's octavo."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import octavo

ROOT = Path(octavo.__file__).parent.parent


def output_of(script: str) -> str:
    """Runs a script, which must end without an error, and returns what it prints."""
    command, environment = [sys.executable, "-c", textwrap.dedent(script)], {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout
