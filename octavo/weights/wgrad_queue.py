"""A queue for deferred weight gradients: backward leaves the operands here, `backward_dw()` takes them, oldest first.
A call that fails before the gradient arrives puts them back, and can be repeated.

A graph cannot put anything into a queue, and Python does not run when a captured one is replayed. Its forward therefore
links the operands that it will leave (`octavo.runtime.deferred_wgrad`) in front of the earlier ones, without reading
those: a compiler that saw a queue grow would make a new graph for every length.

A captured backward leaves operands in memory to which every replay writes its own, for a captured `backward_dw()`
alone; a backward outside of captures leaves the operands of that call. Each entry records which of the two it is;
an entry of a compiler's graph does not."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.cuda import is_capturing
from octavo.errors import UnsupportedConfig
from octavo.runtime.modified import versions_of


class Form(NamedTuple):
    """What a layer's weight, or each of its weights, was at forward: dw has this form."""

    shape: tuple[int, ...]
    device: torch.device

    def __str__(self) -> str:
        return f"{self.shape} on {self.device}"


class Entry(NamedTuple):
    """The operands of one microbatch's dw."""

    weight: Form
    config: Any  # of the layer
    operands: tuple[Any, ...]
    versions: tuple[int, ...]  # of the operands that are the caller's own tensors
    captured: bool


class GraphEntry(NamedTuple):
    """The operands of one microbatch's dw, from a graph."""

    weight: Form
    key: str  # of its config
    operands: tuple[Tensor, ...]
    x: tuple[Tensor, ...]  # as it was given, where no codes of it were made
    captured: bool = False  # not known: a compiler's graph does not say


class Computed(NamedTuple):
    """A dw that was computed, and `main_grad` written to, before a hook of a weight raised."""

    weight: Form
    parts: tuple[Tensor | None, ...]  # one for each weight; None where it has arrived, or nothing is to
    captured: bool


def operands_of(entry: Entry | GraphEntry, layer: Any, weight: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Return the config and the operands of a dw, for a layer and its weight."""
    if isinstance(entry, GraphEntry):
        found = layer.config(entry.key)
        return found, layer.deferred_operands(found, entry.operands, entry.x, weight)
    if entry.versions != versions_of(entry.operands):
        raise UnsupportedConfig(
            "backward_dw() needs the unquantized x and dy of that backward, and one of them was written to since. "
            "Call it before their buffers are used again, or let wgrad be quantized: codes are copies. discard_dw() "
            "drops all that waits, this one too."
        )
    return entry.config, entry.operands


Waiting = Entry | GraphEntry | Computed


class WgradQueue:
    def __init__(self) -> None:
        self._entries: deque[Waiting] = deque()
        self.said = False  # whether a step has warned of what waits
        # entries of graphs, newest first, as a chain of pairs: (newest, (the one before, ...))
        self.from_graphs: Any = None

    def __len__(self) -> int:
        self._collect()
        return len(self._entries)

    def waiting(self) -> int:
        """Return how many microbatches wait for a `backward_dw()` outside of captures."""
        self._collect()
        return sum(not entry.captured for entry in self._entries)

    def put(self, weight: Form, config: Any, operands: tuple[Any, ...]) -> None:
        self._collect()
        self._entries.append(Entry(weight, config, operands, versions_of(operands), is_capturing()))

    def _collect(self) -> None:
        """Move the entries of graphs to the queue."""
        newest_first = []
        while self.from_graphs is not None:
            entry, self.from_graphs = self.from_graphs
            newest_first.append(entry)
        self._entries.extend(reversed(newest_first))

    def __reduce__(self) -> Any:
        """Make the copy of a copied or pickled layer empty: that layer has run no backward."""
        return WgradQueue, ()

    def take(self, is_filled: Callable[[GraphEntry], bool]) -> Waiting | None:
        """Take the operands of the oldest microbatch whose backward has run; None if there is none. A graph's forward
        leaves its entry before its backward, which may never run: `is_filled` tells."""
        self._collect()
        self._check_capture(is_capturing())
        for place, entry in enumerate(self._entries):
            if not isinstance(entry, GraphEntry) or is_filled(entry):
                del self._entries[place]
                return entry
        return None

    def put_back(self, entry: Waiting) -> None:
        """Put an entry back as the oldest: its gradient has not arrived."""
        self._entries.appendleft(entry)

    def _check_capture(self, capturing: bool) -> None:
        """Refuse to take operands that were left outside of captures in a capture, and captured ones outside."""
        outside, inside = (
            sum(not isinstance(entry, GraphEntry) and entry.captured == captured for entry in self._entries)
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
        """Drop the operands that wait; those left in a capture only if `captured`. Return how many were dropped."""
        self._collect()
        kept = [entry for entry in self._entries if entry.captured and not captured]
        count = len(self._entries) - len(kept)
        self._entries = deque(kept)
        return count


class QueueOfCall(NamedTuple):
    """What one call's backward gets of the queue: it notes the weight that the call multiplied by."""

    queue: WgradQueue
    weight: Form

    def put(self, config: Any, *operands: Any) -> None:
        self.queue.put(self.weight, config, operands)
