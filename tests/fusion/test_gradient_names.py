"""Gradients by name: a backward returns {name of an input: gradient}, and knows no other inputs of the operation."""

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from octavo.runtime.contract import ForwardResult
from tests.support.custom_operations import Doubled, Legacy, Powered, Take, define, fused, quadruple, stepped
from tests.support.linear_oracle import spiky
from tests.support.sequentials import FFN, H, M, assert_unfused, batch, fill, unfused
from tests.support.steps import assert_equal, compiled, step


def as_it_is(call):
    return call


calls = pytest.mark.parametrize("called", [as_it_is, compiled], ids=["eager", "compiled"])


# -- a Linear and an activation ----------------------------------------------------------------------------------------


def of_linear(dh, x, weight, wants):
    """The gradients of a Linear, by name."""
    found = {}
    if wants.x:
        found["x"] = dh @ weight
    if wants.weight:
        found["weight"] = dh.flatten(0, -2).T @ x.flatten(0, -2)
    if wants.bias:
        found["bias"] = dh.flatten(0, -2).sum(0)
    return found


class LinearRelu(ops.FusedOperation):
    """relu(x wᵀ + bias), both sides."""

    @staticmethod
    def fuser_forward_compute(configs, inputs):
        own = inputs[0]
        return torch.relu(nn.functional.linear(own.x, own.weight, own.bias)), ((), ()), ((), ())

    @staticmethod
    def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
        return (inputs[0].x, inputs[0].weight), (outputs[0],)

    @staticmethod
    def fuser_backward(configs, saved, grads, wants):
        (x, weight), (y,) = saved
        return of_linear(grads[0] * (y > 0), x, weight, wants[0]), {}


class LinearReluBackward(ops.FusedOperation):
    """Backward alone, from what the two operations saved."""

    @staticmethod
    def fuser_backward(configs, saved, grads, wants):
        x, weight, h = saved[0][0], saved[0][3], saved[1][0]
        return of_linear(grads[0] * (h > 0), x, weight, wants[0]), {"bias": None}


SIDES = {"joint": ops.Joint(ops.Rule("linear-relu", (octavo.Linear, ops.ReLU), LinearRelu)),
         "backward": ops.Backward(ops.Rule("linear-relu", (octavo.Linear, ops.ReLU), LinearReluBackward))}  # fmt: skip


def linear_relu(rule, bias=True):
    return fill(octavo.Sequential(octavo.Linear(H, FFN, bias=bias, recipe="bf16"), ops.ReLU(), rules=(rule,)))


@calls
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("side", SIDES)
def test_a_fused_operation_over_a_linear_returns_gradients_by_name(side, bias, called):
    model = linear_relu(SIDES[side], bias)
    x, dy = batch(M, out=FFN)
    assert model.explain(x.clone().requires_grad_()).fired == ("linear-relu",)
    found, want = step(model, x, dy, call=called(model)), step(unfused(model), x, dy)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


@calls
def test_a_name_that_is_left_out_is_no_gradient(called):
    model = linear_relu(SIDES["joint"])
    x, dy = batch(M, out=FFN)
    model[0].weight.requires_grad_(False)
    found, want = step(model, x, dy, call=called(model), frozen=(0,)), step(unfused(model), x, dy, frozen=(0,))
    assert found[1] is None
    assert found[2] is None
    torch.testing.assert_close(found[3], want[3])


@calls
def test_gradients_by_name_and_by_place_are_alike(called):
    def by_place(configs, saved, grads, wants):
        named = LinearRelu.fuser_backward(configs, saved, grads, wants)
        return tuple(tuple(part.get(name) for name in want._fields) for part, want in zip(named, wants, strict=True))

    placed = define({"fuser_backward": staticmethod(by_place)}, LinearRelu, "ByPlace")
    model = linear_relu(SIDES["joint"])
    twin = linear_relu(ops.Joint(ops.Rule("linear-relu", (octavo.Linear, ops.ReLU), placed)))
    x, dy = batch(M, out=FFN)
    assert_equal(step(model, x, dy, call=called(model)), step(twin, x, dy))


def test_one_operation_may_answer_by_name_and_another_by_place():
    mixed = fused("Mixed", backward=lambda configs, saved, grads, wants: ({"x": 4 * grads[0]}, (None,)))
    assert_unfused(quadruple(mixed), *batch(M))


# -- operations --------------------------------------------------------------------------------------------------------


class NamedPower(Powered):
    @staticmethod
    def op_backward(config, saved, dy, wants):
        names = ("x", "gain", "factor")
        return dict(zip(names, Powered.op_backward(config, saved, dy, wants), strict=True))


class NamedTake(Take):
    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        return {"extra0": 5 * grads[0], "x": grads[0].clone()}  # in any order


@calls
def test_an_operation_returns_gradients_by_name(called):
    model, twin = octavo.Sequential(NamedPower(H), NamedTake()), octavo.Sequential(Powered(H), Take())
    inputs, dy = (spiky(M, H), spiky(M, H, seed=3)), spiky(M, H, seed=2)
    assert_equal(step(model, inputs, dy, call=called(model)), step(twin, inputs, dy))


class NamedLegacy(Legacy):
    def op_backward(self, ctx, dy):
        dx, (dgain,) = super().op_backward(ctx, dy)
        return {"gain": dgain, "x": dx}


def test_a_legacy_operation_returns_gradients_by_name():
    x, dy = batch(M)
    assert_equal(step(NamedLegacy(H), x, dy), step(Legacy(H), x, dy))


class Halves(ops.FusedOperation):
    """x / 2 + bias, as a legacy fused operation."""

    @staticmethod
    def fuser_forward(ctxs, inputs):
        return inputs[0].x * 0.5 + inputs[1].bias

    @staticmethod
    def fuser_backward(ctxs, dy):
        return {"x": dy * 0.5}, {"bias": dy.sum(0)}


def test_a_legacy_fused_operation_returns_gradients_by_name():
    rule = ops.Joint(ops.Rule("halves", (ops.ConstantScale, ops.Bias), Halves))
    model = octavo.Sequential(ops.ConstantScale(0.5), ops.Bias(H), rules=(rule,))
    x, dy = batch(M)
    for a, b in zip(step(model, x, dy), step(unfused(model), x, dy), strict=True):
        torch.testing.assert_close(a, b)


def test_a_parameter_named_x_has_its_gradient_by_place():
    class Named(ops.BasicOperation):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.ones(H))

        def op_forward(self, ctx, x):
            return x * self.x

        def op_backward(self, ctx, dy):
            return {"x": dy}

    with pytest.raises(RuntimeError, match=r"Named.op_backward .* two inputs are named 'x'.*Return a tuple"):
        stepped(Named())


class Quadrupled(ops.FusedOperation):
    """4x, as a step."""

    @staticmethod
    def step_forward(configs, inputs):
        return [ForwardResult((None,), (), ()), ForwardResult((4 * inputs[0].x,), (), ())]

    @staticmethod
    def step_backward(configs, saved, buffers, grads, writes):
        return [{"x": 4 * grads[1][0]}, {}]


@calls
def test_a_step_returns_gradients_by_name(called):
    model = octavo.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(2.0), rules=(
        ops.Joint(ops.Rule("quadrupled", (ops.ConstantScale, ops.ConstantScale), Quadrupled)),
    ))  # fmt: skip
    x, dy = batch(M)
    assert_equal(step(model, x, dy, call=called(model)), [4 * x, 4 * dy])


# -- what is wrong -----------------------------------------------------------------------------------------------------


LINEARS = "x, weight, bias, x_codes, w_row, w_column, scaling, running_amaxes, x_column, all_reduced"


@calls
def test_a_name_that_is_no_input_is_refused_with_the_names(called):
    def misnamed(configs, saved, grads, wants):
        return {"x": grads[0] @ saved[0][1], "w": None}, {}

    wrong = define({"fuser_backward": staticmethod(misnamed)}, LinearRelu, "Misnamed")
    model = linear_relu(ops.Joint(ops.Rule("linear-relu", (octavo.Linear, ops.ReLU), wrong)))
    says = rf"Misnamed.fuser_backward returned a gradient of 'w' for operation 0, .* {LINEARS}\."
    with pytest.raises(Exception, match=says):
        stepped(model, called(model))


@calls
def test_a_wanted_gradient_that_is_left_out_is_named(called):
    lacking = define({"fuser_backward": staticmethod(lambda *_: ({}, {}))}, LinearRelu, "Lacking")
    model = linear_relu(ops.Joint(ops.Rule("linear-relu", (octavo.Linear, ops.ReLU), lacking)))
    with pytest.raises(Exception, match=r"Lacking.fuser_backward returned no gradient of 0.x, which is wanted"):
        stepped(model, called(model))


def test_a_tuple_of_another_length_is_told_of_names():
    short = define({"fuser_backward": staticmethod(lambda *_: ((None,) * 8, {}))}, LinearRelu, "Short")
    model = linear_relu(ops.Joint(ops.Rule("linear-relu", (octavo.Linear, ops.ReLU), short)))
    with pytest.raises(
        RuntimeError, match=rf"each of {LINEARS} for operation 0: 10, got 8\. A dict of gradients by name"
    ):
        stepped(model)


MISNAMED = {
    "an operation": (lambda: define({"op_backward": staticmethod(lambda *_: {"y": None})}, Doubled)(), "'y'", "x"),
    "a legacy operation": (
        lambda: define({"op_backward": lambda self, ctx, dy: {"x": dy, "weight": None}}, Legacy)(H), "'weight'",
        "x, gain",
    ),
    "a key that is no name": (lambda: define({"op_backward": staticmethod(lambda *_: {0: None})}, Doubled)(), "0", "x"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISNAMED)
def test_an_operation_that_names_no_input_of_its_own_is_told_them(what):
    make, name, names = MISNAMED[what]
    with pytest.raises(RuntimeError, match=rf"returned a gradient of {name}, .* {names}\."):
        stepped(make())


def test_a_legacy_fused_operation_that_names_no_input_is_told_them():
    wrong = define({"fuser_backward": staticmethod(lambda ctxs, dy: ({"x": dy}, {"weight": dy}))}, Halves, "Wrong")
    rule = ops.Joint(ops.Rule("halves", (ops.ConstantScale, ops.Bias), wrong))
    model = octavo.Sequential(ops.ConstantScale(0.5), ops.Bias(H), rules=(rule,))
    with pytest.raises(RuntimeError, match=r"Wrong.fuser_backward .* 'weight' for operation 1, .* x, bias\."):
        stepped(model)


def test_one_dict_for_all_operations_is_refused():
    model = quadruple(fused("Single", backward=lambda configs, saved, grads, wants: {"x": 4 * grads[0]}))
    with pytest.raises(RuntimeError, match=r"Single.fuser_backward .* an entry for each of 2 operations, got a dict"):
        stepped(model)
