"""Track values that lie in the caller's memory (`out`, `dgrad_out`), and later writes to that memory.

Such a value has a version of its own, since slices of one allocation must not disturb each other. Autograd therefore
does not see when its memory is written to again; this module tells it.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig
from octavo.memory import overlap, span


class _Value(NamedTuple):
    first: int
    end: int  # addresses
    tensor: "weakref.ref[Tensor] | None"  # None: a gradient from a graph, remembered while its backward goes on
    task: int  # the backward that wrote it; -1 for a forward


_values: dict[int, list[_Value]] = {}  # by the address of the allocation
_lock = threading.Lock()  # backward has threads of its own
_MOST = 4096  # allocations, before those without values are dropped


def begin_write(buffer: Tensor, task: int = -1) -> None:
    """Prepare a write to the buffer: a backward that still needs a value there must notice. A gradient that waits in
    its buffer to be added to another of the same `task` has no version that tells, so the write is refused."""
    key = _allocation(buffer)
    if key in _values:
        _forget(key, *span(buffer), task)


def begin_write_at(place: Tensor, nbytes: int) -> None:
    """Prepare a write, as `begin_write` does, to `nbytes` bytes from where a tensor begins, which may itself be
    empty."""
    key = place.untyped_storage().data_ptr()
    if key in _values:
        first = key + int(place.storage_offset()) * place.element_size()
        _forget(key, first, first + nbytes, -1)


def _allocation(buffer: Tensor) -> int:
    return buffer.data_ptr() - int(buffer.storage_offset()) * buffer.element_size()


def keep(buffer: Tensor, value: Tensor | None, task: int = -1) -> None:
    """Remember the value that lies in a buffer. For a gradient that a graph wrote, remember only the place: other
    graphs in flight have saved the buffer itself, so its version must not move."""
    if buffer.numel() == 0 or (value is not None and value.is_inference()):  # no backward will need it
        return
    found = _Value(*span(buffer), None if value is None else weakref.ref(value), task)
    with _lock:
        if len(_values) > _MOST:
            for key in [key for key, own in _values.items() if not any(_is_there(v, task) for v in own)]:
                del _values[key]
        _values.setdefault(_allocation(buffer), []).append(found)


def release(buffer: Tensor) -> None:
    """Forget the values in a buffer: the one operation that takes them has read them, and others may be written."""
    first, end = span(buffer)
    with _lock:
        key = _allocation(buffer)
        if key in _values:
            _values[key] = [v for v in _values[key] if not (v.first < end and first < v.end)]


def _is_there(value: _Value, task: int) -> bool:
    return value.task == task if value.tensor is None else value.tensor() is not None


def _forget(key: int, first: int, end: int, task: int) -> None:
    """Drop the values that lie between two addresses, and those that no longer exist; tell autograd of the former."""
    stale, rest = list[Tensor](), list[_Value]()
    with _lock:
        for value in _values.get(key, ()):
            if not _is_there(value, task):
                continue
            if not (value.first < end and first < value.end):
                rest.append(value)
            elif value.task == task >= 0:
                raise UnsupportedConfig(
                    "One backward would write two gradients to one dgrad_out. Give each call a buffer that overlaps no "
                    "other."
                )
            elif value.tensor is not None and (tensor := value.tensor()) is not None:
                stale.append(tensor)
        _values[key] = rest
    if stale:
        torch.autograd.graph.increment_version(stale)


def refuse_overlap(dgrad_out: Tensor, inputs: Iterable[Any]) -> None:
    """Refuse a gradient of x in the memory of an input: the operation that made the input may need it in backward."""
    for tensor in inputs:
        if isinstance(tensor, Tensor) and overlap(dgrad_out, tensor):
            raise UnsupportedConfig(
                f"dgrad_out lies in the memory of x or another input of the layer, {tensor.dtype} "
                f"{tuple(tensor.shape)}, which must not change before backward ends. Give it memory of its own."
            )


def refuse_grad(dgrad_out: Tensor, x: Tensor) -> None:
    """Refuse a gradient of x in the memory of `x.grad`, of an eager call: a graph's gradient may become `.grad`."""
    if x.is_leaf and x.grad is not None and overlap(dgrad_out, x.grad):
        raise UnsupportedConfig(
            f"dgrad_out lies in x.grad, {x.dtype} {tuple(x.shape)}: autograd would add the gradient to itself. Give it "
            "memory of its own."
        )
