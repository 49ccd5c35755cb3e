"""Rotary heads -> quantize -> the backward of the Linear before them: the kernel writes the gradient of q, k and v as
codes only (`octavo.kernels.rotary.cast`)."""

from collections.abc import Sequence
from typing import Any

from octavo.fusion.rule import Backward, Rule, step
from octavo.fusion.rules import conditions
from octavo.kernels.rotary import cast
from octavo.kernels.tile_cast import TileCast
from octavo.ops import linear_layer, matmul, rotary_layer
from octavo.ops.attention import RotaryAttention
from octavo.ops.linear import Linear
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import Tensors


def _backward(
    configs: Sequence[Any], saved: Sequence[Tensors], buffers: Sequence[Any], grads: Sequence[Tensors], writes: Any
) -> list[Tensors]:
    parts = rotary_layer.complete(configs[1], grads[1])
    assert parts is not None
    dq, layer = parts[0], linear_layer.layer
    call = layer.backward_call(configs[0], saved[0], buffers[0], writes, dq.shape[0])
    like = TensorProto(rotary_layer.shape_of_dx(configs[1], dq), dq.dtype, dq.device)
    pair, given = matmul.dy_buffers(call, like)
    own, other = saved[1]
    assert own is not None and other is not None
    cast.backward(*parts, own, other, TileCast(pair, given))
    dx = matmul.input_gradient(call, like, pair[0]) if call.config.wants_dx else None
    dw = matmul.finish(call, like, pair[1])
    return [layer.gradients(dx, dw, None), (None, None, None)]


LINEAR_ROTARY = step("linear-rotary", backward=_backward)


_NO_BIAS = conditions.On(
    "no bias", lambda c: not c.wants_db, "the gradient of the bias is a sum over rows, which must be written"
).at(0)

RULES = (
    Backward(Rule("linear-rotary", (Linear, RotaryAttention), LINEAR_ROTARY, (_NO_BIAS, *conditions.dy_as_codes(0)))),
)
