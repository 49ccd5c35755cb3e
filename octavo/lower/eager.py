"""The layer contract in eager mode: one thin autograd function, and none at all where nothing needs a gradient.

What backward writes besides its results does not pass through `save_for_backward`: a hook that moves saved tensors
away would otherwise hand backward a copy to write to, and two forwards in flight would trip its version check.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from octavo.layers.contract import Layer

_ANCHOR = torch.empty(0, requires_grad=True)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: Layer, config: Any, buffers: Any, anchor: Tensor | None, *inputs: Any
    ) -> tuple[Tensor, ...]:
        named = layer.Inputs._make(inputs)
        made = layer.forward(config, named)
        ctx.save_for_backward(*layer.save(config, named, made))
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
    if written:
        with _unsafe_preserve_version_counter(written):
            found = layer.backward(config, ctx.saved_tensors, buffers, grads[:outputs])
    else:
        found = layer.backward(config, ctx.saved_tensors, buffers, grads[:outputs])
    return None, None, None, None, *found


_once = once_differentiable(
    _backward
)  # under create_graph: what differentiates the result again is told that it cannot


def run(
    layer: Layer, config: Any, inputs: Any, buffers: Any, *, differentiable: bool, anchored: bool = False
) -> tuple[Tensor, ...]:
    """Outputs, then extras, of one call. `differentiable` says whether any gradient can be asked for; `anchored` makes
    backward run for what it writes to `buffers`, even where no input takes a gradient."""
    if not differentiable:
        with torch.no_grad():
            made = layer.forward(config, inputs)
        return *made.outputs, *made.extras
    tensors: tuple[Tensor, ...] = _Run.apply(layer, config, buffers, _ANCHOR if anchored else None, *inputs)  # type: ignore[no-untyped-call]
    return tensors
