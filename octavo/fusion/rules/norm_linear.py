"""norm -> quantize -> Linear: the kernel writes the normalised rows as codes only (`octavo.kernels.norm.cast`)."""

from collections.abc import Sequence
from typing import Any

from octavo.fusion.rule import Condition, Forward, Rule, step
from octavo.fusion.rules import conditions
from octavo.kernels.norm import Residual, cast
from octavo.ops import matmul, norm_layer
from octavo.ops.linear import Linear
from octavo.ops.norm import LayerNorm, RMSNorm
from octavo.ops.operands import DENSE
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import ForwardResult
from octavo.scaling.delayed_scaling import RunningAmaxes


def run(configs: Sequence[Any], inputs: Sequence[Any], residual: Residual | None = None) -> list[ForwardResult]:
    """Run a norm and a Linear. `residual` is added to the norm's x first."""
    (first, second), x = configs, inputs[0].x
    amaxes = RunningAmaxes(*inputs[1].running_amaxes)
    like = TensorProto(tuple(x.shape), x.dtype, x.device)
    pair, given = matmul.x_buffers(second, inputs[1].scaling, like, DENSE, amaxes.x)
    vectors = norm_layer.vector(inputs[0].weight), norm_layer.vector(inputs[0].bias)
    mean, rstd = cast.forward(first.norm, norm_layer.matrix(first, x), *vectors, pair, given, residual)
    intermediates = norm_layer.Intermediates(mean, rstd) if first.keeps else norm_layer.Intermediates()
    made = matmul.forward_from(second, inputs[1], pair, DENSE, amaxes, tuple(x.shape[:-1]))
    return [ForwardResult((None,), (), intermediates), made]


NORM_LINEAR = step("norm-linear", forward=run)
NORMS = (LayerNorm, RMSNorm)


def conditions_at(place: int) -> tuple[Condition, ...]:
    """Return the conditions on a norm at that place of a pattern and the Linear after it."""
    return conditions.ONE_DIM.at(place), *conditions.x_as_codes(place + 1)


RULES = tuple(Forward(Rule("norm-linear", (kind, Linear), NORM_LINEAR, conditions_at(0))) for kind in NORMS)
