"""Functions of somebody else's, run on tensors without data, to learn what they make."""

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
    return nullcontext() if active_fake_mode() is not None else FakeTensorMode()


def fake(t: Any) -> Tensor:
    if isinstance(t, TensorProto):
        return t.empty()
    return torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device)


def stand_in(t: Any) -> Any:
    """A tensor without data for a proto or for a tensor, which may be one already; None for None."""
    return t if t is None or (isinstance(t, Tensor) and is_fake(t)) else fake(t)


class tried:
    """Functions of somebody else's, called within on tensors without data: what they raise says so. `otherwise` is what
    else their author can do."""

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
    """A compiler has symbols for values, as for sizes, and counts those that nobody has returned yet."""
    return len(getattr(getattr(active_fake_mode(), "shape_env", None), "pending_fresh_unbacked_symbols", ()))
