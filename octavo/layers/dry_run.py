"""Users' functions, run on tensors without data to learn what they make."""

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
    """Functions returned more or fewer things than they should."""


def without_data() -> Any:
    """Tensors made within have none."""
    return FakeTensorMode() if active_fake_mode() is None else nullcontext()


def stand_in(field: Any) -> Any:
    """A tensor without data for a proto or for a tensor, which may be one already; None for None; a tuple for one."""
    if isinstance(field, tuple):
        return tuple(stand_in(t) for t in field)
    if field is None or (isinstance(field, Tensor) and is_fake(field)):
        return field
    if isinstance(field, TensorProto):
        return field.empty()
    return torch.empty_strided(tuple(field.shape), field.stride(), dtype=field.dtype, device=field.device)


def abstract(field: Any) -> Any:
    """The proto of a tensor, or of each in a tuple; itself of a proto or None."""
    if isinstance(field, tuple):
        return tuple(abstract(t) for t in field)
    return TensorProto.of(field) if isinstance(field, Tensor) else field


class tried:
    """A user's function, called within on tensors without data: an error of its says so. `otherwise` is what else its
    author can do."""

    def __init__(self, where: str, otherwise: str = "") -> None:
        self.where, self.otherwise = where, otherwise

    def __enter__(self) -> None:
        self.before = _values_asked_for()

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if _is_about_values(error) or (error is None and _values_asked_for() > self.before):
            raise TypeError(
                f"{self.where} asks what is in a tensor, and is run without data to learn shapes. Leave out .item(), "
                f"bool() of a tensor and sizes that follow from values{self.otherwise}."
            ) from error
        if error is not None and kind is not Miscounted:
            error.add_note(f"Raised by {self.where}, which is run without data to learn shapes.")


def _is_about_values(error: Any) -> bool:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    return type(error).__name__ == "GuardOnDataDependentSymNode"  # a compiler's, whose module is not imported for this


def _values_asked_for() -> int:
    """How many symbols for values, as for sizes, a compiler has that no tensor has yet."""
    return len(getattr(getattr(active_fake_mode(), "shape_env", None), "pending_fresh_unbacked_symbols", ()))
