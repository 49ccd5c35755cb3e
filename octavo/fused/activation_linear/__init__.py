"""activation -> quantize -> Linear: the activated values reach memory as codes alone
(`octavo.kernels.activation_quantize`)."""

from collections.abc import Sequence
from typing import Any

from octavo.fused import conditions
from octavo.fuser.pattern import Condition, Rule
from octavo.kernels import activation_quantize
from octavo.kernels.activation import Inputs as ActInputs
from octavo.kernels.tile_cast import Target
from octavo.layers import activation, linear
from octavo.layers.contract import Made
from octavo.modules.activation import Activation
from octavo.modules.linear import Linear
from octavo.quant.proto import TensorProto

NAME = "activation-linear"


def forward(configs: Sequence[Any], inputs: Sequence[Any]) -> list[Made]:
    first, second = configs
    own, x = inputs[0], inputs[0].x
    amaxes = linear.observed(second, inputs[1])
    like = TensorProto(activation.shape_of_y(first, tuple(x.shape)), x.dtype, x.device)
    pair, given = linear.fill_x(second, inputs[1].scaling, like, True, amaxes.x)
    vectors = activation.vector(own.scales), activation.vector(own.bias), activation.vector(own.seed)
    activation_quantize.forward(first.function, ActInputs(activation.matrix(x), *vectors), Target(pair, given))
    made = linear.forward_from(second, inputs[1], pair, amaxes, tuple(x.shape[:-1]))
    return [Made((None,), (), ()), made]


backward = None


def conditions_at(place: int) -> tuple[Condition, ...]:
    """For a Linear at that place of a pattern."""
    return conditions.quantizes_x(place), conditions.keeps_codes_of_x(place), conditions.knows_scale_of_x(place)


RULES = (Rule(NAME, (Activation, Linear), NAME, conditions_at(1)),)
SIDE = "forward"
