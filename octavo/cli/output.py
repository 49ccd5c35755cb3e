"""Output of a command's report: print it, write it as JSON, and deliver the results so far after Ctrl-C."""

import errno
import json
import math
import os
import signal
import sys
import tempfile
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from octavo.errors import Unsupported, UnsupportedConfig
from octavo.inspection.page_file import is_device, real, write
from octavo.text import printable
from octavo.version import __version__

Report = dict[str, Any]
SCHEMA = 1  # of JSON reports: it is raised when a field changes its meaning or goes


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C, once the results so far are delivered. The text says where they went."""

    def __init__(self, text: str, report: Report) -> None:
        super().__init__(text)
        self.report = report


def add_json(parser: ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--json",
        default=None,
        metavar="FILE",
        help=f"also write {what} to FILE, as JSON; - prints that instead of text",
    )


def head(kind: str, arguments: Namespace) -> Report:
    """Return what every JSON report begins with: the number of the schema, which command wrote it, and how."""
    return {"schema": SCHEMA, "kind": kind, "octavo": __version__, "command": command_line(arguments)}


def produce(
    fill: Callable[[Report], None], render: Callable[[Report], str], target: str | None, *, head: Report | None = None
) -> Report:
    """Fill a report, which begins with its head, write it to `target` (a path, - or None), print it and return it.

    `fill` adds results to the report one by one. After Ctrl-C the results so far are delivered in the same way, marked
    "interrupted", and `Interrupted` is raised. `render` returns "" for a report without results."""
    report: Report = dict(head or {})
    try:
        fill(report)
    except KeyboardInterrupt:
        with _undisturbed():
            report["interrupted"] = True
            raise Interrupted(_keep(report, render(report), target), report) from None
    with _undisturbed():
        deliver(report, render(report), target)
    return report


def deliver(report: Report, text: str, target: str | None) -> None:
    """Write the file, then prints: a closed pipe does not cost the file, and a full disk does not cost the text."""
    try:
        _save(report, target)
    finally:
        _show(report, text, target)


def command_line(arguments: Namespace) -> str:
    """Return the command as it can be pasted."""
    return getattr(arguments, "command_line", "")


def say(sentence: str) -> None:
    """Print a sentence that is no part of a report."""
    print(printable(sentence), file=sys.stderr)


def as_json(report: Report) -> str:
    """Return a report as JSON, which has no word for NaN and Inf: they become the strings "NaN", "Infinity" and
    "-Infinity", which Python and JavaScript read back as numbers."""
    return json.dumps(_plain(report), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _keep(report: Report, text: str, target: str | None) -> str:
    """Deliver an unfinished report, and return a sentence that says where it went."""
    if not text:
        return "There were no results yet." + (f" {target} was not written." if _is_file(target) else "")
    went, trouble = [], ""
    try:
        if _save(report, target):
            went.append(f"written to {target}")
    except Unsupported as unsupported_reason:
        trouble = f" {unsupported_reason}"
    try:
        _show(report, text, target)
        went.append("printed")
    except BrokenPipeError:  # Ctrl-C ends the whole pipeline, and the reader may end first
        drop_broken()
    return (f"The results so far were {' and '.join(went)}." if went else "The results could not be printed.") + trouble


def _show(report: Report, text: str, target: str | None) -> None:
    print(as_json(report) if target == "-" else printable(text), flush=True)


def _save(report: Report, target: str | None) -> bool:
    """Write the report to `target` if that is a file; returns whether it is."""
    if target is None or not _is_file(target):
        return False
    try:
        write(Path(target), as_json(report) + "\n")
    except OSError as error:
        raise UnsupportedConfig(
            f"--json could not be written to {target}: {error.strerror}. Name another file."
        ) from None
    return True


def _is_file(target: str | None) -> bool:
    return target is not None and target != "-"


def check(target: str, option: str = "--json") -> None:
    """Raise, before any work, if the file of an option cannot be written. Changes nothing on the disk."""
    if target == "-":
        return
    path = Path(target)
    try:
        if path.is_dir() or target == "":
            raise UnsupportedConfig(f"{option} writes a file, got the folder {path}. Name a file in it.")
        if not path.parent.is_dir():
            raise UnsupportedConfig(f"{option} writes into a folder that exists, got {target}. Make it first.")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not is_device(path):
            tempfile.TemporaryFile(dir=real(path).parent).close()  # as `write` will do
    except OSError as error:
        raise UnsupportedConfig(
            f"{option} cannot be written to {target}: {error.strerror}. Name another file."
        ) from None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C inside the block. Only the main thread can do that; other threads change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def drop_broken() -> None:
    """Redirect streams with a closed reader to /dev/null, so that Python reports no error when it exits."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except BrokenPipeError:
            with suppress(OSError, ValueError):  # a stream without a file
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
