"""A progress bar: rich's on a terminal where rich is installed, else one line rewritten in place on a terminal, and a
few lines anywhere else."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

BAR, LINES = 24, 4  # characters of a bar; lines of a whole run if the stream is not a terminal
INTERVAL = 0.1  # seconds between two updates of a bar


class Progress:
    """A progress bar. After each of `total` steps call `if due(done): show(done, text)`: the text may be costly."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        self.title, self.total = title, total
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty()
        self.started = time.perf_counter()
        self.first: int | None = None  # the first step of this process, which compiles and says little about the others
        self.begun = self.started  # when that step had ended, later by all pauses since
        self.shown = self.started - INTERVAL
        self.open = False  # a terminal line was begun and not ended

    def due(self, done: int) -> bool:
        if self.first is None:
            self.first, self.begun = done, time.perf_counter()
        if done == self.total:
            return True
        if self.live:
            return time.perf_counter() - self.shown >= INTERVAL
        return done * LINES // self.total > (done - 1) * LINES // self.total

    def show(self, done: int, text: str) -> None:
        self.shown = time.perf_counter()
        spent = self.shown - self.started
        later = 0 if self.first is None else done - self.first
        each = (self.shown - self.begun) / later if later else spent
        left = "" if done == self.total else f", {each * (self.total - done):.0f} s left"
        self.write(done, f"{text}  {spent:.0f} s{left}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves a block that is no part of a step out of the time that a step takes, and so of the time left."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.begun += time.perf_counter() - before

    def write(self, done: int, text: str) -> None:
        """Shows the bar after so many steps, with a text."""
        line = f"{self.title}  {self._bar(done)} {done}/{self.total}  {text}"
        if self.live:
            end = "\n" if done == self.total else ""
            self.stream.write(f"\r\x1b[K{line}{end}")  # erases the previous line first
            self.open = not end
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Ends the line of an unfinished bar, so that other text starts on a new line."""
        if self.live and self.open:
            self.stream.write("\n")
            self.stream.flush()
            self.open = False

    def _bar(self, done: int) -> str:
        filled = BAR * done // self.total
        return "[" + "#" * filled + "." * (BAR - filled) + "]"


class RichProgress(Progress):
    """The same, drawn by rich."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        super().__init__(title, total, stream)
        from rich import progress
        from rich.console import Console

        columns = (_text(progress, "description"), progress.BarColumn(BAR), progress.MofNCompleteColumn())
        self._rich: Any = progress.Progress(
            *columns, _text(progress, "fields[text]"), console=Console(file=self.stream), auto_refresh=False
        )
        self._task = self._rich.add_task(title, total=total, text="")

    def write(self, done: int, text: str) -> None:
        if not self.open:
            self._rich.start()
            self.open = True
        self._rich.update(self._task, completed=done, text=text, refresh=True)
        if done == self.total:
            self.close()

    def close(self) -> None:
        if self.open:
            self._rich.stop()
            self.open = False


def _text(progress: Any, field: str) -> Any:
    return progress.TextColumn(f"{{task.{field}}}", markup=False)


def make_progress(title: str, total: int) -> Progress:
    """Returns the best bar for stderr."""
    if sys.stderr.isatty():
        try:
            return RichProgress(title, total)
        except ImportError:
            pass
    return Progress(title, total)
