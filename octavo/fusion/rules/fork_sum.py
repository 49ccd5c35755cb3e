"""The backward of a fork (MakeExtraOutput) and of the layer that follows it, in one step: it adds the gradient of the
fork's extra output to the layer's dx.

    linear-add     dx = dy · w + dextra       in place, after dx is rounded
    add-rmsnorm    dx = the norm's + dextra   for 16-bit dtypes by the norm's kernel, rounded once
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.fusion.rule import Backward, Rule, step
from octavo.ops import linear_layer, norm_layer
from octavo.ops.linear import Linear
from octavo.ops.norm import RMSNorm
from octavo.ops.views import MakeExtraOutput
from octavo.runtime.contract import Tensors


def _linear_add(
    configs: Sequence[Any], saved: Sequence[Tensors], buffers: Sequence[Any], grads: Sequence[Tensors], writes: Any
) -> list[Tensors]:
    found = linear_layer.layer.backward(configs[1], saved[1], buffers[1], grads[1], writes)
    return [_summed(found[0], grads[0][1]), (None, *found[1:])]


LINEAR_ADD = step("linear-add", backward=_linear_add)


def _add_rmsnorm(
    configs: Sequence[Any], saved: Sequence[Tensors], buffers: Sequence[Any], grads: Sequence[Tensors], writes: Any
) -> list[Tensors]:
    extra = grads[0][1]
    if extra is None or extra.dtype == torch.float32:
        # in float32 the kernel would fuse product and sum into one instruction, and dx would differ from unfused dx
        found = norm_layer.gradients(configs[1], saved[1], grads[1][0])
        return [_summed(found[0], extra), (None, *found[1:])]
    found = norm_layer.gradients(configs[1], saved[1], grads[1][0], extra)
    return [(found[0],), (None, *found[1:])]


ADD_RMSNORM = step("add-rmsnorm", backward=_add_rmsnorm)


def _summed(dx: Tensor | None, extra: Tensor | None) -> Tensors:
    """Return dx + extra, in dx's memory: dx is fresh. If one of them is None, return the other."""
    if dx is None or extra is None:
        return (extra if dx is None else dx,)
    return (dx.add_(extra),)


RULES = (
    Backward(Rule("linear-add", (MakeExtraOutput, Linear), LINEAR_ADD)),
    Backward(Rule("add-rmsnorm", (MakeExtraOutput, RMSNorm), ADD_RMSNORM)),
)
