"""GroupedLinear, activation, GroupedLinear: the experts of a mixture.

Where `octavo.kernels.activation.cast` fuses the cast, kernels write the activated values, and in backward their
gradients, as codes only; elsewhere they write the values and then cast them, to the same bits. Backward makes the
column codes of the activated values again, in the pass that reads the activation's x anyway, so that none are saved.
The same pass sums the gradients of row scales, such as the probabilities of a router.

    dy -> codes                 da = dy · w2
    da, h -> dh codes, sums of dh for the bias, gradients of the scales, column codes of a = act(h) · scales
    dw2 = dyᵀ · a               dx = dh · w1            dw1 = dhᵀ · x
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from octavo._torch.operators import assert_async
from octavo.errors import UnsupportedConfig
from octavo.fusion.rule import Backward, Condition, Forward, FusedOperation, Joint, Rule
from octavo.fusion.rules import conditions
from octavo.fusion.rules.activation_bias import own_bias
from octavo.fusion.rules.activation_linear import conditions_at
from octavo.kernels.activation import Inputs as ActInputs
from octavo.kernels.activation import cast as activation_cast
from octavo.kernels.tile_cast import NOTHING, Target
from octavo.ops import activation_layer, grouped_linear_layer, matmul
from octavo.ops.activation import Activation
from octavo.ops.grouped_linear import GroupedLinear
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import Groups, split
from octavo.quant.proto import TensorProto
from octavo.quant.quantizer import CastArgs
from octavo.runtime.contract import DTYPES, ForwardResult
from octavo.scaling.cast_arguments import RunningAmaxes

Grads = tuple[Tensor | None, ...]
GroupedPair = tuple[GroupedTensor | None, GroupedTensor | None]


def target(pair: GroupedPair, cast_args: CastArgs) -> Target:
    """The codes that a kernel fills."""
    row, column = (None if t is None else t.q for t in pair)
    return Target((row, column), cast_args)


class ActivationGroupedLinear(FusedOperation):
    op_name = "activation-grouped-linear"

    @staticmethod
    def step_forward(configs: Sequence[Any], inputs: Sequence[Any]) -> list[ForwardResult]:
        act, second = configs
        own, x, after = inputs[0], inputs[0].x, inputs[1]
        groups = split(after.splits, x.shape[0])
        amaxes = RunningAmaxes(*after.running_amaxes)
        like = TensorProto(activation_layer.shape_of_y(act, tuple(x.shape)), x.dtype, x.device)
        pair, given = grouped_linear_layer.x_buffers(second, after.scaling, like, groups, amaxes.x)
        vectors = (
            activation_layer.vector(own.scales),
            activation_layer.vector(own.bias),
            activation_layer.vector(own.seed),
        )
        activation_cast.forward(act.function, ActInputs(x, *vectors), target(pair, given))
        made = grouped_linear_layer.forward_from(second, after, pair, groups, amaxes)
        return [ForwardResult((None,), (), ()), made]


class ActivationGradient:
    """The gradient between an activation and the GroupedLinear before it, as codes for that layer's backward."""

    def __init__(
        self, call: matmul.Backward, act: Any, saved: Grads, dy: Tensor, groups: Groups, again: Target = NOTHING
    ) -> None:
        """Compute the codes. `call` is the layer's backward; `saved` and dy belong to the activation."""
        x, scales, bias, seed = activation_layer.Saved._make(saved)
        self.call, self.groups = call, groups
        self.like = TensorProto(activation_layer.shape_of_dx(act, tuple(dy.shape)), dy.dtype, dy.device)
        self.pair, given = grouped_linear_layer.dy_buffers(call, self.like, groups)
        vectors = activation_layer.vector(scales), activation_layer.vector(bias), activation_layer.vector(seed)
        wanted = own_bias(call.config), DTYPES[act.scales_dtype] if "s" in act.grads else None
        self.sums = activation_cast.backward(
            act.function, dy, ActInputs(x, *vectors), target(self.pair, given), again, *wanted
        )

    def gradients(self, x_column: GroupedTensor | None = None) -> Grads:
        """Return the gradients of the layer's inputs. `x_column` has x's column codes if forward kept none."""
        call = self.call
        dx = None
        if "x" in call.config.grads:
            dx = grouped_linear_layer.input_gradient(call, self.like, self.pair[0], self.groups)
        dw = grouped_linear_layer.finish(call, self.like, self.pair[1], self.groups, x_column)
        return grouped_linear_layer.gradients(dx, dw, self.sums.bias, None)

    def activation_gradients(self) -> Grads:
        """Return the gradients of the activation's inputs, but for x."""
        return None, self.sums.scales, None, None


class GroupedLinearActivation(FusedOperation):
    op_name = "grouped-linear-activation"

    @staticmethod
    def step_backward(
        configs: Sequence[Any], saved: Sequence[Grads], buffers: Sequence[Any], grads: Sequence[Grads], writes: Any
    ) -> list[Grads]:
        dy = grads[-1][0]
        assert dy is not None
        call = matmul.Backward(configs[0], grouped_linear_layer.Saved._make(saved[0]), buffers[0], writes)
        groups = call.kept.groups(dy.shape[0])
        cast = ActivationGradient(call, configs[1], saved[1], dy.contiguous(), groups)
        return [cast.gradients(), cast.activation_gradients()]


class GroupedMLP(ActivationGroupedLinear):
    """The forward of ActivationGroupedLinear, with a backward for all three operations."""

    op_name = "grouped-mlp"

    @staticmethod
    def step_backward(
        configs: Sequence[Any], saved: Sequence[Grads], buffers: Sequence[Any], grads: Sequence[Grads], writes: Any
    ) -> list[Grads]:
        first, act, second = configs
        dy = grads[-1][0]
        assert dy is not None
        dy = dy.contiguous()
        last = matmul.Backward(second, grouped_linear_layer.Saved._make(saved[2]), buffers[2], writes)
        call = matmul.Backward(first, grouped_linear_layer.Saved._make(saved[0]), buffers[0], writes)
        groups = last.kept.groups(dy.shape[0])
        refuse_other_sizes(call.kept.start, groups.start)
        row, column = grouped_linear_layer.quantized_dy(last, dy, groups)
        da = grouped_linear_layer.input_gradient(last, dy, row, groups)
        again, given = grouped_linear_layer.x_column_buffer(last, TensorProto.of(da), groups)
        cast = ActivationGradient(call, act, saved[1], da, groups, target((None, again), given))
        db, ds = grouped_linear_layer.bias_gradients(last, dy, groups)
        dw = grouped_linear_layer.finish(last, dy, column, groups, again)
        return [cast.gradients(), cast.activation_gradients(), grouped_linear_layer.gradients(None, dw, db, ds)]


def refuse_other_sizes(first: Tensor, second: Tensor) -> None:
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
    return (
        conditions.wants_gradients(place), conditions.quantizes_dy(place), conditions.knows_scale_of_dy(place),
        conditions.runs_now(place), no_scaled_bias(place),
    )  # fmt: skip


def no_scaled_bias(place: int) -> Condition:
    return conditions.of(
        place, "the bias is not scaled", lambda c: not c.scales_dtype,
        "its bias is scaled row by row, and the gradients of the bias and of its scales need dy itself",
    )  # fmt: skip


def quantized_wgrad(place: int) -> Condition:
    return conditions.of(
        place, "wgrad is quantized", lambda c: "w" not in c.grads or c.kept_x == "column",
        "a GroupedLinear keeps x otherwise than as column codes",
    )  # fmt: skip


def no_own_bias(place: int) -> Condition:
    return conditions.of(
        place, "no bias of its own", lambda c: not c.bias_dtype, "a bias between them has sums of its own"
    )


MLP_CONDITIONS = (
    *conditions_at(2),
    one_recipe(0, 2),
    *backward_conditions(0),
    conditions.runs_now(2),
    conditions.of(
        2, "dx is wanted", lambda c: "x" in c.grads, "nothing before the second GroupedLinear wants a gradient"
    ),
    quantized_wgrad(2),
    conditions.of(1, "h is kept", lambda c: c.keeps_x, "the activation keeps nothing that its value could be made of"),
    no_own_bias(1),
)


def columns_in_backward(configs: Sequence[Any]) -> list[Any]:
    first, act, second = configs
    return [first, act, replace(second, x_columns="backward")]


_MLP = Rule(
    "grouped-mlp", (GroupedLinear, Activation, GroupedLinear), GroupedMLP, MLP_CONDITIONS, forward_from=1,
    changes=columns_in_backward,
)  # fmt: skip
_AFTER = Rule("activation-grouped-linear", (Activation, GroupedLinear), ActivationGroupedLinear, conditions_at(1))
_BEFORE = Rule(
    "grouped-linear-activation", (GroupedLinear, Activation), GroupedLinearActivation,
    (*backward_conditions(0), no_own_bias(1)),
)  # fmt: skip
RULES = (Joint(_MLP), Forward(_AFTER), Backward(_BEFORE))
