"""GroupedLinear, activation, GroupedLinear: the experts of a mixture.

Where `octavo.kernels.activation.cast` fuses the cast, kernels write the activated values, and in backward their
gradients, as codes only; elsewhere they write the values and then cast them, to the same bits. Backward makes the
column codes of the activated values again, in the pass that reads the activation's x anyway, so that none are saved.
The same pass sums the gradients of row scales, such as the probabilities of a router.

    dy -> codes                 da = dy · w2
    da, h -> dh codes, sums of dh for the bias, gradients of the scales, column codes of a = act(h) · scales
    dx = dh · w1            dw1 = dhᵀ · x               dw2 = dyᵀ · a
"""

from collections.abc import Sequence
from typing import Any

from octavo._torch.operators import assert_async
from octavo.errors import UnsupportedConfig
from octavo.fusion.rule import Backward, Condition, Forward, Joint, Rule, step
from octavo.fusion.rules import activation_bias, activation_linear, conditions, mlp
from octavo.fusion.rules.mlp import columns_in_backward
from octavo.ops.activation import Activation
from octavo.ops.grouped_linear import GroupedLinear
from octavo.ops.operands import Saved
from octavo.runtime.contract import Tensors


def _backward(
    configs: Sequence[Any], saved: list[Tensors], buffers: Sequence[Any], grads: Sequence[Tensors], writes: Any
) -> list[Tensors]:
    refuse_other_sizes(Saved._make(saved[0]).start, Saved._make(saved[2]).start)
    return mlp.backward(configs, saved, buffers, grads, writes)


GROUPED_MLP = step("grouped-mlp", forward=activation_linear.forward, backward=_backward)
ACTIVATION_GROUPED_LINEAR = step("activation-grouped-linear", forward=activation_linear.forward)
GROUPED_LINEAR_ACTIVATION = step("grouped-linear-activation", backward=activation_bias.backward)


def refuse_other_sizes(first: Any, second: Any) -> None:
    """Raise, on the device and without a wait, if the layers were given other sizes: one pass casts for both."""
    if first.shape != second.shape:
        raise UnsupportedConfig(
            f"The GroupedLinear layers of a fused grouped-mlp have {first.shape[0] - 1} and {second.shape[0] - 1} "
            "groups. Build the Sequential with rules=None."
        )
    assert_async(
        (first == second).all(),
        "The GroupedLinear layers of a fused grouped-mlp were given sizes that differ. Give both the same, or "
        "build the Sequential with rules=None.",
    )


# -- conditions --------------------------------------------------------------------------------------------------------


def one_recipe(first: int, second: int) -> Condition:
    return Condition(
        "one recipe", lambda configs: configs[first].recipe == configs[second].recipe,
        "the two grouped layers have different recipes, and one pass casts for both. Give them one recipe",
    )  # fmt: skip


def backward_conditions(place: int) -> tuple[Condition, ...]:
    """Return the conditions on a GroupedLinear whose dy is written as codes."""
    return *conditions.dy_as_codes(place), _NO_SCALED_BIAS.at(place)


_NO_SCALED_BIAS = conditions.On(
    "the bias is not scaled", lambda c: not c.scales_dtype,
    "its bias is scaled row by row, and the gradients of the bias and of its scales need dy itself",
)  # fmt: skip
_NO_OWN_BIAS = conditions.On(
    "no bias of its own", lambda c: not c.bias_dtype, "a bias between them has sums of its own"
).at(1)


MLP_CONDITIONS = (
    *conditions.x_as_codes(2),
    one_recipe(0, 2),
    *backward_conditions(0),
    conditions.RUNS_NOW.at(2),
    conditions.WANTS_DX.at(2, "GroupedLinear"),
    conditions.QUANTIZES_WGRAD.at(2, "a GroupedLinear"),
    conditions.KEEPS_H.at(1),
    _NO_OWN_BIAS,
)
_MLP = Rule(
    "grouped-mlp", (GroupedLinear, Activation, GroupedLinear), GROUPED_MLP, MLP_CONDITIONS, forward_from=1,
    changes=columns_in_backward,
)  # fmt: skip
_AFTER = Rule(
    "activation-grouped-linear", (Activation, GroupedLinear), ACTIVATION_GROUPED_LINEAR, conditions.x_as_codes(1)
)
_BEFORE = Rule(
    "grouped-linear-activation", (GroupedLinear, Activation), GROUPED_LINEAR_ACTIVATION,
    (*backward_conditions(0), _NO_OWN_BIAS),
)  # fmt: skip
RULES = (Joint(_MLP), Forward(_AFTER), Backward(_BEFORE))
