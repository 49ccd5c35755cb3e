"""Fast paths: private shortcuts through torch and Triton that give what a public call gives, in less host time.

A private function may change with any version. So a fast path is not tied to a list of versions: it checks once in the
process that it gives what the public way gives, and is off if it does not. Versions that pass the check and are wrong
all the same are in the path's table `known_bad`. A path that is off says so once in the log; `octavo doctor` and
`octavo.explain` name it with the reason.
"""

import threading
from collections.abc import Callable, Mapping

import torch

from octavo.errors import log, warn
from octavo.version import __version__, untried

FAST_PATHS: "list[FastPath]" = []  # every one of them, in the order of their modules


class Undecided(Exception):
    """The check cannot run now: the path stays off for this call, and the check runs at the next one."""


class FastPath:
    """A shortcut, with the check that decides whether it is taken.

    Args:
        name: what it is, in a few words.
        otherwise: what happens while it is off.
        check: returns "" if the shortcut gives what the public way gives, else what differs. What it raises is a reason
            too, unless memory is used up, which says nothing of the shortcut: the next call checks again.
        version: the version of torch or of Triton that `known_bad` is about.
        known_bad: a version, or the first numbers of some -> what goes wrong there.
        is_quick: the check takes less than a millisecond, and needs no GPU.
    """

    def __init__(
        self,
        name: str,
        otherwise: str,
        check: Callable[[], str],
        version: Callable[[], str],
        known_bad: Mapping[str, str] | None = None,
        is_quick: bool = False,
    ) -> None:
        self.name, self.otherwise, self.is_quick = name, otherwise, is_quick
        self._check, self._version, self._known_bad = check, version, known_bad or {}
        self._reason: str | None = None  # None: not decided yet
        self._lock, self._is_deciding = threading.RLock(), False
        FAST_PATHS.append(self)

    def is_on(self) -> bool:
        """Return whether to take the shortcut. The first call runs the check."""
        if self._reason is None:
            try:
                self._decide()
            except (Undecided, torch.OutOfMemoryError, MemoryError):
                return False
        return self._reason == ""

    def sentence(self) -> str:
        """Return why the path is off, and what happens instead."""
        return f"{self.name}: off, because {self._reason}. {self.otherwise}"

    def reason(self) -> str:
        """Return why the path is off; "" if it is on, or not decided yet."""
        return self._reason or ""

    def state(self) -> dict[str, object]:
        """Return the path as plain data: `on` is None as long as the check did not run."""
        on = None if self._reason is None else self._reason == ""
        return {"name": self.name, "what": self.otherwise, "on": on, "why": self.reason()}

    def is_decided(self) -> bool:
        return self._reason is not None

    def forget(self) -> None:
        """Let the next call check again."""
        self._reason = None

    def _decide(self) -> None:
        with self._lock:
            if self._is_deciding:  # the check itself asks: it takes the plain way
                raise Undecided
            if self._reason is not None:
                return
            self._is_deciding = True
            try:
                self._reason = self._why_bad() or self._checked()
            finally:
                self._is_deciding = False
            if self._reason:
                log.warning(self.sentence())

    def _why_bad(self) -> str:
        version = self._version()
        bad = [why for start, why in self._known_bad.items() if f"{version}.".startswith(f"{start}.")]
        return f"{bad[0]} (version {version})" if bad else ""

    def _checked(self) -> str:
        try:
            return self._check()
        except (Undecided, torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):
            raise
        except Exception as error:  # a private function that is gone, renamed or takes other arguments
            text = (str(error).strip().splitlines() or [""])[0]
            return f"its check raised {type(error).__name__}: {text}".rstrip(": .")


def torch_version() -> str:
    return str(torch.__version__)


def off() -> tuple[str, ...]:
    """Return a sentence for each path that is off: its name, why, and what happens instead."""
    return tuple(path.sentence() for path in FAST_PATHS if path.reason())


def warn_if_untried() -> None:
    """Warn, at the import of Octavo, of a torch or Triton that it was never tried with. Paths that are quick to check
    are checked now, so that the warning names those that are off."""
    found = untried()
    if not found:
        return
    for path in FAST_PATHS:
        if path.is_quick:
            path.is_on()
    names = ", ".join(path.name for path in FAST_PATHS if path.reason())
    warn(
        f"Octavo {__version__} was not tried with {' and '.join(found)}. Off so far: {names or 'nothing'}. Every other "
        "fast path checks itself before its first use; `octavo doctor` checks all of them, and every recipe.",
        stacklevel=3,
    )
