"""norm -> quantize -> Linear: the kernel writes the normalised rows as codes only (`octavo.kernels.norm_quantize`)."""

from collections.abc import Sequence
from typing import Any

from octavo.delayed_scaling.casts import Amaxes
from octavo.fused import conditions
from octavo.fuser.pattern import Condition, Forward, FusedOperation, Rule
from octavo.kernels import norm_quantize
from octavo.kernels.norm import Residual
from octavo.layers import linear, norm
from octavo.layers.contract import ForwardResult
from octavo.modules.linear import Linear
from octavo.modules.norm import LayerNorm, RMSNorm
from octavo.quant.proto import TensorProto


class NormLinear(FusedOperation):
    op_name = "norm-linear"

    @staticmethod
    def step_forward(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
        return run(configs, inputs)


def run(configs: Sequence[Any], inputs: Sequence[Any], residual: Residual | None = None) -> list[ForwardResult]:
    """Run a norm and a Linear. `residual` is added to the norm's x first."""
    (first, second), x = configs, inputs[0].x
    amaxes = Amaxes(*inputs[1].seen)
    like = TensorProto(tuple(x.shape), x.dtype, x.device)
    pair, given = linear.x_buffers(second, inputs[1].scaling, like, amaxes.x)
    vectors = norm.vector(inputs[0].weight), norm.vector(inputs[0].bias)
    mean, rstd = norm_quantize.forward(first.norm, norm.matrix(first, x), *vectors, pair, given, residual)
    fresh = norm.Fresh(mean, rstd) if first.keeps else norm.Fresh()
    made = linear.forward_from(second, inputs[1], pair, amaxes, tuple(x.shape[:-1]))
    return [ForwardResult((None,), (), fresh), made]


NORMS = (LayerNorm, RMSNorm)


def conditions_at(place: int) -> tuple[Condition, ...]:
    """Return the conditions on a norm at that place of a pattern and the Linear after it."""
    return (
        conditions.one_dim(place), conditions.quantizes_x(place + 1), conditions.keeps_codes_of_x(place + 1),
        conditions.knows_scale_of_x(place + 1),
    )  # fmt: skip


RULES = tuple(Forward(Rule("norm-linear", (kind, Linear), NormLinear, conditions_at(0))) for kind in NORMS)
