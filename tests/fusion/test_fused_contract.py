"""Fused operations that break their contract: refused when a run is planned, or an error that names the function."""

import copy

import pytest
import torch

import octavo
from octavo import ops
from octavo.ops import rounding_layer
from octavo.runtime.contract import LAYERS
from tests.support.contract_checks import wants
from tests.support.custom_operations import Doubled, Powered, computes, define, fused, quadruple, stepped
from tests.support.linear_oracle import spiky
from tests.support.sequentials import H, assert_unfused, fill, rows
from tests.support.steps import assert_equal, compiled, step

# -- results -----------------------------------------------------------------------------------------------------------


def test_a_fused_operation_that_is_right_runs():
    x, dy = spiky(4, H), spiky(4, H, seed=2)
    assert_unfused(quadruple(fused("Right")), x, dy)


def test_a_fused_operation_that_answers_for_too_few_is_a_runtime_error():
    class Short(ops.FusedOperation):
        @staticmethod
        def fuser_forward_compute(configs, inputs):
            return 4 * inputs[0].x, ((),), ((),)

        @staticmethod
        def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
            return (), ()

    rule = ops.Forward(ops.Rule("short", (Doubled, Doubled), Short))
    with pytest.raises(RuntimeError, match=r"Short|short"):
        octavo.Sequential(Doubled(), Doubled(), rules=(rule,))(spiky(4, H))


FUSED = {  # -> the function that is wrong, the error, what came back
    "y of another dtype": (computes(lambda x: (4 * x).bfloat16()), TypeError, r"a bfloat16 tensor of shape .*, 32\)"),
    "y of another shape": (computes(lambda x: 4 * x[:, :1]), TypeError, r"a float32 tensor of shape \(\d+, 1\)"),
    "y None": (computes(lambda x: None), RuntimeError, "got None"),
    "y a float": (computes(lambda x: 4.0), RuntimeError, "got a float"),
    "y alone": ({"compute": lambda configs, inputs: 4 * inputs[0].x}, RuntimeError, "got a float32 tensor"),
    "no tuples": ({"compute": lambda configs, inputs: (4 * inputs[0].x, None, None)}, RuntimeError, "got None"),
    "x": (computes(lambda x: x), ValueError, "returns one of its inputs"),
    "a view of x": (computes(lambda x: x.view(x.shape)), ValueError, "returns one of its inputs"),
    "saves for one": ({"save": lambda *_: ((),)}, TypeError, "got 1 entry"),
    "saves for four": ({"save": lambda *_: ((),) * 4}, TypeError, "got 4 entries"),
    "saves None": ({"save": lambda *_: None}, TypeError, "got None"),
    "saves None for one": ({"save": lambda *_: ((), None)}, TypeError, "operation 1, got None"),
    "saves a dtype": ({"save": lambda *_: ((torch.int8,), ())}, TypeError, "returned a dtype"),
    "saves something made": (
        {"save": lambda configs, inputs, outputs, fresh: ((inputs[0].x + 1,), ())}, TypeError, "made a float32 tensor",
    ),
    "gradients None": ({"backward": lambda *_: None}, RuntimeError, "got None"),
    "gradients for one": (
        {"backward": lambda configs, saved, grads, wants: ((grads[0],),)}, RuntimeError, "got 1 entry"
    ),
    "a gradient None": ({"backward": lambda *_: (None, (None,))}, RuntimeError, "operation 0, got None"),
    "a float as gradient": ({"backward": lambda *_: ((4.0,), (None,))}, RuntimeError, "returned a float as"),
}  # fmt: skip
FUNCTION = {"compute": "fuser_forward_compute", "save": "fuser_forward_save_ctx", "backward": "fuser_backward"}


@pytest.mark.parametrize("what", FUSED)
def test_a_fused_operation_that_returns_something_else_is_named_with_its_function_and_what_came_back(what):
    functions, error, says = FUSED[what]
    model = quadruple(fused("Wrong" + what.title().replace(" ", ""), **functions))
    with pytest.raises(error, match=says) as refused:
        stepped(model)
    (which,) = functions
    assert f"Wrong{what.title().replace(' ', '')}.{FUNCTION[which]}" in str(refused.value)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=says):
        stepped(model, compiled(model))


class Halves(ops.FusedOperation):
    """x / 2 + bias, as a legacy fused operation."""

    @staticmethod
    def fuser_forward(ctxs, inputs):
        ctxs[0].save_for_backward(inputs[0].x)
        ctxs[1].factor = 0.5
        return inputs[0].x * 0.5 + inputs[1].bias

    @staticmethod
    def fuser_backward(ctxs, dy):
        assert ctxs[0].saved_tensors[0].shape == dy.shape
        return (dy * ctxs[1].factor,), (None, dy.sum(0))


def test_gradients_of_a_fused_forward_in_one_piece_are_like_their_inputs():
    class Summed(Halves):
        @staticmethod
        def fuser_backward(ctxs, dy):
            return (dy * ctxs[1].factor,), (None, dy.sum(0, keepdim=True))

    rule = ops.Joint(ops.Rule("halves", (ops.ConstantScale, ops.Bias), Summed))
    model = octavo.Sequential(ops.ConstantScale(0.5), ops.Bias(H), rules=(rule,))
    with pytest.raises(RuntimeError, match=r"Summed.fuser_backward returned a float32 .* as the gradient of 1.bias"):
        step(model, rows(), rows())


def test_a_fused_forward_in_one_piece():
    rule = ops.Joint(ops.Rule("halves", (ops.ConstantScale, ops.Bias), Halves))
    parts = (ops.GELU(), ops.ConstantScale(0.5), ops.Bias(H), ops.SiLU())
    model, twin = octavo.Sequential(*parts, rules=(rule,)), octavo.Sequential(*copy.deepcopy(parts), rules=None)
    assert model.explain(rows()).fired == ("halves",)
    x, dy = rows(), rows()
    for a, b in zip(step(model, x, dy), step(twin, x, dy), strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="fuser_forward"):
        compiled(model)(x)


# -- what is saved -----------------------------------------------------------------------------------------------------


def forward_only(name, fresh, saved):
    def compute(configs, inputs):
        x, (a, b) = inputs[0].x, (i.gain for i in inputs)
        first = x**2 * a
        return first**2 * b, ((), ()), fresh(x, x**2, first, first**2)

    body = {
        "fuser_forward_compute": staticmethod(compute),
        "fuser_forward_save_ctx": staticmethod(lambda configs, inputs, outputs, fresh: saved(inputs, fresh)),
    }
    fused = define(body, ops.FusedOperation, "Other" + name.title().replace(" ", ""))
    return ops.Forward(ops.Rule("two powers", (Powered, Powered), fused))


def as_unfused(i, f):
    return (i[0].x, i[0].gain, None, f[0][0]), (f[1][0], i[1].gain, None, f[1][1])


def all_of(x, a, first, b):
    return (a,), (first, b)


LAYOUTS = {  # name -> (what compute hands over, what is saved of it)
    "as its operations": (all_of, as_unfused),
    "fewer": (all_of, lambda i, f: (as_unfused(i, f)[0], ())),
    "in another order": (all_of, lambda i, f: ((i[0].gain, i[0].x, None, f[0][0]), as_unfused(i, f)[1])),
    "other shapes": (lambda x, a, first, b: ((a[:1].clone(),), (first, b)), as_unfused),
    "other dtypes": (lambda x, a, first, b: ((a.bfloat16(),), (first, b)), as_unfused),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_forward_only_rule_that_saves_something_else_is_refused_when_planned(name):
    rule, x, dy = forward_only(name, *LAYOUTS[name]), spiky(4, H, size=2.0), spiky(4, H, seed=2)
    model = fill(octavo.Sequential(Powered(H), Powered(H), rules=(rule,)))
    if name == "as its operations":
        assert model.explain(x.clone().requires_grad_()).fired == ("two powers",)
        assert_unfused(model, x, dy)
        return
    for call in (model.explain, model, model):
        with pytest.raises(TypeError, match="Other"):
            call(x.clone().requires_grad_())


def test_what_a_fused_operation_keeps_follows_from_its_configs():
    seen = []

    def compute(configs, inputs):
        seen.append(None)
        return 4 * inputs[0].x, ((), ()), ((inputs[0].x + 1,) if len(seen) == 1 else (), ())

    with pytest.raises(RuntimeError, match=r"Changing.fuser_forward_compute handed over \[\], and \['tensor'\]"):
        stepped(quadruple(fused("Changing", compute)))


def test_what_a_fused_operation_keeps_may_be_a_view_of_what_it_was_given():
    def compute(configs, inputs):
        y = 4 * inputs[0].x
        return y, ((), ()), ((inputs[0].x.view(-1), y.view(-1)), ())

    rule = fused("Keeping", compute, lambda configs, inputs, outputs, fresh: (fresh[0], ()))
    model, x, dy = quadruple(rule), spiky(4, H), spiky(4, H, seed=2)
    assert_equal(step(model, x, dy, call=compiled(model)), assert_unfused(model, x, dy))


@pytest.mark.parametrize("before", [(), (ops.ConstantScale(3.0),)], ids=["leading", "inside"])
def test_a_fused_operation_may_give_x_away_where_make_extra_output_would(before):
    def backward(configs, saved, grads, wants):
        return (sum(f * g for f, g in zip((2, 1), grads, strict=True) if g is not None),), (None,)

    rule = fused(
        "GivesAway", lambda configs, inputs: (2 * inputs[0].x, ((inputs[0].x,), ()), ((), ())),
        backward=backward, pattern=(ops.MakeExtraOutput, Doubled),
    )  # fmt: skip
    model = octavo.Sequential(*before, ops.MakeExtraOutput(), Doubled(), rules=(rule,))
    x, dys = spiky(4, H), (spiky(4, H, seed=2), spiky(4, H, seed=3))
    assert model.explain(x.clone().requires_grad_()).fired == ("quadruple",)
    assert_equal(step(model, x, dys, call=compiled(model)), assert_unfused(model, x, dys))


# -- gradients are like their inputs -----------------------------------------------------------------------------------


FUSED_UNLIKE = {
    "dx of one row": lambda configs, saved, grads, wants: ((grads[0].sum(0, keepdim=True),), (None,)),
    "dx in float64": lambda configs, saved, grads, wants: ((grads[0].double(),), (None,)),
}


@pytest.mark.parametrize("backward", FUSED_UNLIKE.values(), ids=FUSED_UNLIKE)
def test_a_gradient_of_a_fused_operation_is_like_its_input(backward):
    model = quadruple(fused("Unlike", backward=backward))
    says = r"Unlike.fuser_backward returned a float.* as the gradient of 0.x, which is a float32 tensor of shape .*32\)"
    with pytest.raises(RuntimeError, match=says):
        stepped(model)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=says):
        stepped(model, compiled(model))


def test_a_gradient_of_a_parameter_in_a_fused_operation_is_like_it():
    def backward(configs, saved, grads, wants):
        return (4 * grads[0],), (None, grads[0].clone(), None)

    def compute(configs, inputs):
        return 4 * inputs[0].x * inputs[1].gain, ((), ()), ((), ())

    model = octavo.Sequential(
        Doubled(), Powered(H), rules=(fused("Loose", compute, backward=backward, pattern=(Doubled, Powered)),)
    )
    with pytest.raises(RuntimeError, match=r"Loose.fuser_backward .* gradient of 1.gain, .* of shape \(32,\)"):
        stepped(model)


# -- auxiliary outputs -------------------------------------------------------------------------------------------------


def test_a_backward_fusion_has_the_auxiliary_outputs_of_the_operations_whose_forward_runs():
    class Back(ops.FusedOperation):
        @staticmethod
        def fuser_backward(configs, saved, grads, wants):
            return ({},)

    codes = rounding_layer.Config(spec=octavo.quant.MX(), **wants("dx"))  # its codes and scale are auxiliary outputs
    layer = LAYERS[Back.op_name]
    assert layer.auxiliary(layer.Config(side="backward", stages=(codes,))) == 2
