"""Symmetric memory: each rank of a group maps the memory of the others. Private on every version of torch so far."""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor


def allocate(size: int, device: torch.device) -> Tensor:
    """Return bytes that other processes can map."""
    from torch.distributed import _symmetric_memory  # it imports the compiler's parts

    return _symmetric_memory.empty(size, dtype=torch.uint8, device=device)


def mapped(memory: Tensor, group: Any) -> Any:
    """Map the memory of all ranks of a group, a collective; return torch's handle: `buffer_ptrs`, `get_buffer` and
    `barrier`."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(memory, group)


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """Return how long a collective of the group may take."""
    found: timedelta = group._get_backend(device).options._timeout
    return found
