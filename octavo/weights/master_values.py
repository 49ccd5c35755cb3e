"""Values in float32 of trained weights that are codes, for optimizers that know nothing of codes.

Such an optimizer writes to a weight in place, and most of its updates are smaller than the distance of two codes. From
its first step on, writes compute with these values, and the codes are made of them. In-place arithmetic of a program's
own (`weight.add_`, `lerp_` of a moving average) does the same. A program that loads or sets the
weight makes them stale: the codes have another version then, and the next step begins with the values of the codes.
"""

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Master:
    """The float32 values of one trained weight, by group, and the version of the codes that were made of them."""

    def __init__(self) -> None:
        self.values: dict[int | None, Tensor] = {}  # by group
        self.version = -1  # of the codes, when they were last made of these values


_masters: Any = WeakTensorKeyDictionary()  # row codes -> Master


def keep_master(weight: Any) -> None:
    """Let writes in place to this weight or group compute, from now on, with float32 values, which are kept."""
    master = _masters.setdefault(weight.row_codes, Master())
    if master.version != weight.row_codes._version:  # the program has loaded or set the weight
        master.values.clear()
        master.version = weight.row_codes._version
    if weight.group not in master.values:
        master.values[weight.group] = weight.base_values().float()


def drop_master(weight: Any) -> None:
    """Forget the values of a weight that is written by an optimizer which keeps its own."""
    _masters.pop(weight.row_codes, None)


def values_bytes(weight: Any) -> int:
    """Return the bytes of the values that are kept for a weight or for one group of it."""
    master: Master | None = _masters.get(weight.row_codes)
    values = None if master is None else master.values.get(weight.group)
    return 0 if values is None else values.nbytes


def kept_values(weight: Any) -> dict[int | None, Tensor]:
    """Return the values that the codes of a weight were made of, by group; none if the program has written to it."""
    master: Master | None = _masters.get(weight.row_codes)
    return dict(master.values) if master is not None and master.version == weight.row_codes._version else {}


def set_values(weight: Any, values: dict[int | None, Tensor]) -> None:
    """Let writes in place to a weight compute with these values, of which its codes were made."""
    drop_master(weight)
    if values:
        master = _masters[weight.row_codes] = Master()
        master.values, master.version = values, weight.row_codes._version


def writable_values(weight: Any) -> Tensor:
    """Return the values that a write in place begins with, as a tensor to be written to."""
    kept = kept_values(weight)
    return kept[weight.group] if weight.group in kept else weight.base_values()


def note_written(weight: Any, values: Tensor) -> None:
    """Note that codes were made of these values."""
    master: Master | None = _masters.get(weight.row_codes)
    if master is not None and master.values.get(weight.group) is values:
        master.version = weight.row_codes._version
