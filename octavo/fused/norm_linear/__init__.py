"""norm -> quantize -> Linear: the kernel writes the normalised rows as codes only (`octavo.kernels.norm_quantize`)."""

from collections.abc import Sequence
from typing import Any

from octavo.delayed_scaling.casts import Amaxes
from octavo.fused import conditions
from octavo.fuser.pattern import Forward, FusedOperation, Rule
from octavo.kernels import norm_quantize
from octavo.layers import linear, norm
from octavo.layers.contract import ForwardResult
from octavo.modules.linear import Linear
from octavo.modules.norm import LayerNorm, RMSNorm
from octavo.quant.proto import TensorProto


class NormLinear(FusedOperation):
    op_name = "norm-linear"

    @staticmethod
    def step_forward(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
        first, second = configs
        x = inputs[0].x
        amaxes = Amaxes(*inputs[1].seen)
        like = TensorProto(tuple(x.shape), x.dtype, x.device)
        pair, given = linear.x_buffers(second, inputs[1].scaling, like, amaxes.x)
        mean, rstd = norm_quantize.forward(
            first.norm, norm.matrix(first, x), norm.vector(inputs[0].weight), norm.vector(inputs[0].bias), pair, given
        )
        fresh = norm.Fresh(mean, rstd) if first.keeps else norm.Fresh()
        made = linear.forward_from(second, inputs[1], pair, amaxes, tuple(x.shape[:-1]))
        return [ForwardResult((None,), (), fresh), made]


CONDITIONS = (
    conditions.one_dim(0),
    conditions.quantizes_x(1),
    conditions.keeps_codes_of_x(1),
    conditions.knows_scale_of_x(1),
)
RULES = tuple(Forward(Rule("norm-linear", (kind, Linear), NormLinear, CONDITIONS)) for kind in (LayerNorm, RMSNorm))
