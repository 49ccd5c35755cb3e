"""AddExtraInput -> (MakeExtraOutput ->) norm -> quantize -> Linear: the norm's kernel adds the extra input, and writes
the sum z in the pass that measures its rows (`octavo.kernels.norm.Residual`)."""

from collections.abc import Sequence
from typing import Any

import torch

from octavo.fusion.rule import Forward, Rule, step
from octavo.fusion.rules import conditions, norm_linear
from octavo.kernels.norm import Residual
from octavo.ops import add_layer, norm_layer
from octavo.ops.linear import Linear
from octavo.ops.views import AddExtraInput, MakeExtraOutput
from octavo.runtime.contract import ForwardResult


def _forward(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
    """Run the forward of (AddExtraInput, norm, Linear), or of the same with a MakeExtraOutput before the norm."""
    x, extra = inputs[0]
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    residual = None
    if extra.shape == x.shape and extra.is_contiguous() and x.is_contiguous():
        residual = Residual(norm_layer.matrix(configs[-2], extra), norm_layer.matrix(configs[-2], z))
    else:
        x = torch.add(x, extra, out=z)
    last = norm_linear.run(configs[-2:], (inputs[-2]._replace(x=x), inputs[-1]), residual)
    forks = [ForwardResult((z, z), (), ())] * (len(configs) - 3)
    return [ForwardResult((z,), (), ()), *forks, *last]


ADD_NORM_LINEAR = step("add-norm-linear", forward=_forward)


_ONE_DTYPE = conditions.On("one dtype", add_layer.same, "the extra input has another dtype than x").at(0)


def _rule(*between: type[MakeExtraOutput], kind: Any) -> Rule:
    pattern = (AddExtraInput, *between, kind, Linear)
    needs = (_ONE_DTYPE, *norm_linear.conditions_at(len(pattern) - 2))
    return Forward(Rule("add-norm-linear", pattern, ADD_NORM_LINEAR, needs))


RULES = (
    *[_rule(MakeExtraOutput, kind=kind) for kind in norm_linear.NORMS],
    *[_rule(kind=kind) for kind in norm_linear.NORMS],
)
