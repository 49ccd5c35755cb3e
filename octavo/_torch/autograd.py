"""Autograd's state during a call or a backward."""

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

# a context in which writes to a tensor are not counted: a graph in flight may have saved it, and would refuse to go on
preserve_version_counter = _unsafe_preserve_version_counter
# the number of the backward that runs in this thread, -1 outside of one: tells a checkpoint that recomputes from a
# forward, and the writes of one backward to a buffer from those of another
current_graph_task = torch._C._current_graph_task_id
# the innermost pair of saved_tensors_hooks, or None; with True also while a compiler traces
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
