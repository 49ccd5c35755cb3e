"""Autograd's state during a call or a backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

# a context in which writes to a tensor are not counted: a graph in flight may have saved it, and would refuse to go on
preserve_version_counter = _unsafe_preserve_version_counter
# the number of the backward that runs in this thread, -1 outside of one: tells a checkpoint that recomputes from a
# forward, and the writes of one backward to a buffer from those of another
current_graph_task = torch._C._current_graph_task_id
# the innermost pair of saved_tensors_hooks, or None; with True also while a compiler traces
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
# whether the backward that runs in this thread keeps its graph, so that another one may follow (retain_graph=True)
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
# whether the backward that runs in this thread goes on to a node. It raises a RuntimeError for a leaf whose gradient
# `torch.autograd.grad` returns, and outside of an engine's backward
will_execute = torch._C._will_engine_execute_node
# the node of a Function. Tracers pass a Function's backward a stand-in, which keeps what it has
FunctionNode = torch._C._FunctionBase
# drops what a node has saved, unless its graph is kept for another backward. Autograd does so itself, but only when the
# node's backward is done
release_saved_tensors: Callable[[Any], None] = getattr(FunctionNode, "maybe_clear_saved_tensors", lambda node: None)


def replace_saved_tensors_hooks(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
    """Replace the innermost pair of saved_tensors_hooks, until its block ends."""
    _pop_hooks()
    _push_hooks(pack, unpack)


def wants_gradient_of(node: Any) -> bool:
    """Return whether the backward that runs in this thread takes the gradient that goes to this node."""
    try:
        return bool(will_execute(node))
    except RuntimeError:
        return True


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the `apply` of an autograd function without the way to torch.func's transforms: for calls outside of them,
    with tensors that none of them has wrapped."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


class _Mapped(torch.autograd.Function):
    # a tuple, not *call: a compiler counts the parameters to tell whether forward takes a ctx
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[..., Any], back: Callable[..., Any], call: tuple[Any, ...]) -> Any:
        ctx.back, ctx.call = back, call
        return there(x, *call)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return ctx.back(dy, *ctx.call), None, None, None


def mapped(x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *call: Any) -> Tensor:
    """Return there(x, *call), a linear map of x by which nothing but its arguments is needed in backward: dx is
    back(dy, *call)."""
    found: Tensor = _Mapped.apply(x, there, back, call)  # type: ignore[no-untyped-call]
    return found
