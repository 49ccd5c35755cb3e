"""The call cache: a call is recorded once, and later calls that the same things decide run the recording.

A layer's functions read nothing but their arguments, and no value on the device (`octavo.runtime.contract`). Its config
and the layout of its tensors (shapes, strides, dtypes, device, alignment) therefore decide what a call allocates,
launches and returns. The first call of a kind runs as it is written. The second is recorded, operator by operator and
launch by launch, as a straight function, which runs in place of all later ones: same kernels, same arguments, same
bits, a fraction of the host's time. It takes the tensors out of the list that it is given, and releases each after its
last use, be it one of those.

    find(decided, tensors)   the hit of a call, before anything of it was made: `decided` is a tuple of all that decides
                             the call but for the layout of its tensors, and `_is_hit` has the guards. An operation
                             makes `decided` of its settings (`Lookup`), so that a hit runs neither checks nor casts of
                             arguments nor the parsing of a config; the driver makes it of a stage
    run(decided, ...)        a call that is no hit: by the key of its recording, which has every layout; recorded if it
                             is the second of its kind, as it is written if it cannot be. A call that ran a recording
                             by its key is a hit the next time

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
MOST = 4096  # recordings and hits that are remembered; of recordings, the ones used last
GUARDED = 8  # times that guards are made for a recording
_FOUR_BITS = repeat(15)
_PLAIN = frozenset((Tensor, nn.Parameter))
Results = tuple[Any, tuple[Any, ...]]  # something that is the same for all calls of a kind, then tensors and Nones
Work = Callable[[list[Tensor]], Results]
Replay = Callable[..., Results]


class Lookup(NamedTuple):
    """A call as the cache finds it: made of an operation's settings and tensors, without a check."""

    settings: tuple[Any, ...]  # all that decides the operation's stage, but for the layout of its tensors
    tensors: list[Tensor]  # its inputs, flat, without x
    buffers: tuple[Any, ...]  # that backward writes to
    needs: bool  # whether it wants any gradient, so that its y requires one
    # an operation with a weight hears of a hit (`_note_hit`):
    trains: bool = False  # the weight takes a gradient
    observes: bool = False  # running amaxes are raised


class Hit(NamedTuple):
    """A recording, and what a call must have in common with the one that ran it last to run it too."""

    replay: Replay
    same_layouts: Callable[..., bool]
    ends: list[int]
    autocast_dtype: torch.dtype | None
    place: "_Place"
    repeats: Sequence[tuple[int, int]]  # as `_repeats` returns them
    era: object
    context: Any  # of the driver: what it knows of such a call


class _Recording:
    """A kind of call, by its key: the function that replays it, once it is recorded."""

    __slots__ = ("guarded", "refused", "replay")

    def __init__(self) -> None:
        self.replay: Replay | None = None
        self.refused = False
        self.guarded = 0  # how often guards were made for it: they tell more tensors apart than a key does


class _Place(NamedTuple):
    """A device, with its properties as plain values: torch makes a string at each read of its type."""

    device: torch.device
    kind: str
    number: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> "_Place":
        device = tensor.device
        return cls(device, device.type, device.index)


_recordings: "OrderedDict[tuple[Any, ...], _Recording]" = OrderedDict()
_hits: dict[tuple[Any, ...], Hit] = {}
_era = object()  # hits of an earlier one are forgotten


def find(decided: tuple[Any, ...], tensors: Sequence[Tensor]) -> Hit | None:
    """Return the hit of a call: the recording that the last call with this `decided` ran, if this one may run it."""
    hit = _hits.get(decided)
    return hit if hit is not None and _is_hit(hit, tensors) else None


def _is_hit(hit: Hit, tensors: Sequence[Tensor]) -> bool:
    """Return whether a call that was decided as the hit's, but for its tensors, may run the hit's recording. All guards
    are here, but for those that `decided` has: the settings of the operation, its recipe, modes of the module and of
    autograd, and calls with anything unusual, which make no `decided` at all."""
    if hit.repeats:  # torch's guards refuse a tensor that is given twice
        if not all([tensors[i] is tensors[first] for i, first in hit.repeats]):
            return False
        repeated = [i for i, _ in hit.repeats]
        tensors = [t for i, t in enumerate(tensors) if i not in repeated]
    return (
        # as many tensors of the same types, sizes, strides, dtypes, dispatch keys and requires_grad, in the same place,
        # with torch.autocast on or off as then
        hit.same_layouts(*tensors)
        and list(map(and_, map(Tensor.data_ptr, tensors), _FOUR_BITS)) == hit.ends  # as _ends, without a call
        and _is_recordable(hit.place)
        and (hit.autocast_dtype is None or _autocast_dtype(hit.place) is hit.autocast_dtype)
        and hit.era is _era
        and not launch.is_watched()  # a replay does not tell of its launches
    )


def run(
    decided: tuple[Any, ...],
    tensors: list[Tensor],
    work: Work,
    hit_key: tuple[Any, ...] | None = None,
    context: Any = None,
    fixed: bool = False,
) -> Results:
    """Call work(tensors), or replay it if a call with an equal key was recorded. Either may empty the list. If a call
    was recorded, `find` returns the next one by `hit_key`, with this `context`. `fixed`: the tensors have the same
    layout at every call with this `decided`."""
    key = key_of(decided, tensors, fixed)
    if key is None:
        return work(tensors)
    recording = _recordings.get(key)
    if recording is None:
        _recordings[key] = _Recording()
        while len(_recordings) > MOST:
            _recordings.popitem(last=False)
        return work(tensors)
    with suppress(KeyError):  # another thread may have dropped it
        _recordings.move_to_end(key)
    if recording.replay is not None and not launch.is_watched():
        if hit_key is not None:
            _note(hit_key, recording, tensors, context)
        return recording.replay(tensors)
    if recording.replay is None and not recording.refused and WITHOUT_DISPATCHER.is_on():
        return _record(recording, tensors, work)
    return work(tensors)


def key_of(decided: tuple[Any, ...], tensors: Sequence[Tensor], fixed: bool = False) -> tuple[Any, ...] | None:
    """Return a key of all that decides what a call launches, or None if the call must not be recorded."""
    if not tensors or not _is_recordable(place := _Place.of(tensors[0])):
        return None
    if fixed:
        return (*decided, _autocast_dtype(place), _repeats(tensors), *_ends(tensors))
    if not _PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        layouts = [(t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15) for t in tensors]
    except RuntimeError:  # a sparse tensor has no strides
        return None
    return (*decided, _autocast_dtype(place), _repeats(tensors), *layouts)


def _repeats(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return the places of each tensor that is given again, and of its first occurrence: a recording has one name for
    both."""
    first: dict[int, int] = {}
    places = [first.setdefault(id(t), i) for i, t in enumerate(tensors)]
    return tuple([(i, place) for i, place in enumerate(places) if i != place])


def _ends(tensors: Sequence[Tensor]) -> list[int]:
    """Return the last four bits of each address."""
    return list(map(and_, map(Tensor.data_ptr, tensors), _FOUR_BITS))


def _note(hit_key: tuple[Any, ...], recording: _Recording, tensors: Sequence[Tensor], context: Any) -> None:
    """Let `find` return this recording. Recordings that take turns under one `hit_key` are left to their keys."""
    if recording.replay is None or recording.guarded >= GUARDED or not GUARDS.is_on():
        return
    recording.guarded += 1
    if len(_hits) >= MOST:
        _hits.clear()
    place, repeats = _Place.of(tensors[0]), _repeats(tensors)
    repeated = [i for i, _ in repeats]
    tensors = [t for i, t in enumerate(tensors) if i not in repeated]
    _hits[hit_key] = Hit(
        recording.replay, same_layouts(tensors), _ends(tensors), _autocast_dtype(place), place, repeats, _era, context
    )


def _autocast_dtype(place: _Place) -> torch.dtype | None:
    """Return the dtype to which torch.autocast casts on this device; None where it is off."""
    return torch.get_autocast_dtype(place.kind) if torch.is_autocast_enabled(place.kind) else None


def _is_recordable(place: _Place) -> bool:
    """Return whether a call launches kernels on this device, with no mode between them and the tensors."""
    device, kind, number = place
    if kind not in DEVICES or dispatch_depth():
        return False
    # a mode that watches functions, other than a default device
    if function_depth() and any([type(function_mode(i)) is not DeviceContext for i in range(function_depth())]):
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


def forget() -> None:
    """Drop all recorded calls."""
    global _era
    _era = object()
    _recordings.clear()
    _hits.clear()


def sources() -> list[str]:
    """Return the source of every recorded call, for reading."""
    return [one.replay.source for one in _recordings.values() if one.replay is not None]  # type: ignore[attr-defined]


def _record(recording: _Recording, tensors: list[Tensor], work: Work) -> Results:
    recorder = Recorder(tensors)
    with recorder.watching():
        results = work(tensors)
    try:
        recording.replay = recorder.function(*results)
    except NotRecordable as why:
        log.debug("not recorded: %s", str(why))  # an error would keep what its frames hold
        # a launch that was not decided yet, as while a graph is captured, may be recorded later
        recording.refused = launch.DIRECT_LAUNCHES.is_decided() or not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return results
