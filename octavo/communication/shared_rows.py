"""Rows of x that sibling layers share: q, k and v; gate and up.

Column layers that read the same x need the same rows of all ranks. The first of them casts and sends, and the others
take its result, so that their gradients of x are added before they are reduced once. One result is kept until another
layer sends, a row layer ends the pair, or x is gone. All ranks run the same program, so that they share alike.

In eager mode each thread keeps one. In a graph the call is one function, which the compiler does not look into
(`octavo._torch.tracing.in_graph`). AOTAutograd runs it on the tensors that it traces, where one tensor of the graph is
one object for all layers, and keeps the result as long as that trace. A compiler without AOTAutograd shares nothing.
"""

import threading
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from octavo._torch.tracing import end_pair, functional_mode, proxy_tracer, traced_value
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
        self.value = traced_value(source)  # another one, once a graph has written to x
        self.state, self.rows = (_state(source), key), rows
        self.served = [ref(layer)]


class _Last(threading.local):
    shared: _Shared | None = None


_last = _Last()
_of_traces: "WeakKeyDictionary[Any, _Shared]" = WeakKeyDictionary()  # by the mode of each trace, which ends with it


def find(layer: Any, source: Any, key: tuple[Any, ...]) -> SharedRows | None:
    """Return the rows that a sibling made of the same x for the same `key`; None if there are none. A layer that is
    called twice with one x makes them anew: it may have other scales. In a graph its weight stands for it."""
    mode = functional_mode()
    shared = _last.shared if mode is None else _of_traces.get(mode)
    if shared is None or not isinstance(source, Tensor) or any([one() is layer for one in shared.served]):
        return None
    if shared.source() is not source or shared.state != (_state(source), key):
        return None
    if shared.value is not traced_value(source):
        return None
    shared.served.append(ref(layer))
    return shared.rows


def share(layer: Any, source: Any, key: tuple[Any, ...], rows: SharedRows) -> SharedRows:
    """Keep rows for siblings of a layer, and return them."""
    mode = functional_mode()
    if mode is not None:
        _of_traces[mode] = _Shared(layer, source, key, rows)
    elif type(source) is Tensor and not source.is_inference():
        _last.shared = _Shared(layer, source, key, rows)
    else:
        _last.shared = None
    return rows


def forget() -> None:
    """Drop the rows that are kept. A graph has its own: there `pairs_ended` is part of the key."""
    if torch.compiler.is_compiling():
        end_pair()
    else:
        _last.shared = None


def _drop(shared: _Shared | None) -> None:
    if shared is not None:
        shared.rows = SharedRows(None)


def _state(source: Any) -> Any:
    """Return what changes when a tensor is written to; while a graph is traced, the part of it where this is."""
    return (source._version, source.data_ptr()) if functional_mode() is None else proxy_tracer()
