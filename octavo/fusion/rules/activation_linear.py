"""activation -> quantize -> Linear: the kernel writes the activated values as codes only
(`octavo.kernels.activation.cast`)."""

from collections.abc import Sequence
from typing import Any

from octavo.fusion.rule import Condition, Forward, FusedOperation, Rule
from octavo.fusion.rules import conditions
from octavo.kernels.activation import Inputs as ActInputs
from octavo.kernels.activation import cast
from octavo.kernels.tile_cast import Target
from octavo.ops import activation_layer, linear_layer
from octavo.ops.activation import Activation
from octavo.ops.linear import Linear
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import ForwardResult
from octavo.scaling.cast_arguments import RunningAmaxes


class ActivationLinear(FusedOperation):
    op_name = "activation-linear"

    @staticmethod
    def step_forward(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
        first, second = configs
        own, x = inputs[0], inputs[0].x
        amaxes = RunningAmaxes(*inputs[1].running_amaxes)
        like = TensorProto(activation_layer.shape_of_y(first, tuple(x.shape)), x.dtype, x.device)
        pair, given = linear_layer.x_buffers(second, inputs[1].scaling, like, amaxes.x)
        vectors = (
            activation_layer.vector(own.scales),
            activation_layer.vector(own.bias),
            activation_layer.vector(own.seed),
        )
        operands = ActInputs(activation_layer.matrix(x), *vectors)
        found = cast.forward(first.function, operands, Target(pair, given))
        x_amax = found if second.keeps_x_amax else None
        made = linear_layer.forward_from(second, inputs[1], pair, amaxes, tuple(x.shape[:-1]), x_amax)
        return [ForwardResult((None,), (), ()), made]


def conditions_at(place: int) -> tuple[Condition, ...]:
    """Return the conditions on a Linear at that place of a pattern."""
    return conditions.quantizes_x(place), conditions.keeps_codes_of_x(place), conditions.knows_scale_of_x(place)


RULES = (Forward(Rule("activation-linear", (Activation, Linear), ActivationLinear, conditions_at(1))),)
