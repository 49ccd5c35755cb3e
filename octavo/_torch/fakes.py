"""Tensors without data, and the mode that makes them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily


def as_real_as(weight: Tensor) -> AbstractContextManager[Any]:
    """State of a real layer is real, also where a fake mode watches, which would leave fakes behind in it."""
    return nullcontext() if isinstance(weight, FakeTensor) else unset_fake_temporarily()
