"""Calls that are recorded once, and replayed from then on without the Python that found out what to launch.

A layer's functions read nothing but their arguments, and no value on the device (`octavo.runtime.contract`). Its config
and the layout of its tensors (shapes, strides, dtypes, device, alignment) therefore decide what a call allocates,
launches and returns. The first call of a kind runs as it is written. The second is recorded, operator by operator and
launch by launch, as a straight function, which runs in place of all later ones: same kernels, same arguments, same
bits, a fraction of the host's time. It releases each tensor after its last use.

A caller may ask first for the replay that calls of its kind ran `latest`: torch's own guards compare the layout of all
tensors in less time than their key takes to make.

A call is not recorded where a mode watches operators or functions, a tensor is a subclass, or the plain torch reference
runs. A call that turns out to read a value, or a tensor that it was not given, goes on as it is written.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import repeat
from operator import and_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import deterministic

from octavo import backend, launch
from octavo._torch.cuda import current_device
from octavo._torch.dispatcher import DeviceContext, dispatch_depth, function_depth, function_mode, innermost_transform
from octavo._torch.tensors import GUARDS, WITHOUT_DISPATCHER, same_layouts
from octavo.runtime.replay.recorder import NotRecordable, Recorder

log = logging.getLogger("octavo.replay")

DEVICES = {"cuda"}  # where calls are recorded: on a CPU the reference's arithmetic is what takes time
MOST = 4096  # kinds of calls remembered, the ones used last
GUARDED = 8  # times that guards are made for a kind
_FOUR_BITS = repeat(15)
_PLAIN = frozenset((Tensor, nn.Parameter))
Results = tuple[Any, tuple[Any, ...]]  # something that is the same for all calls of a kind, then tensors and Nones
Work = Callable[[Sequence[Tensor]], Results]


class _Kind:
    """A kind of call: the function that replays it, once it is recorded."""

    __slots__ = ("guarded", "refused", "replay")

    def __init__(self) -> None:
        self.replay: Callable[..., Results] | None = None
        self.refused = False
        self.guarded = 0  # how often guards were made for it: they tell more tensors apart than a key does


_kinds: "OrderedDict[tuple[Any, ...], _Kind]" = OrderedDict()
_era = object()  # replays of an earlier one are forgotten
_latest: "dict[tuple[Any, ...], Latest]" = {}  # by the heads of keys


class Latest(NamedTuple):
    """The replay that a call ran last, and what calls must have in common with that one to run it too."""

    same_layouts: Callable[..., bool]
    ends: list[int]
    recast: torch.dtype | None
    replay: Callable[..., Results]
    place: "_Place"
    era: object


class _Place(NamedTuple):
    """A device, with its properties as plain values: torch makes a string at each read of its type."""

    device: torch.device
    kind: str
    number: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> "_Place":
        device = tensor.device
        return cls(device, device.type, device.index)


def key_of(head: tuple[Any, ...], tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Return a key of all that decides what a call launches, or None if the call must not be recorded. `head` tells it
    from other calls on tensors of this layout."""
    if not tensors or not _is_recordable(place := _Place.of(tensors[0])) or not _PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        layouts = [(t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15) for t in tensors]
    except RuntimeError:  # a sparse tensor has no strides
        return None
    return (*head, _recast(place), *layouts)


def fixed_key_of(head: tuple[Any, ...], tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Return `key_of` tensors whose sizes, strides, dtypes and device are the same at every call with this `head`."""
    place = _Place.of(tensors[0])
    return (*head, _recast(place), *_ends(tensors)) if _is_recordable(place) else None


def latest(head: tuple[Any, ...], tensors: Sequence[Tensor]) -> Latest | None:
    """Return the replay that `call` ran last for a key with this head, if these tensors would have the same key.
    Otherwise, and where guards see a difference that the key does not, return None: make the key then."""
    found = _latest.get(head)
    return found if found is not None and fits(found, tensors) else None


def fits(found: Latest, tensors: Sequence[Tensor]) -> bool:
    """Whether a call that is of the same kind but for its tensors, of which there are as many, may run this replay."""
    return (
        found.same_layouts(*tensors)  # in the same place, and with torch.autocast on or off as then
        and list(map(and_, map(Tensor.data_ptr, tensors), _FOUR_BITS)) == found.ends  # as _ends, without a call
        and _is_recordable(found.place)
        and (found.recast is None or _recast(found.place) is found.recast)
        and found.era is _era
        and not launch.is_watched()
    )


def _ends(tensors: Sequence[Tensor]) -> list[int]:
    """The last four bits of each address."""
    return list(map(and_, map(Tensor.data_ptr, tensors), _FOUR_BITS))


def _note_latest(head: tuple[Any, ...], kind: _Kind, tensors: Sequence[Tensor]) -> None:
    """Let `latest` find this kind's replay. Kinds that take turns under one head are left to their keys."""
    if kind.replay is None or kind.guarded >= GUARDED or not GUARDS.is_on():
        return
    kind.guarded += 1
    if len(_latest) >= MOST:
        _latest.clear()
    place = _Place.of(tensors[0])
    _latest[head] = Latest(same_layouts(tensors), _ends(tensors), _recast(place), kind.replay, place, _era)


def _recast(place: _Place) -> torch.dtype | None:
    """The dtype to which torch.autocast casts on this device; None where it is off."""
    return torch.get_autocast_dtype(place.kind) if torch.is_autocast_enabled(place.kind) else None


def _is_recordable(place: _Place) -> bool:
    """Whether a call launches kernels on this device, with no mode between them and the tensors."""
    device, kind, number = place
    if kind not in DEVICES or dispatch_depth():
        return False
    if function_depth() and _functions_are_watched():
        return False
    if torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        return False  # torch fills allocations with NaN there
    if innermost_transform() is not None:  # vmap, jvp: tensors without memory
        return False
    if kind == "cpu":
        return True
    if number != current_device():
        return False
    return (
        backend.forced() not in ("reference", "emulated", "checked") and backend.unsupported_by_triton(device) is None
    )


def _functions_are_watched() -> bool:
    """Whether a mode watches functions, other than a default device."""
    modes = range(function_depth())
    return any([type(function_mode(i)) is not DeviceContext for i in modes])


def call(key: tuple[Any, ...], tensors: Sequence[Tensor], work: Work, head: tuple[Any, ...] | None = None) -> Results:
    """Call work(tensors), or replay it if a call of this key was recorded. With a `head`, `latest` finds the replay."""
    kind = _kinds.get(key)
    if kind is None:
        _remember(key)
        return work(tensors)
    with suppress(KeyError):  # another thread may have dropped it
        _kinds.move_to_end(key)
    if kind.replay is not None and not launch.is_watched():  # a replay does not tell of its launches
        if head is not None:
            _note_latest(head, kind, tensors)
        return kind.replay(*tensors)
    if kind.replay is None and not kind.refused and _are_different(tensors) and WITHOUT_DISPATCHER.is_on():
        return _recorded(kind, tensors, work)
    return work(tensors)


def _remember(key: tuple[Any, ...]) -> None:
    _kinds[key] = _Kind()
    while len(_kinds) > MOST:
        _kinds.popitem(last=False)


def forget() -> None:
    """Drop all recorded calls."""
    global _era
    _era = object()
    _kinds.clear()
    _latest.clear()


def sources() -> list[str]:
    """The source of every recorded call, for reading."""
    return [kind.replay.source for kind in _kinds.values() if kind.replay is not None]  # type: ignore[attr-defined]


def _are_different(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor is given twice: it would have one name, which later calls would take for both."""
    return len({id(t) for t in tensors}) == len(tensors)


def _recorded(kind: _Kind, tensors: Sequence[Tensor], work: Work) -> Results:
    recorder = Recorder(tensors)
    with recorder.watching():
        results = work(tensors)
    try:
        kind.replay = recorder.function(*results)
    except NotRecordable as why:
        log.debug("not recorded: %s", str(why))  # an error would keep what its frames hold
        # a launch that was not decided yet, as while a graph is captured, may be recorded later
        kind.refused = launch.DIRECT_LAUNCHES.is_decided() or not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return results
