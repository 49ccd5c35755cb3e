"""Tensors without data, and the mode that makes them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor, functional_tensor

FakeTensor = fake_tensor.FakeTensor  # what tracers run code on: layers read no values of it and keep none as state
FakeTensorMode = fake_tensor.FakeTensorMode  # makes them: user code runs on shapes alone, to learn what it returns
FunctionalTensor = functional_tensor.FunctionalTensor  # AOTAutograd's wrapper, which layers serve as a plain tensor
is_fake = fake_tensor.is_fake  # whether a tensor has no data, also inside of wrappers

# raised by operators on fakes whose result, or whose sizes, follow from values: the refusal says so in our words
DataDependentOutputException = fake_tensor.DataDependentOutputException
DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException


def as_real_as(weight: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which new state is as real as the weight: a fake mode would leave fakes behind in a real
    layer."""
    return nullcontext() if isinstance(weight, FakeTensor) else fake_tensor.unset_fake_temporarily()


def runs_on_shapes(weight: Tensor) -> bool:
    """Return whether a call of a layer with this weight, outside of a compiler, computes shapes alone: a fake mode is
    around a layer that is real."""
    return not torch.compiler.is_compiling() and active_fake_mode() is not None and not isinstance(weight, FakeTensor)


def active_fake_mode() -> Any:
    """Return the fake mode around this call, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
