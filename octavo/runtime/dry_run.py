"""Run users' functions on tensors without data, to learn what they return."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from octavo._torch.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    active_fake_mode,
    is_fake,
)
from octavo.quant.proto import TensorProto


class Miscounted(RuntimeError):
    """A user's function returned values of the wrong number, kind or shape."""


def without_data() -> Any:
    """Return a context in which new tensors have no data."""
    return FakeTensorMode() if active_fake_mode() is None else nullcontext()


def stand_in(field: Any) -> Any:
    """Return a tensor without data that is like a proto or a tensor, which may have none already; None for None, and a
    tuple for a tuple."""
    if isinstance(field, tuple):
        return tuple(stand_in(t) for t in field)
    if field is None or (isinstance(field, Tensor) and is_fake(field)):
        return field
    if isinstance(field, TensorProto):
        return field.empty()
    return torch.empty_strided(tuple(field.shape), field.stride(), dtype=field.dtype, device=field.device)


def abstract(field: Any) -> Any:
    """Return the proto of a tensor, or of each in a tuple; a proto or None is returned as it is."""
    if isinstance(field, tuple):
        return tuple(abstract(t) for t in field)
    return TensorProto.of(field) if isinstance(field, Tensor) else field


class tried:
    """A context in which a user's function is called on tensors without data: an error that it raises says so.
    `otherwise` tells its author an alternative."""

    def __init__(self, where: str, otherwise: str = "") -> None:
        self.where, self.otherwise = where, otherwise

    def __enter__(self) -> None:
        self.before = _values_asked_for()

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        asks = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        # the compiler's, by name: its module is not imported
        asks = asks or type(error).__name__ == "GuardOnDataDependentSymNode"
        if asks or (error is None and _values_asked_for() > self.before):
            raise TypeError(
                f"{self.where} asks what is in a tensor, and is run without data to learn shapes. Leave out .item(), "
                f"bool() of a tensor and sizes that follow from values{self.otherwise}."
            ) from error
        if error is not None and kind is not Miscounted:
            error.add_note(f"Raised by {self.where}, which is run without data to learn shapes.")


def _values_asked_for() -> int:
    """Return the number of the compiler's symbols for unknown values, such as sizes, that no tensor has yet."""
    return len(getattr(getattr(active_fake_mode(), "shape_env", None), "pending_fresh_unbacked_symbols", ()))
