"""A progress bar in plain text: one line rewritten in place on a terminal, a few lines anywhere else."""

import sys
import time
from typing import TextIO

BAR, LINES = 24, 4  # characters of a bar; lines of a whole run if the stream is not a terminal
INTERVAL = 0.1  # seconds between two updates of a bar


class Progress:
    """A progress bar. After each of `total` steps call `if due(done): show(done, text)`: the text may be costly."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        self.title, self.total = title, total
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty()
        self.started = time.perf_counter()
        self.shown = self.started - INTERVAL
        self.open = False  # a terminal line was begun and not ended

    def due(self, done: int) -> bool:
        if done == self.total:
            return True
        if self.live:
            return time.perf_counter() - self.shown >= INTERVAL
        return done * LINES // self.total > (done - 1) * LINES // self.total

    def show(self, done: int, text: str) -> None:
        self.shown = time.perf_counter()
        spent = self.shown - self.started
        left = "" if done == self.total else f", {spent / done * (self.total - done):.0f} s left"
        line = f"{self.title}  {self._bar(done)} {done}/{self.total}  {text}  {spent:.0f} s{left}"
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
