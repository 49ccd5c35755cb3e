"""activation -> quantize -> Linear: the kernel writes the activated values as codes only
(`octavo.kernels.activation_quantize`)."""

from collections.abc import Sequence
from typing import Any

from octavo.delayed_scaling.casts import Amaxes
from octavo.fused import conditions
from octavo.fuser.pattern import Condition, Forward, FusedOperation, Rule
from octavo.kernels import activation_quantize
from octavo.kernels.activation import Inputs as ActInputs
from octavo.kernels.tile_cast import Target
from octavo.layers import activation, linear
from octavo.layers.contract import ForwardResult
from octavo.modules.activation import Activation
from octavo.modules.linear import Linear
from octavo.quant.proto import TensorProto


class ActivationLinear(FusedOperation):
    op_name = "activation-linear"

    @staticmethod
    def step_forward(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
        first, second = configs
        own, x = inputs[0], inputs[0].x
        amaxes = Amaxes(*inputs[1].seen)
        like = TensorProto(activation.shape_of_y(first, tuple(x.shape)), x.dtype, x.device)
        pair, given = linear.x_buffers(second, inputs[1].scaling, like, amaxes.x)
        vectors = activation.vector(own.scales), activation.vector(own.bias), activation.vector(own.seed)
        operands = ActInputs(activation.matrix(x), *vectors)
        found = activation_quantize.forward(first.function, operands, Target(pair, given))
        x_amax = found if second.keeps_x_amax else None
        made = linear.forward_from(second, inputs[1], pair, amaxes, tuple(x.shape[:-1]), x_amax)
        return [ForwardResult((None,), (), ()), made]


def conditions_at(place: int) -> tuple[Condition, ...]:
    """Return the conditions on a Linear at that place of a pattern."""
    return conditions.quantizes_x(place), conditions.keeps_codes_of_x(place), conditions.knows_scale_of_x(place)


RULES = (Forward(Rule("activation-linear", (Activation, Linear), ActivationLinear, conditions_at(1))),)
