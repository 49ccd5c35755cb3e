"""Marks of a weight by which a cache notices that it has changed, without a reference to it."""

from typing import Any, NamedTuple

from torch import Tensor

from octavo._torch.fakes import FakeTensor
from octavo._torch.tensors import StorageWeakRef


class State(NamedTuple):
    """Marks that change whenever a weight does."""

    version: int  # inference tensors have none
    address: int
    storage: Any  # a weak reference: while it is held, no other storage looks the same

    @property
    def place(self) -> tuple[int, Any]:
        """The memory of the weight, whatever its version."""
        return self[1:]


def state_of(weight: Tensor) -> State:
    version = -1 if weight.is_inference() else weight._version
    if isinstance(weight, FakeTensor):
        return State(version, 0, None)
    return State(version, weight.data_ptr(), StorageWeakRef(weight.untyped_storage()))  # type: ignore[no-untyped-call]
