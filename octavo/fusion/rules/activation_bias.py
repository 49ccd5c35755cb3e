"""dActivation -> quantize -> the backward of the Linear before it: the kernel writes the gradient between them as codes
only, with the sums for the bias gradient (`octavo.kernels.activation.cast`). ConstantScale is an activation
here."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.fusion.rule import Backward, FusedOperation, Rule
from octavo.fusion.rules import conditions
from octavo.kernels.activation import Inputs as ActInputs
from octavo.kernels.activation import cast as activation_cast
from octavo.kernels.tile_cast import NOTHING, Target
from octavo.ops import activation_layer, linear_layer, matmul
from octavo.ops.activation import Activation, Bias, ConstantScale
from octavo.ops.linear import Linear
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import DTYPES

Grads = tuple[Tensor | None, ...]


class Cast:
    """The gradient between an activation and the Linear before it, as codes for that Linear's backward."""

    def __init__(
        self, call: matmul.Backward, act: Any, saved: Grads, dy: Tensor, bias_grad: torch.dtype | None,
        again: Target = NOTHING,
    ) -> None:  # fmt: skip
        """Compute the codes. `call` is the Linear's backward; `saved` and dy belong to the activation."""
        x, scales, bias, seed = activation_layer.Saved._make(saved)
        self.call = call
        shape = activation_layer.shape_of_dx(act, tuple(dy.shape))
        self.like = TensorProto(shape, dy.dtype, dy.device)
        self.pair, given = linear_layer.dy_buffers(call, self.like)
        vectors = activation_layer.vector(scales), activation_layer.vector(bias), activation_layer.vector(seed)
        values = None if x is None else activation_layer.matrix(x)
        self.bias: Tensor | None = activation_cast.backward(
            act.function, activation_layer.matrix(dy), ActInputs(values, *vectors), Target(self.pair, given), again,
            bias_grad,
        ).bias  # fmt: skip

    def gradients(self, db: Tensor | None) -> Grads:
        """Return the gradients of the Linear's inputs."""
        call = self.call
        dx = linear_layer.input_gradient(call, self.like, self.pair[0]) if "x" in call.config.grads else None
        dw = linear_layer.finish(call, self.like, self.pair[1])
        return linear_layer.gradients(dx, dw, db)


def own_bias(config: Any) -> torch.dtype | None:
    return DTYPES[config.bias_dtype] if "b" in config.grads else None


class ActivationBias(FusedOperation):
    op_name = "activation-bias"

    @staticmethod
    def step_backward(
        configs: Sequence[Any], saved: Sequence[Grads], buffers: Sequence[Any], grads: Sequence[Grads], writes: Any
    ) -> list[Grads]:
        """Return the gradients of (Linear, activation) or (Linear, Bias, activation)."""
        dy = grads[-1][0]
        assert dy is not None
        first, act = configs[0], configs[-1]
        between = configs[1] if len(configs) == 3 else None
        wanted = own_bias(first) if between is None else own_bias(between)
        call = matmul.Backward(first, linear_layer.Saved._make(saved[0]), buffers[0], writes)
        cast = Cast(call, act, saved[-1], dy, wanted)
        empty = (None,) * len(activation_layer.Inputs._fields)
        if between is None:
            return [cast.gradients(cast.bias), empty]
        return [cast.gradients(None), (None, None, cast.bias, None), empty]


def _conditions(last: int) -> tuple[Any, ...]:
    return (
        conditions.wants_gradients(0), conditions.quantizes_dy(0), conditions.knows_scale_of_dy(0),
        conditions.runs_now(0), conditions.no_scale_gradient(last),
    )  # fmt: skip


def _no_own_bias() -> Any:
    return conditions.of(0, "one bias", lambda c: "b" not in c.grads, "the Linear has a bias of its own besides")


RULES = (
    Backward(Rule("activation-bias", (Linear, Bias, Activation), ActivationBias, (_no_own_bias(), *_conditions(2)))),
    Backward(Rule("activation-bias", (Linear, Activation), ActivationBias, _conditions(1))),
    Backward(Rule("linear-scale", (Linear, ConstantScale), ActivationBias, _conditions(1))),
)
