"""Functional collectives. Operators are called by name: the Python functions around them were renamed after torch
2.11."""

from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import _functional_collectives  # importing it gives the operators their gradients
from torch.distributed.distributed_c10d import _world

AsyncCollectiveTensor = _functional_collectives.AsyncCollectiveTensor  # a result on its way: kernels wait for it
all_gather_into_tensor = torch.ops._c10d_functional.all_gather_into_tensor
all_reduce = torch.ops._c10d_functional.all_reduce
all_to_all_single = torch.ops._c10d_functional.all_to_all_single
reduce_scatter_tensor = torch.ops._c10d_functional.reduce_scatter_tensor
resolve_process_group = _resolve_process_group  # the group that is registered under a name now; RuntimeError for none
wait_tensor = torch.ops._c10d_functional.wait_tensor


def default_group() -> Any:
    """Return the default group as it is now; None if there is none."""
    return _world.default_pg


def is_live(group: Any) -> bool:
    """Return whether a group was made and not destroyed. It asks Python alone: each call into C++ takes
    microseconds."""
    return group in _world.pg_map


def backend_name(group: Any, device: torch.device) -> str:
    """Return the backend that a group uses for tensors of a device, such as "gloo" or "nccl"."""
    return str(group._get_backend(device).name())
