"""Autograd's state during a call or a backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

# a context in which writes to a tensor are not counted: a graph in flight may have saved it, and would refuse to go on
preserve_version_counter = _unsafe_preserve_version_counter
# the number of the backward that runs in this thread, -1 outside of one: tells a checkpoint that recomputes from a
# forward, and the writes of one backward to a buffer from those of another
current_graph_task = torch._C._current_graph_task_id
# the innermost pair of saved_tensors_hooks, or None; with True also while a compiler traces
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The `apply` of an autograd function without the way to torch.func's transforms: for calls outside of them, with
    tensors that none of them has wrapped."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found
