"""A mailbox for deferred weight gradients: backward leaves the operands here, `backward_dw()` takes them, oldest first.
A call that fails before the gradient arrives puts them back, and can be repeated.

A graph cannot put anything into a queue, and Python does not run when a captured one is replayed. Its forward therefore
links the operands that it will post (`octavo.wgrad.deferred`) in front of the earlier ones, without reading those: a
compiler that saw a queue grow would make a new graph for every length.

A captured backward leaves operands in memory to which every replay writes its own, for a captured `backward_dw()`
alone; a backward outside of captures leaves the operands of that call. Letters record which is which; operands that a
compiler's graph posted do not.
"""

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.cuda import is_capturing
from octavo.errors import UnsupportedConfig


class Form(NamedTuple):
    """What a layer's weight, or each of its weights, was at forward: dw has this form."""

    shape: tuple[int, ...]
    device: torch.device

    def __str__(self) -> str:
        return f"{self.shape} on {self.device}"


class Letter(NamedTuple):
    """The operands of one microbatch's dw."""

    weight: Form
    config: Any  # of the layer
    operands: tuple[Any, ...]
    versions: tuple[int, ...]  # of the operands that are the caller's own tensors
    captured: bool


class Posted(NamedTuple):
    """The operands of one microbatch's dw, from a graph."""

    weight: Form
    key: str  # of its config
    mail: tuple[Tensor, ...]
    x: tuple[Tensor, ...]  # as it was given, where no codes of it were made
    captured: bool = False  # not known: a compiler's graph does not say


class Computed(NamedTuple):
    """A dw that was computed, and `main_grad` written to, before a hook of a weight raised."""

    weight: Form
    parts: tuple[Tensor | None, ...]  # one for each weight; None where it has arrived, or nothing is to
    captured: bool


def _versions(operands: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(t._version for t in operands if isinstance(t, Tensor))


def operands_of(letter: Letter | Posted, layer: Any, weight: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Config and operands of a dw, for a layer of `octavo.layers` and its weight."""
    if isinstance(letter, Posted):
        found = layer.config(letter.key)
        return found, layer.deferred_operands(found, letter.mail, letter.x, weight)
    if letter.versions != _versions(letter.operands):
        raise UnsupportedConfig(
            "backward_dw() needs the unquantized x and dy of that backward, and one of them was written to since. "
            "Call it before their buffers are used again, or let wgrad be quantized: codes are copies. discard_dw() "
            "drops all that waits, this one too."
        )
    return letter.config, letter.operands


class Mailbox:
    def __init__(self) -> None:
        self._letters: deque[Letter | Posted | Computed] = deque()
        self.said = False  # whether a step has warned of what waits
        self.posted: Any = None  # (newest Posted, (the one before, ...)), of graphs since the last look

    def __len__(self) -> int:
        self._collect()
        return len(self._letters)

    def waiting(self) -> int:
        """How many microbatches wait for a `backward_dw()` outside of captures."""
        self._collect()
        return sum(not letter.captured for letter in self._letters)

    def put(self, weight: Form, config: Any, operands: tuple[Any, ...]) -> None:
        self._collect()
        self._letters.append(Letter(weight, config, operands, _versions(operands), is_capturing()))

    def _collect(self) -> None:
        """Move what graphs have posted to the queue."""
        newest_first = []
        while self.posted is not None:
            letter, self.posted = self.posted
            newest_first.append(letter)
        self._letters.extend(reversed(newest_first))

    def __reduce__(self) -> Any:
        """Make the copy of a copied or pickled layer empty: that layer has run no backward."""
        return Mailbox, ()

    def take(self) -> Letter | Posted | Computed:
        """Take the operands of the oldest microbatch. Some must wait."""
        self._collect()
        self._check_capture(is_capturing())
        return self._letters.popleft()

    def put_back(self, letter: Letter | Posted | Computed) -> None:
        """Put a letter back as the oldest: its gradient has not arrived."""
        self._letters.appendleft(letter)

    def _check_capture(self, capturing: bool) -> None:
        """Refuse to take operands that were left outside of captures in a capture, and captured ones outside."""
        outside, inside = (
            sum(not isinstance(letter, Posted) and letter.captured == captured for letter in self._letters)
            for captured in (False, True)
        )
        dropped = "discard_dw()" if outside else "discard_dw(captured=True)"
        both = f"{outside} were left outside of captures, by warm-ups perhaps, and {inside} captured. "
        if capturing and outside:
            raise UnsupportedConfig(
                f"backward_dw() is captured, and backwards wait for it: {both}A replay would read the former's memory, "
                "which no backward writes to again. Drop them with discard_dw(), or call backward_dw() for each before "
                "anything is captured."
            )
        if inside and not capturing:
            raise UnsupportedConfig(
                f"Backwards wait for backward_dw(): {both}A replay leaves its operands to a captured backward_dw() "
                "alone. Capture it, in the graph of its backward or in one of its own, and replay that. "
                f"{dropped} drops operands that the program does not need."
            )

    def discard(self, *, captured: bool) -> int:
        """Drop the operands that wait; those left in a capture only if `captured`. Returns how many were dropped."""
        self._collect()
        kept = [letter for letter in self._letters if letter.captured and not captured]
        count = len(self._letters) - len(kept)
        self._letters = deque(kept)
        return count


class Outbox(NamedTuple):
    """What one call's backward gets of the mailbox: it notes the weight that the call multiplied by."""

    mailbox: Mailbox
    weight: Form

    def put(self, config: Any, *operands: Any) -> None:
        self.mailbox.put(self.weight, config, operands)
