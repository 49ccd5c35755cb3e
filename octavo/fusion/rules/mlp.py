"""Linear, activation, Linear, or the same of GroupedLinear: forward runs as in
`octavo.fusion.rules.activation_linear`, but without the column codes of the activated values. Backward computes those,
in the pass that reads the activation's x anyway, so that none are saved.

    dy -> codes                 da = dy · w2
    da, h -> dh codes, sums of dh for the bias, column codes of a = act(h)
    dx = dh · w1            dw1 = dhᵀ · x               dw2 = dyᵀ · a
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octavo.fusion.rule import Joint, Rule, step
from octavo.fusion.rules import activation_linear, conditions
from octavo.fusion.rules.activation_bias import ActivationGradient, own_bias
from octavo.kernels.tile_cast import TileCast
from octavo.ops import matmul
from octavo.ops.activation import Activation
from octavo.ops.linear import Linear
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import LAYERS, Tensors


def backward(
    configs: Sequence[Any], saved: list[Tensors], buffers: Sequence[Any], grads: Sequence[Tensors], writes: Any
) -> list[Tensors]:
    """Return the gradients of all three operations."""
    first, act, second = configs
    dy = grads[-1][0]
    assert dy is not None
    layer = LAYERS[second.registered_name]
    last = layer.backward_call(second, saved[2], buffers[2], writes, dy.shape[0])
    dy = last.rows.readable(dy)
    row, column = matmul.quantized_dy(last, dy)
    da = matmul.input_gradient(last, dy, row)
    again, given = matmul.x_column_buffer(last, TensorProto(tuple(da.shape), da.dtype, da.device))
    call = layer.backward_call(first, saved[0], buffers[0], writes, dy.shape[0])._replace(rows=last.rows)
    of_act = [saved.pop(1), da]
    del row, da  # before the gradients of weights, as h is
    cast = ActivationGradient(call, act, of_act, own_bias(first), TileCast(again, given))
    db, ds = last.rows.bias_gradients(last, dy)
    of_first = cast.gradients(cast.sums.bias)
    dw = matmul.finish(last, dy, column, again[1])
    return [of_first, cast.of_activation, layer.gradients(None, dw, db, ds)]


MLP = step("mlp", forward=activation_linear.forward, backward=backward)


def columns_in_backward(configs: Sequence[Any]) -> list[Any]:
    """Leave the column codes of the activated values to backward."""
    first, act, second = configs
    return [first, act, replace(second, x_columns="backward")]


CONDITIONS = (
    *conditions.x_as_codes(2),
    *conditions.dy_as_codes(0),
    conditions.RUNS_NOW.at(2),
    conditions.WANTS_DX.at(2, "Linear"),
    conditions.QUANTIZES_WGRAD.at(2, "the second Linear"),
    conditions.KEEPS_H.at(1),
    conditions.NO_SCALE_GRADIENT.at(1),
)
RULES = (
    Joint(Rule("mlp", (Linear, Activation, Linear), MLP, CONDITIONS, forward_from=1, changes=columns_in_backward)),
)
