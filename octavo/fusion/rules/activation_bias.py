"""dActivation -> quantize -> the backward of the Linear or GroupedLinear before it: the kernel writes the gradient
between them as codes only, with the sums for the bias gradient (`octavo.kernels.activation.cast`). ConstantScale is an
activation here."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.fusion.rule import Backward, Rule, step
from octavo.fusion.rules import conditions
from octavo.fusion.rules.activation_linear import kernel_inputs
from octavo.kernels.activation import cast
from octavo.kernels.tile_cast import NOTHING, TileCast
from octavo.ops import activation_layer, matmul, operands
from octavo.ops.activation import Activation, Bias, ConstantScale
from octavo.ops.linear import Linear
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QTensor
from octavo.runtime.contract import DTYPES, LAYERS, Tensors


class ActivationGradient:
    """The gradient between an activation and the layer before it, as codes for that layer's backward."""

    def __init__(
        self, call: operands.BackwardCall, act: Any, given: list[Any], bias_grad: torch.dtype | None,
        again: TileCast = NOTHING,
    ) -> None:  # fmt: skip
        """Compute the codes. `call` is the layer's backward. `given` has what the activation saved, and its dy: it is
        emptied, so that a gradient that is written before it is cast finds their memory free."""
        (saved, dy), self.call = given, call
        given.clear()
        self.like = TensorProto(activation_layer.shape_of_dx(act, tuple(dy.shape)), dy.dtype, dy.device)
        dy, inputs = activation_layer.matrix(dy), kernel_inputs(saved)
        del saved
        sums = bias_grad, DTYPES[act.scales_dtype] if act.wants_ds else None
        first, second = call.config.dy_pair
        spec = second if first is None else first
        if spec is not None and cast.writes_dx(act.function, dy, inputs, spec):
            self.sums, dx = cast.value(act.function, dy, inputs, True, call.rows.groups, again, *sums)
            del dy, inputs
            target = TileCast(*matmul.dy_buffers(call, self.like))
            if dx is not None:
                cast.fill(dx, target)
        else:
            target = TileCast(*matmul.dy_buffers(call, self.like))
            self.sums = cast.backward(act.function, dy, inputs, target, again, *sums)
        self.pair = target.pair
        self.of_activation: Tensors = (None, self.sums.scales, None, None)  # gradients of its inputs, but for x

    def gradients(self, db: Tensor | None) -> Tensors:
        """Return the gradients of the layer's inputs."""
        dx = self.input_gradient()
        return self.layer.gradients(dx, self.weight_gradient(), db)

    @property
    def layer(self) -> Any:
        return LAYERS[self.call.config.registered_name]

    def input_gradient(self) -> Tensor | None:
        """Return the gradient of the layer's x, and drop the row codes."""
        row, self.pair = self.pair[0], (None, self.pair[1])
        return matmul.input_gradient(self.call, self.like, row) if self.call.config.wants_dx else None

    def weight_gradient(self, x_column: QTensor | None = None) -> Tensor | None:
        """Return dw, and drop the column codes. `x_column` has x's column codes if forward kept none."""
        column, self.pair = self.pair[1], matmul.NO_CODES
        return matmul.finish(self.call, self.like, column, x_column)


def own_bias(config: Any) -> torch.dtype | None:
    return DTYPES[config.bias_dtype] if config.wants_db else None


def backward(
    configs: Sequence[Any], saved: Sequence[Tensors], buffers: Sequence[Any], grads: Sequence[Tensors], writes: Any
) -> list[Tensors]:
    """Return the gradients of (Linear, activation) or (Linear, Bias, activation), or of a GroupedLinear so."""
    dy = grads[-1][0]
    assert dy is not None
    first, *between, act = configs
    call = LAYERS[first.registered_name].backward_call(first, saved[0], buffers[0], writes, dy.shape[0])
    wanted = own_bias(between[0] if between else first)
    cast = ActivationGradient(call, act, [saved[-1], call.rows.readable(dy)], wanted)
    if not between:
        return [cast.gradients(cast.sums.bias), cast.of_activation]
    return [cast.gradients(None), (None, None, cast.sums.bias, None), cast.of_activation]


ACTIVATION_BIAS = step("activation-bias", backward=backward)


def _conditions(last: int) -> tuple[Any, ...]:
    return *conditions.dy_as_codes(0), conditions.NO_SCALE_GRADIENT.at(last)


_ONE_BIAS = conditions.On("one bias", lambda c: not c.wants_db, "the Linear has a bias of its own besides").at(0)
RULES = (
    Backward(Rule("activation-bias", (Linear, Bias, Activation), ACTIVATION_BIAS, (_ONE_BIAS, *_conditions(2)))),
    Backward(Rule("activation-bias", (Linear, Activation), ACTIVATION_BIAS, _conditions(1))),
    Backward(Rule("linear-scale", (Linear, ConstantScale), ACTIVATION_BIAS, _conditions(1))),
)
