"""activation -> quantize -> Linear or GroupedLinear: the kernel writes the activated values as codes only
(`octavo.kernels.activation.cast`)."""

from collections.abc import Sequence
from typing import Any

from octavo.fusion.rule import Forward, Rule, step
from octavo.fusion.rules import conditions
from octavo.kernels.activation import Inputs as ActInputs
from octavo.kernels.activation import cast
from octavo.kernels.tile_cast import TileCast
from octavo.ops import activation_layer, matmul
from octavo.ops.activation import Activation
from octavo.ops.linear import Linear
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import LAYERS, ForwardResult
from octavo.scaling.delayed_scaling import RunningAmaxes


def forward(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
    (first, second), (own, after), x = configs, inputs, inputs[0].x
    rows = LAYERS[second.registered_name].rows_of(after, x.shape[0])
    amaxes = RunningAmaxes(*after.running_amaxes)
    like = TensorProto(activation_layer.shape_of_y(first, tuple(x.shape)), x.dtype, x.device)
    pair, given = matmul.x_buffers(second, after.scaling, like, rows, amaxes.x)
    found = cast.forward(first.function, kernel_inputs(own), TileCast(pair, given))
    x_amax = found if second.keeps_x_amax else None
    made = matmul.forward_from(second, after, pair, rows, amaxes, tuple(x.shape[:-1]), x_amax)
    return [ForwardResult((None,), (), ()), made]


ACTIVATION_LINEAR = step("activation-linear", forward=forward)


def kernel_inputs(tensors: Any) -> ActInputs:
    """Return an activation's inputs, or its saved tensors, as a kernel takes them: matrices and vectors."""
    x, *vectors = tensors
    vectors = [None if t is None else activation_layer.vector(t) for t in vectors]
    return ActInputs(None if x is None else activation_layer.matrix(x), *vectors)


RULES = (Forward(Rule("activation-linear", (Activation, Linear), ACTIVATION_LINEAR, conditions.x_as_codes(1))),)
