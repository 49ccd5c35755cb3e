"""Linear with its epilogue, in one step: the GEMM adds the bias, and a residual is added in place.

linear-bias               y = x · wᵀ + b                in the GEMM: rounded once
linear-bias-activation    y = act(x · wᵀ + b)           the bias in the GEMM
linear-bias-add           y += residual                 in y's own memory
linear-scale-add          y = scale · y + residual      one pass: rounded once
"""

from collections.abc import Sequence
from typing import Any

import torch

from octavo.fusion.rule import Forward, Rule, step
from octavo.fusion.rules import conditions
from octavo.ops import activation_layer, linear_layer
from octavo.ops.activation import Activation, Bias, ConstantScale
from octavo.ops.linear import Linear
from octavo.ops.views import AddExtraInput
from octavo.runtime.contract import ForwardResult

EMPTY = ForwardResult((None,), (), ())


def _run(configs: Sequence[Any], inputs: Sequence[Any]) -> tuple[ForwardResult, Any]:
    """Return the Linear's result without y; and y, with the bias of the next stage added if that is a Bias."""
    bias = getattr(inputs[1], "bias", None)
    given = inputs[0] if bias is None else inputs[0]._replace(bias=bias)
    made = linear_layer.layer.forward(configs[0], given)
    return made._replace(outputs=(None,)), made.outputs[0]


def _linear_bias(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
    own, y = _run(configs, inputs)
    return [own, ForwardResult((y,), (), ())]


LINEAR_BIAS = step("linear-bias", forward=_linear_bias)


def _bias_activation(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
    own, h = _linear_bias(configs, inputs)
    last = activation_layer.layer.forward(configs[2], inputs[2]._replace(x=h.outputs[0]))
    return [own, h, last]


BIAS_ACTIVATION = step("linear-bias-activation", forward=_bias_activation)


def _bias_add(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
    """Run the forward of (Linear, AddExtraInput) or (Linear, Bias, AddExtraInput)."""
    own, y = _run(configs, inputs)
    y.add_(inputs[-1].extra)
    return [own, *[EMPTY] * (len(configs) - 2), ForwardResult((y,), (), ())]


BIAS_ADD = step("linear-bias-add", forward=_bias_add)


def _scale_add(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
    own, y = _run(configs, inputs)
    torch.add(inputs[2].extra, y, alpha=configs[1].function.alpha, out=y)
    return [own, EMPTY, ForwardResult((y,), (), ())]


SCALE_ADD = step("linear-scale-add", forward=_scale_add)


_ONE_BIAS = conditions.On("one bias", lambda c: c.bias_dtype == "", "the Linear has a bias of its own already").at(0)
_PLAIN_Y = conditions.On("y is not quantized", lambda c: not c.quantize_output, "the Linear returns codes").at(0)

RULES = (
    Forward(Rule("linear-bias-activation", (Linear, Bias, Activation), BIAS_ACTIVATION, (_ONE_BIAS,))),
    Forward(Rule("linear-bias-add", (Linear, Bias, AddExtraInput), BIAS_ADD, (_ONE_BIAS,))),
    Forward(Rule("linear-scale-add", (Linear, ConstantScale, AddExtraInput), SCALE_ADD, (_PLAIN_Y,))),
    Forward(Rule("linear-bias", (Linear, Bias), LINEAR_BIAS, (_ONE_BIAS,))),
    Forward(Rule("linear-bias-add", (Linear, AddExtraInput), BIAS_ADD, (_PLAIN_Y,))),
)
