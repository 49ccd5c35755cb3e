"""Permute, GroupedLinear, activation, GroupedLinear, Unpermute: the whole of a mixture's experts.

Casts read the rows of their experts from x and from dy (`CastArgs.source`): with one scale or blocks, no row is copied;
other quantizers copy the rows first. Forward keeps x, the output h of the first layer, the probabilities and the
permutation; backward makes column codes of x and of the activated values again. h is kept as it is or, by another rule
of the same name, as FP8 codes (`octavo.ops.coded_activation_layer`), which backward decodes before the activation's
pass.

    forward     x -> codes by expert      h = x · w1ᵀ      h -> codes of a = act(h)      y = Σ p · (a · w2ᵀ)
    backward    dy -> codes by expert     g = dy · w2
                g, h, p -> codes of dh = p · g · act'(h), d(p) = ⟨g, a⟩, column codes of p · a
                dx = Σ dh · w1       dw1 = dhᵀ · x       dw2 = dyᵀ · (p · a)

The gradients of weights, which are more than all else, come last, and that with the smaller operands at the very end:
whatever is done with is freed before, h too.

The probabilities enter backward at the activation rather than at dy. Gradients are those of the operations one by one,
up to the rounding of codes: there, p · dy is quantized, here dy. Delayed scaling therefore remembers the amaxes of dy
only from here (`scales_dy_alone`), and measures dy in the first step that is fused.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from octavo._torch.operators import unsafe_view
from octavo.fusion.rule import Joint, Rule, step
from octavo.fusion.rules import activation_linear, conditions
from octavo.fusion.rules.activation_bias import ActivationGradient, own_bias
from octavo.fusion.rules.grouped_mlp import (
    backward_conditions,
    one_recipe,
)
from octavo.kernels import permute as moves
from octavo.kernels.permute import Assignments
from octavo.kernels.tile_cast import TileCast
from octavo.ops import (
    activation_layer,
    coded_activation_layer,
    grouped_linear_layer,
    matmul,
    permute_layer,
    unpermute_layer,
)
from octavo.ops.activation import Activation
from octavo.ops.grouped_linear import GroupedLinear
from octavo.ops.operands import BackwardCall
from octavo.ops.permute import Permute, Unpermute
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QTensor
from octavo.runtime.contract import DTYPE_NAMES, LAYERS, ForwardResult, Tensors
from octavo.scaling.delayed_scaling import RunningAmaxes


def _forward(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
    _, first, act, second, _ = configs
    moved, own, last = inputs[0], inputs[1], inputs[4]
    rows = grouped_linear_layer.layer.rows_of(own, moved.assignments.shape[0])
    amaxes = RunningAmaxes(*own.running_amaxes)
    x, source = activation_layer.matrix(moved.x), moves.tokens(moved.assignments, moved.positions)
    codes = matmul.quantized(first, own, first.x_cast, x, rows, amaxes.x, source)
    up = matmul.forward_from(first, own, codes, rows, amaxes)
    del codes  # before there is a second
    h = up.outputs[0]
    activated, down = activation_linear.forward((act, second), (inputs[2]._replace(x=h), inputs[3]))
    activated = activated._replace(intermediates=LAYERS[act.registered_name].intermediates(act, h))
    y = moves.combine(down.outputs[0], unpermute_layer.assignments_of(last), activation_layer.matrix(last.probs))
    y = unsafe_view(y, (*last.positions.shape[:-1], y.shape[1]))
    nothing = ForwardResult((None,), (), ())
    return [nothing, up, activated, down._replace(outputs=(None,)), ForwardResult((y,), (), ())]


def _backward(
    configs: Sequence[Any], saved: list[Tensors], buffers: Sequence[Any], grads: Sequence[Tensors], writes: Any
) -> list[Tensors]:
    _, first, act, second, back = configs
    moved, kept = permute_layer.Saved._make(saved[0]), unpermute_layer.Saved._make(saved[4])
    dy, assignments = grads[-1][0], kept.assignments
    assert dy is not None and assignments is not None and kept.positions is not None and kept.probs is not None
    dy, of_token = activation_layer.matrix(dy).contiguous(), unpermute_layer.assignments_of(kept)
    probs, source = activation_layer.matrix(kept.probs), moves.tokens(assignments, kept.positions)
    layer, count = grouped_linear_layer.layer, assignments.shape[0]
    last = layer.backward_call(second, saved[3], buffers[3], writes, count)
    call = layer.backward_call(first, saved[1], buffers[1], writes, count)._replace(rows=last.rows)
    like = TensorProto((count, dy.shape[1]), dy.dtype, dy.device)
    row, column = matmul.quantized_dy(last, dy, source)
    g = matmul.input_gradient(last, like, row)
    again, given = matmul.x_column_buffer(last, TensorProto.of(g))
    del row
    scaled = LAYERS[act.registered_name].restored(act, saved[2], g.dtype)
    saved.clear()
    scaled = scaled._replace(scales=moves.take(probs, of_token, assignments))
    act = _scaled(act, DTYPE_NAMES[probs.dtype], back.wants_dprobs)
    of_act = [scaled, g]
    del g, scaled
    cast = ActivationGradient(call, act, of_act, own_bias(first), TileCast(again, given))
    dx = cast.input_gradient()
    if dx is not None:
        dx = moves.combine(dx, Assignments(of_token.positions), None)
        dx = unsafe_view(dx, (*kept.positions.shape[:-1], dx.shape[1]))
    dw1 = cast.weight_gradient(_x_columns(call, moved.x, source))
    dw2 = matmul.finish(last, like, column, again[1])
    dprobs = None
    if cast.sums.scales is not None:
        dprobs = unsafe_view(
            moves.take_backward(cast.sums.scales, of_token, tuple(probs.shape)), tuple(kept.probs.shape)
        )
    empty = (None,) * len(activation_layer.Inputs._fields)
    return [
        (dx, None, None), layer.gradients(None, dw1, cast.sums.bias), empty, layer.gradients(None, dw2, None),
        (None, None, None, dprobs, None),
    ]  # fmt: skip


EXPERTS = step("experts", forward=_forward, backward=_backward)


@lru_cache(maxsize=256)
def _scaled(act: activation_layer.Config, dtype: str, wanted: bool) -> activation_layer.Config:
    """Return the activation's config with row scales, and whether their gradient is wanted."""
    return replace(act, scales_dtype=dtype, wants_dx=True, wants_ds=wanted, wants_db=False)


CONDITIONS = (
    *conditions.x_as_codes(1),
    *conditions.x_as_codes(3),
    one_recipe(1, 3),
    *backward_conditions(1),
    conditions.WANTS_GRADIENTS.at(3),
    conditions.QUANTIZES_DY.at(3),
    conditions.RUNS_NOW.at(3),
    conditions.WANTS_DX.at(3, "layer"),
    conditions.QUANTIZES_WGRAD.at(1, "a GroupedLinear"),
    conditions.QUANTIZES_WGRAD.at(3, "a GroupedLinear"),
    conditions.On(
        "no second bias", lambda c: not c.bias_dtype,
        "the second layer has a bias, and the gradient of a probability is then more than a sum over activated values",
    ).at(3),
    conditions.On(
        "the activation is plain", lambda c: c.keeps_x and not c.bias_dtype and not c.scales_dtype,
        "the activation has a bias or scales of its own, or keeps nothing that its value could be made of",
    ).at(2),
)  # fmt: skip


def _x_columns(call: BackwardCall, x: Tensor | None, source: Tensor) -> QTensor | None:
    """Make x's column codes again for the first layer's dw, if that is wanted; a caller that named them would hold
    them longer."""
    if not call.config.wants_dw:
        return None
    assert x is not None
    return matmul.x_columns_again(call, activation_layer.matrix(x), source)


def _changed(configs: Sequence[Any]) -> list[Any]:
    """Keep x instead of its codes, and no row of y."""
    move, first, act, second, back = configs
    return [
        replace(move, keeps_x=first.wants_dw),
        replace(first, x_columns="backward"),
        act,
        replace(second, x_columns="backward", scales_dy_alone=False),
        replace(back, keeps_rows=False),
    ]


def _changed_with_codes_of_h(configs: Sequence[Any]) -> list[Any]:
    """Keep codes of h instead of h, besides."""
    move, first, act, second, back = _changed(configs)
    return [move, first, coded_activation_layer.Config.of(act), second, back]


PATTERN = (Permute, GroupedLinear, Activation, GroupedLinear, Unpermute)
# by the form in which h is kept; given to `octavo.moe.Experts` alone: both ends of it must have one permutation
RULES = {
    storage: (Joint(Rule("experts", PATTERN, EXPERTS, CONDITIONS, changes=changes)),)
    for storage, changes in (("unquantized", _changed), ("fp8", _changed_with_codes_of_h))
}
