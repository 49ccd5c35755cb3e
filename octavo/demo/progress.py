"""The progress of a run on stderr: rich's bar on a terminal where rich is installed, and else plain lines, of which a
terminal shows the latest only."""

import math
import sys
import time
from typing import Any

LINES = 4  # of a whole run where stderr is no terminal
INTERVAL = 0.1  # seconds between two updates of a terminal


class Progress:
    """The progress of a run. After each of `total` steps call `if due(done): show(done, text)`: the text may be
    costly."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.live = title, total, sys.stderr.isatty()
        self.bar = _rich_bar(title, total) if self.live else None
        self.last_shown_at = -math.inf  # when the last text was

    def due(self, done: int) -> bool:
        if self.live and done < self.total:
            return time.perf_counter() - self.last_shown_at >= INTERVAL
        return done * LINES // self.total > (done - 1) * LINES // self.total

    def show(self, done: int, text: str) -> None:
        self.last_shown_at = time.perf_counter()
        if self.bar is not None:
            self.bar.start()  # once; a run that shows nothing draws no bar
            self.bar.update(self.bar.task_ids[0], completed=done, text=text, refresh=True)
        else:  # on a terminal the next line erases this one
            start, end = ("\r\x1b[K", "") if self.live else ("", "\n")
            print(f"{start}{self.title}  {done}/{self.total}  {text}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line of a terminal, so that other text starts on a new one."""
        if self.bar is not None:
            self.bar.stop()
        elif self.live and self.last_shown_at > -math.inf:
            print(file=sys.stderr)
        self.live, self.bar = False, None


def _rich_bar(title: str, total: int) -> Any:
    """Return rich's bar on stderr; None where rich is not installed."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    words, text = (progress.TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[text]"))
    columns = (words, progress.BarColumn(24), progress.MofNCompleteColumn(), text)
    bar = progress.Progress(*columns, console=Console(file=sys.stderr), auto_refresh=False)
    bar.add_task(title, total=total, text="")
    return bar
