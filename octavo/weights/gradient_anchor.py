"""The gradient anchor of a weight that is codes: a plain tensor of its shape, dtype and device, in one stored element.

A layer passes it to its node in the weight's place, and the gradient of the anchor is that of the parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.runtime.transforms import refuse_active, refuse_tangents
from octavo.runtime.weight_nodes import anchor as anchor_in_graph


class _OfParts(torch.autograd.Function):
    """A tensor made of the parameters that a weight consists of, and whose gradient is theirs."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[Sequence[Any]], Tensor], several: bool, *parts: Any) -> Tensor:
        ctx.several = several
        return make(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        # parameters of groups share one tensor, and each has its own gradient
        parts, needed = grad.unbind() if ctx.several else (grad,), ctx.needs_input_grad[2:]
        return None, None, *[g if is_needed else None for g, is_needed in zip(parts, needed, strict=True)]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_tangents()


def of_parts(make: Callable[[Sequence[Any]], Tensor], several: bool, parts: Sequence[Any]) -> Tensor:
    """Return make(parts), whose gradient goes to the parts: to each its own slice where there may be several."""
    try:
        made: Tensor = _OfParts.apply(make, several, *parts)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        refuse_active(error)
        raise
    return made


def new_anchor(weight: Any) -> Tensor:
    """Return a plain tensor of one stored element that looks like the whole weight."""
    return weight.element.expand(weight.kind.shape)


def linked_anchor(parts: Sequence[Any]) -> Tensor:
    """Return an anchor whose gradient goes to the parameters that the weight consists of."""
    if torch.compiler.is_compiling():
        return anchor_in_graph(parts, parts[0].kind.shape)
    # frozen codes need no node of autograd
    if torch.is_grad_enabled() and any([p.requires_grad for p in parts]):
        return of_parts(lambda parts: new_anchor(parts[0]), parts[0].group is not None, parts)
    anchor: Tensor | None = parts[0].anchor
    return new_anchor(parts[0]) if anchor is None else anchor
