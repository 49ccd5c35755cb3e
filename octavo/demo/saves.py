"""The folder of `octavo train --out DIR`: checkpoints of all runs, each in a folder of its own, saved by Ctrl-C too."""

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from octavo.checkpoints.checkpoint import extra_of, load_checkpoint, save_checkpoint
from octavo.checkpoints.folder import newest, newest_and_skipped, read_manifest
from octavo.errors import InvalidCheckpoint, UnsupportedConfig

RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # in the environment: how often torchrun has started all ranks anew
BASELINE = "bf16"  # the folder of the baseline in DIR


def folder_of(name: str, names: Sequence[str]) -> str:
    """Return the folder of the run with this name, out of all names: its letters and digits, unless another has it."""
    taken = {BASELINE}
    for one in names:
        words = re.sub(r"[^a-z0-9._]+", "-", one.lower()).strip("-.") or "recipe"
        folder = next(f for n in range(1, len(names) + 2) if (f := words if n == 1 else f"{words}-{n}") not in taken)
        if one == name:
            return folder
        taken.add(folder)
    raise KeyError(name)


@dataclass(frozen=True)
class Saves:
    """The options: a folder, whether to resume what is in it, and how often to save besides at the end and Ctrl-C."""

    folder: Path
    runs: tuple[str, ...]  # folders in it
    resume: bool = False
    every: int | None = None
    writes: bool = True  # False on a rank that only reads


def add_arguments(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    parser.add_argument(
        "--out", default=None, metavar="DIR",
        help="save all runs to DIR, at their end and after Ctrl-C; default: save nothing",
    )  # fmt: skip
    parser.add_argument(
        "--save-every", type=count, default=None, metavar="N",
        help="with --out, save after every N steps too; default: at the end and after Ctrl-C",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true",
        help="go on with the runs in DIR, bit for bit, with the options that they had; default: start new ones",
    )  # fmt: skip


def from_options(arguments: argparse.Namespace, folders: Sequence[str]) -> Saves | None:
    """Check the options, make the folder, and return both; None without --out. `folders` are those of the runs beside
    the baseline."""
    if arguments.out is None:
        if arguments.resume or arguments.save_every:
            option = "--resume" if arguments.resume else "--save-every"
            raise UnsupportedConfig(f"{option} needs the folder of the run. Pass --out DIR too.")
        return None
    folder, runs = Path(arguments.out), (BASELINE, *folders)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for run in runs:
            _check_none_is_damaged(folder / run)
        if os.environ.get(RESTARTS, "0") != "0":  # torchrun repeats the command that it was given
            return Saves(folder, runs, any(_newest(folder / run) for run in runs), arguments.save_every)
        if any(_newest(folder / run) for run in runs) != arguments.resume:
            raise UnsupportedConfig(
                f"--resume goes on with a run, and {folder} has no complete checkpoint. Leave it out, or name another "
                "folder."
                if arguments.resume
                else f"--out {folder} has checkpoints already. Pass --resume to go on with them, or name another "
                "folder."
            )
    except OSError as error:
        raise _unwritable(folder, error) from None
    return Saves(folder, runs, arguments.resume, arguments.save_every)


def _check_none_is_damaged(folder: Path) -> None:
    """Raise if the newest checkpoint of a run cannot be loaded: the run would come to that step again, and could not
    save it."""
    found, skipped = newest_and_skipped(folder) if folder.is_dir() else (None, [])
    if skipped:
        start = "its beginning" if found is None else found.name
        raise InvalidCheckpoint(f"{skipped[0]} To go on with {start}, remove the newer folders in {folder}.")


def _newest(folder: Path) -> Path | None:
    return newest(folder) if folder.is_dir() else None


def _unwritable(folder: Path, error: OSError) -> UnsupportedConfig:
    return UnsupportedConfig(f"--out cannot be written to {folder}: {error.strerror or error}. Name another folder.")


def how_to_resume(saves: Saves, again: str) -> str:
    """Return a sentence with the command that goes on with what is saved."""
    if not any(_newest(saves.folder / run) for run in saves.runs):
        return f"Nothing was saved to {saves.folder} yet."
    return f"The run is saved in {saves.folder}. To go on with it: {again}"


class Keeper:
    """Save and resume one run.

    Args:
        saves: the options.
        run: its folder.
        settings: what the run was started with, by option. Another value is refused when it resumes.
        steps: how many steps the run has.
    """

    def __init__(self, saves: Saves, run: str, settings: dict[str, Any], steps: int) -> None:
        self.saves, self.folder, self.settings, self.steps = saves, saves.folder / run, settings, steps
        self.saved = 0  # the last step that is saved
        self.asked = False  # by Ctrl-C, to save and stop

    def steps_made(self) -> int:
        """Return the step of the newest checkpoint, or 0 if the run starts anew."""
        path = _newest(self.folder) if self.saves.resume else None
        return 0 if path is None else read_manifest(path).step

    def restore(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """Load the newest checkpoint, and return what it was saved with; None if the run starts anew."""
        path = _newest(self.folder) if self.saves.resume else None
        if path is None:
            return None
        self._check_settings(path, extra_of(path).get("settings"))
        loaded = load_checkpoint(path, model, optimizer)
        self.saved = loaded.step
        return loaded.extra

    def _check_settings(self, path: Path, had: Any) -> None:
        if not isinstance(had, dict):
            raise InvalidCheckpoint(f"{path} is no checkpoint of octavo train. Name another folder.")
        for option, value in self.settings.items():
            if had.get(option) != value:
                raise UnsupportedConfig(
                    f"The run in {self.folder} has {option} {had.get(option)}, got {value}. Resume it with the options "
                    "that it was started with, or name another folder."
                )

    def after(self, step: int, model: nn.Module, optimizer: Optimizer, state: Callable[[], dict[str, Any]]) -> None:
        """End a step: save if that is due, and raise KeyboardInterrupt after Ctrl-C."""
        every = self.saves.every
        due = self.asked or step == self.steps or (every is not None and step % every == 0)
        if due and step > self.saved and self.saves.writes:
            try:
                save_checkpoint(self.folder, model, optimizer, step=step, extra={"settings": self.settings, **state()})
            except OSError as error:
                raise _unwritable(self.folder, error) from None
            self.saved = step
        if self.asked:
            raise KeyboardInterrupt

    @contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """Let the first Ctrl-C in the block wait for the end of a step: half of one cannot be resumed. A second stops
        at once. Only the main thread hears of Ctrl-C."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)
        if before in (None, signal.SIG_IGN):
            yield
            return

        def ask(*_: Any) -> None:
            self.asked = True
            signal.signal(signal.SIGINT, before)
            print("\nSaving after this step. Ctrl-C again stops without saving.", file=sys.stderr, flush=True)

        signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
