"""A layer's call as the list of what it launches, run without the Python that found it.

A layer's functions read nothing but their arguments, and no value on the device (`octavo.layers.contract`). What such a
call allocates, launches and returns therefore follows from its config and from how its tensors lie in memory: shapes,
strides, dtypes, device, alignment. The first call of a kind runs as it is written; the second is watched, operator by
operator and launch by launch, and written down as a straight function; from then on that function is what runs. Same
kernels, same arguments, same bits, a fraction of the host's time. What is not needed any more is let go on the way, as
early as it can be.

Nothing is put on a tape where a mode watches operators or functions, a tensor is a subclass, the plain torch reference
runs, or somebody else's code takes part. A call that turns out to read a value, or a tensor that it was not given, goes
on as it is written.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import deterministic

from octavo import backend, launch
from octavo._torch.cuda import current_device
from octavo._torch.dispatch import DeviceContext, dispatch_depth, function_depth, function_mode, innermost_transform
from octavo.lower.replay.recorder import Recorder, Refused

log = logging.getLogger("octavo.tape")

DEVICES = {"cuda"}  # where calls are put on tapes: on a CPU the reference's arithmetic is what takes time
MOST = 4096  # kinds of calls remembered, the ones used last
_PLAIN = frozenset((Tensor, nn.Parameter, type(None)))
Work = Callable[[Sequence[Tensor | None]], tuple[Any, Sequence[Tensor | None]]]


class _Kind:
    """A kind of call, and how it is run."""

    __slots__ = ("number", "refused", "run")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.run: Callable[..., Any] | None = None
        self.refused = False


class Called(NamedTuple):
    about: Any  # something about the call that is always the same
    found: Sequence[Tensor | None]  # tensors that it made or was given
    kind: int | None  # calls of one number make tensors that lie alike; None: nothing is known


_numbers = itertools.count()
_kinds: "OrderedDict[tuple[Any, ...], _Kind]" = OrderedDict()


def call(head: tuple[Any, ...], tensors: Sequence[Tensor | None], work: Work, known: int = 0) -> Called:
    """work(tensors) -> (something that is always the same, tensors). `head` says which work it is, and how the first
    `known` of the tensors lie."""
    key = _key(head, tensors[known:] if known else tensors)
    if key is None:
        return Called(*work(tensors), None)
    kind = _kinds.get(key)
    if kind is None:
        kind = _new(key)
        return Called(*work(tensors), kind.number)
    with suppress(KeyError):  # another thread may have let it go
        _kinds.move_to_end(key)
    if kind.run is not None and not launch.is_watched():  # who watches would not be told
        about, found = kind.run(*tensors)
        return Called(about, found, kind.number)
    if kind.run is None and not kind.refused and _are_different(tensors):
        return Called(*_recorded(kind, tensors, work), kind.number)
    return Called(*work(tensors), kind.number)


def _new(key: tuple[Any, ...]) -> _Kind:
    made = _kinds[key] = _Kind()
    while len(_kinds) > MOST:
        _kinds.popitem(last=False)
    return made


def forget() -> None:
    """All tapes."""
    _kinds.clear()


def sources() -> list[str]:
    """What is on the tapes, for reading."""
    return [kind.run.source for kind in _kinds.values() if kind.run is not None]  # type: ignore[attr-defined]


def _key(head: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> tuple[Any, ...] | None:
    """Everything that decides what is launched; None if this is not for a tape."""
    first = next((t for t in tensors if t is not None), None)
    if first is None or not _is_for_tapes(first) or not _PLAIN.issuperset(map(type, tensors)):
        return None
    device = first.device.type
    recast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if any([t is not None and t.layout is not torch.strided for t in tensors]):
        return None
    marks: list[Any] = [
        None if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15) for t in tensors
    ]
    return (*head, recast, *marks)


def _is_for_tapes(first: Tensor) -> bool:
    """Whether a call goes by the kernels, in a place where nobody stands between them and the tensors."""
    device = first.device
    if device.type not in DEVICES or dispatch_depth() or _functions_are_watched():
        return False
    if torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        return False  # memory that nobody writes to is NaN there
    if innermost_transform() is not None:  # vmap, jvp: tensors without memory
        return False
    if device.type == "cpu":
        return True
    if device.index != current_device():
        return False
    return backend.forced() != "reference" and backend.triton_refusal(device) is None


def _functions_are_watched() -> bool:
    """By a mode of somebody's; a default device is one that does not matter."""
    modes = range(function_depth())
    return any([type(function_mode(i)) is not DeviceContext for i in modes])


def _are_different(tensors: Sequence[Tensor | None]) -> bool:
    """One that is given twice has one name, which the next call would take for both."""
    here = [id(t) for t in tensors if t is not None]
    return len(set(here)) == len(here)


def _recorded(kind: _Kind, tensors: Sequence[Tensor | None], work: Work) -> tuple[Any, Sequence[Tensor | None]]:
    recorder = Recorder(tensors)
    with recorder.watching():
        found = work(tensors)
    try:
        kind.run = recorder.function(*found)
    except Refused as why:
        log.debug("not put on a tape: %s", str(why))  # an error would keep what its frames hold
        kind.refused = True
    return found
