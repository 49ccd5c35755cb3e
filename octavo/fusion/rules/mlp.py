"""Linear, activation, Linear: forward runs as in `octavo.fusion.rules.activation_linear`, but without the column codes
of the activated values. Backward computes those, in the pass that reads the activation's x anyway, so that none are
saved.

    dy -> codes                 da = dy · w2
    da, h -> dh codes, sums of dh for the bias, column codes of a = act(h)
    dw2 = dyᵀ · a               dx = dh · w1            dw1 = dhᵀ · x
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octavo.fusion.rule import Joint, Rule
from octavo.fusion.rules import conditions
from octavo.fusion.rules.activation_bias import Cast, Grads, own_bias
from octavo.fusion.rules.activation_linear import ActivationLinear, conditions_at
from octavo.kernels.column_sums import column_sums
from octavo.kernels.tile_cast import Target
from octavo.ops import activation_layer, linear_layer, matmul
from octavo.ops.activation import Activation
from octavo.ops.linear import Linear
from octavo.quant.proto import TensorProto


class MLP(ActivationLinear):
    """The forward of ActivationLinear, with a backward for all three operations."""

    op_name = "mlp"

    @staticmethod
    def step_backward(
        configs: Sequence[Any], saved: Sequence[Grads], buffers: Sequence[Any], grads: Sequence[Grads], writes: Any
    ) -> list[Grads]:
        first, act, second = configs
        dy = grads[-1][0]
        assert dy is not None
        last = matmul.Backward(second, linear_layer.Saved._make(saved[2]), buffers[2], writes)
        row, column = linear_layer.quantized_dy(last, dy)
        da = linear_layer.input_gradient(last, dy, row)
        again, given = linear_layer.x_column_buffer(last, TensorProto(tuple(da.shape), da.dtype, da.device))
        call = matmul.Backward(first, linear_layer.Saved._make(saved[0]), buffers[0], writes)
        cast = Cast(call, act, saved[1], da, own_bias(first), Target((None, again), given))
        db = None if (dtype := own_bias(second)) is None else column_sums(linear_layer.flat(dy), dtype)
        dw = linear_layer.finish(last, dy, column, again)
        empty = (None,) * len(activation_layer.Inputs._fields)
        return [cast.gradients(cast.bias), empty, linear_layer.gradients(None, dw, db)]


def changed(configs: Sequence[Any]) -> list[Any]:
    first, act, second = configs
    return [first, act, replace(second, x_columns="backward")]


CONDITIONS = (
    *conditions_at(2),
    conditions.wants_gradients(0),
    conditions.quantizes_dy(0),
    conditions.knows_scale_of_dy(0),
    conditions.runs_now(0),
    conditions.runs_now(2),
    conditions.of(2, "dx is wanted", lambda c: "x" in c.grads, "nothing before the second Linear wants a gradient"),
    conditions.of(
        2, "wgrad is quantized", lambda c: "w" not in c.grads or c.kept_x == "column",
        "the second Linear keeps x otherwise than as column codes",
    ),
    conditions.of(1, "h is kept", lambda c: c.keeps_x, "the activation keeps nothing that its value could be made of"),
    conditions.no_scale_gradient(1),
)  # fmt: skip
RULES = (Joint(Rule("mlp", (Linear, Activation, Linear), MLP, CONDITIONS, forward_from=1, changes=changed)),)
