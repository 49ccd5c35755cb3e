"""The gradient anchor of a weight that is codes: a plain tensor of its shape, dtype and device, in one stored element.

A layer passes it to its node in the weight's place, and the gradient of the anchor is that of the parameters.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.runtime.transforms import refuse_active, refuse_tangents
from octavo.runtime.weight_nodes import anchor as anchor_in_graph


class _Anchor(torch.autograd.Function):
    """A plain tensor that looks like a whole quantized weight, and whose gradient is that of its parameters."""

    @staticmethod
    def forward(ctx: Any, *parts: Any) -> Tensor:
        ctx.several = parts[0].group is not None
        return new_anchor(parts[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        # parameters of groups share the codes, and each has its own gradient
        parts = grad.unbind() if ctx.several else (grad,)
        return tuple(g if needed else None for g, needed in zip(parts, ctx.needs_input_grad, strict=True))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_tangents()


def new_anchor(weight: Any) -> Tensor:
    """Return a plain tensor of one stored element that looks like the whole weight."""
    return weight.element.expand(weight.kind.shape)


def linked_anchor(parts: Sequence[Any]) -> Tensor:
    """Return an anchor whose gradient goes to the parameters that the weight consists of."""
    if torch.compiler.is_compiling():
        return anchor_in_graph(parts, parts[0].kind.shape)
    # frozen codes need no node of autograd
    if torch.is_grad_enabled() and any([p.requires_grad for p in parts]):
        try:
            found: Tensor = _Anchor.apply(*parts)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            refuse_active(error)
            raise
        return found
    anchor: Tensor | None = parts[0].anchor
    return new_anchor(parts[0]) if anchor is None else anchor
