"""Kinds of tensors that torch has besides plain ones, and their memory."""

from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.multiprocessing import reductions

StorageWeakRef = reductions.StorageWeakRef  # a weak reference to memory: while it is held, no other looks the same
TensorBase = torch._C.TensorBase  # the class above Tensor, which has the default __torch_function__
is_alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]  # whether two tensors share memory
wrapper_subclass: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]  # makes a tensor without memory
PARAMETER_MARK = "_is_param"  # the attribute by which a tensor subclass is an nn.Parameter
# by kind of device: an allocation as Inductor makes it, without the dispatcher
EMPTY_STRIDED: dict[str, Any] = {kind: getattr(guards, f"_empty_strided_{kind}") for kind in ("cpu", "cuda")}

# memory of a tensor in another shape, as Inductor makes it: no dispatcher, no gradient, a version of its own
reinterpret: Any = guards._reinterpret_tensor  # type: ignore[attr-defined]


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor: FSDP2's, which are whole by the time of a call, or tensor parallelism's."""
    return is_dtensor(type(tensor))


def is_dtensor(kind: type) -> bool:
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed")
