"""Rotary heads -> quantize -> the backward of the Linear before them: the kernel writes the gradient of q, k and v as
codes only (`octavo.kernels.rotary.cast`)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from octavo.fusion.rule import Backward, FusedOperation, Rule
from octavo.fusion.rules import conditions
from octavo.kernels.rotary import cast
from octavo.kernels.tile_cast import Target
from octavo.ops import linear_layer, matmul, rotary_layer
from octavo.ops.attention import RotaryAttention
from octavo.ops.linear import Linear
from octavo.quant.proto import TensorProto

Grads = tuple[Tensor | None, ...]


class LinearRotary(FusedOperation):
    op_name = "linear-rotary"

    @staticmethod
    def step_backward(
        configs: Sequence[Any], saved: Sequence[Grads], buffers: Sequence[Any], grads: Sequence[Grads], writes: Any
    ) -> list[Grads]:
        parts = rotary_layer.complete(configs[1], grads[1])
        assert parts is not None
        call = matmul.Backward(configs[0], linear_layer.Saved._make(saved[0]), buffers[0], writes)
        dq = parts[0]
        like = TensorProto(rotary_layer.shape_of_dx(configs[1], dq), dq.dtype, dq.device)
        pair, given = linear_layer.dy_buffers(call, like)
        own, other = saved[1]
        assert own is not None and other is not None
        cast.backward(*parts, own, other, Target(pair, given))
        dx = linear_layer.input_gradient(call, like, pair[0]) if "x" in call.config.grads else None
        dw = linear_layer.finish(call, like, pair[1])
        return [linear_layer.gradients(dx, dw, None), (None, None, None)]


_NO_BIAS = conditions.of(
    0, "no bias", lambda c: "b" not in c.grads, "the gradient of the bias is a sum over rows, which must be written"
)

RULES = (
    Backward(
        Rule(
            "linear-rotary", (Linear, RotaryAttention), LinearRotary,
            (_NO_BIAS, conditions.wants_gradients(0), conditions.quantizes_dy(0), conditions.knows_scale_of_dy(0),
             conditions.runs_now(0)),
        )
    ),
)  # fmt: skip
