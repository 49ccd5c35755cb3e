"""Rows of x that sibling layers share: q, k and v; gate and up.

Column layers that read the same x need the same rows of all ranks. In eager mode the first of them casts and sends, and
the others take its result, so that their gradients of x are added before they are reduced once. One result is kept, on
each thread: until another layer sends, a row layer ends the pair, or x is gone. All ranks run the same program, so that
they share alike.
"""

import threading
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor

from octavo.quant.qtensor import Parts, QTensor


class SharedRows(NamedTuple):
    """x as layers multiply it."""

    x: Any  # the rows, or their codes
    columns: Parts = ()  # their codes by column, besides those in x
    again: Any = None  # a context that a call with them enters
    own: QTensor | None = None  # the codes of this rank's rows
    amax: Tensor | None = None  # of this rank's rows, if fp8-delayed observes it


class _Shared:
    """Rows that were made for an x, and for whom."""

    def __init__(self, layer: Any, source: Tensor, key: tuple[Any, ...], rows: SharedRows) -> None:
        me = ref(self)
        self.source = ref(source, lambda _: _drop(me()))
        self.state, self.rows = (_state(source), key), rows
        self.served = WeakSet([layer])


class _Last(threading.local):
    shared: _Shared | None = None


_last = _Last()


def find(layer: Any, source: Any, key: tuple[Any, ...]) -> SharedRows | None:
    """Return the rows that a sibling made of the same x for the same `key`; None if there are none. A layer that is
    called twice with one x makes them anew: it may have other scales."""
    shared = _last.shared
    if shared is None or layer in shared.served or not isinstance(source, Tensor):
        return None
    if shared.source() is not source or shared.state != (_state(source), key):
        return None
    shared.served.add(layer)
    return shared.rows


def share(layer: Any, source: Any, key: tuple[Any, ...], rows: SharedRows) -> SharedRows:
    """Keep rows for siblings of a layer, and return them."""
    _last.shared = _Shared(layer, source, key, rows) if type(source) is Tensor and not source.is_inference() else None
    return rows


def forget() -> None:
    """Drop the rows that are kept. A graph has kept none."""
    if not torch.compiler.is_compiling():
        _last.shared = None


def _drop(shared: _Shared | None) -> None:
    if shared is not None:
        shared.rows = SharedRows(None)


def _state(source: Any) -> tuple[int, int]:
    """Return what changes when a tensor is written to."""
    return source._version, source.data_ptr()
