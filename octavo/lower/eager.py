"""The layer contract in eager mode: one thin autograd function, and none at all where nothing needs a gradient.

What backward writes besides its results does not pass through `save_for_backward`: a hook that moves saved tensors
away would otherwise hand backward a copy to write to, and two forwards in flight would trip its version check.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from octavo.errors import UnsupportedConfig
from octavo.layers.contract import Layer

_ANCHOR = torch.empty(0, requires_grad=True)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: Layer, config: Any, buffers: Any, anchor: Tensor | None, *inputs: Any
    ) -> tuple[Tensor, ...]:
        named = layer.Inputs._make(inputs)
        at_once = getattr(layer, "forward_and_save", None)  # of a chain
        if at_once is not None:
            made, saved = at_once(config, named)
        else:
            made = layer.forward(config, named)
            saved = layer.save(config, named, made)
        ctx.save_for_backward(*saved)
        ctx.call = layer, config, buffers, len(made.outputs)
        ctx.set_materialize_grads(False)
        if made.extras:
            ctx.mark_non_differentiable(*made.extras)
        return *made.outputs, *made.extras

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _once(ctx, *grads) if torch.is_grad_enabled() else _backward(ctx, *grads)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    layer, config, buffers, outputs = ctx.call
    # a graph of the same layer may be in flight, and have the same buffers among what it saved
    written = tuple([t for t in buffers if isinstance(t, Tensor)])
    for place in layer.returned_elsewhere(config).values():
        _refuse_rewriting(buffers[place])
    if written:
        with _unsafe_preserve_version_counter(written):
            found = layer.backward(config, ctx.saved_tensors, buffers, grads[:outputs])
    else:
        found = layer.backward(config, ctx.saved_tensors, buffers, grads[:outputs])
    return None, None, None, None, *found


_last_written: dict[int, int] = {}  # address of a caller's gradient buffer -> the backward that wrote to it


def _refuse_rewriting(buffer: Tensor) -> None:
    """A gradient that waits in its buffer to be added to another must not be overwritten by that other."""
    task = torch._C._current_graph_task_id()
    if _last_written.get(buffer.data_ptr()) == task:
        raise UnsupportedConfig(
            "Two gradients of one backward were to be written to one dgrad_out. Give each call a buffer of its own."
        )
    if len(_last_written) > 4096:
        _last_written.clear()
    _last_written[buffer.data_ptr()] = task


_once = once_differentiable(
    _backward
)  # under create_graph: what differentiates the result again is told that it cannot


def run(
    layer: Layer, config: Any, inputs: Any, buffers: Any, *, differentiable: bool, anchored: bool = False
) -> tuple[Tensor, ...]:
    """Outputs, then extras, of one call. `differentiable` says whether any gradient can be asked for; `anchored` makes
    backward run for what it writes to `buffers`, even where no input takes a gradient."""
    if not differentiable:
        at_once = getattr(layer, "forward_and_save", None)
        with torch.no_grad():
            made = layer.forward(config, inputs) if at_once is None else at_once(config, inputs)[0]
        return *made.outputs, *made.extras
    out = getattr(inputs, "out", None)
    if out is not None:
        _forget_values(out)
    tensors: tuple[Tensor, ...] = _Run.apply(layer, config, buffers, _ANCHOR if anchored else None, *inputs)  # type: ignore[no-untyped-call]
    if out is not None:
        _values_in[out.data_ptr()] = tensors[0]
    return tensors


# address of a caller's buffer -> the y that is in it. A y has a version of its own, since slices of one allocation must
# not disturb each other: what comes after it in the same place is told to autograd here
_values_in: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()


def _forget_values(out: Tensor) -> None:
    """The y that was written here before is about to be overwritten: a backward that still needs it must notice."""
    before = _values_in.get(out.data_ptr())
    if before is not None:
        torch.autograd.graph.increment_version([before])
