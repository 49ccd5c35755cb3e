"""Operations that return the wrong number or kind of results or gradients: an error names each and its place."""

import re

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from tests.support.custom_operations import Doubled, Emit, Legacy, Powered, Take, define, stepped
from tests.support.linear_oracle import spiky
from tests.support.sequentials import H, assert_unfused, linear
from tests.support.steps import assert_equal, compiled, step

# -- how many ----------------------------------------------------------------------------------------------------------


COUNTS = {
    "gradients of an operation": (Doubled, "op_backward", lambda *_: ()),
    "too many gradients": (Doubled, "op_backward", lambda config, saved, dy, wants: (dy, dy)),
    "gradients of parameters": (Powered, "op_backward", lambda config, saved, dy, wants: (dy,)),
    "outputs": (Doubled, "op_forward_compute", lambda config, inputs: 2 * inputs.x),
    "extra outputs": (Emit, "fuser_forward_compute", lambda config, inputs: (2 * inputs.x, (), ())),
    "gradients of extra inputs": (Take, "fuser_backward", lambda config, saved, grads, wants: (grads[0],)),
}
BEFORE = {  # place -> what stands there first
    0: lambda: [],
    1: lambda: [ops.ConstantScale(2.0)],
    2: lambda: [ops.ConstantScale(1.0), ops.Identity()],
    3: lambda: [Doubled(), nn.Tanh(), Doubled()],
    5: lambda: [ops.Identity(), octavo.Sequential(Doubled(), ops.Reshape((-1, H)), Doubled()), nn.Tanh()],
}


@pytest.mark.parametrize("place", BEFORE)
@pytest.mark.parametrize("what", COUNTS)
def test_a_wrong_number_of_results_is_a_runtime_error_that_names_the_operation_and_its_place(what, place):
    cls, name, function = COUNTS[what]
    title = f"Miscounted{what.title().replace(' ', '')}At{place}"
    made = define({name: staticmethod(function)}, cls, title)
    op = made(H) if cls is Powered else made()
    model, x = octavo.Sequential(*BEFORE[place](), op, Doubled()), spiky(4, H).requires_grad_()
    extra = (x.detach(),) if cls is Take else ()
    with pytest.raises(RuntimeError) as refused:  # noqa: PT012
        y = model(x, *extra)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    assert re.match(rf"Operation {place}: {title}\b", str(refused.value))


@pytest.mark.parametrize(("extra", "said"), [(None, "None"), (3.0, "a float"), ([1], "1 entry")], ids=str)
def test_an_extra_input_that_is_no_tensor_is_named(extra, said):
    for call in (Take(), octavo.Sequential(Doubled(), Take())):
        with pytest.raises(TypeError, match=f"Take takes a tensor as extra input 0, got {said}"):
            call(spiky(4, H), extra)


# -- gradients are like their inputs -----------------------------------------------------------------------------------


def adding(dx=lambda dy: dy, dbias=lambda dy: dy.sum(0)):
    """x + bias, nothing saved, with a backward of its own."""

    class Adding(ops.BasicOperation):
        params = ("bias",)

        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(H))

        @staticmethod
        def op_forward_compute(config, inputs):
            return inputs.x + inputs.bias, ()

        @staticmethod
        def op_forward_save_ctx(config, inputs, y, fresh):
            return ()

        @staticmethod
        def op_backward(config, saved, dy, wants):
            return dx(dy) if wants.x else None, dbias(dy) if wants.bias else None

    return Adding()


UNLIKE = {  # -> which gradient, what came, what was expected
    "dx of one row": ({"dx": lambda dy: dy.sum(0, keepdim=True)}, "x", r"\(1, 32\)"),
    "dx of one column": ({"dx": lambda dy: dy.sum(1, keepdim=True)}, "x", r"\(\d+, 1\)"),
    "dx without rows": ({"dx": lambda dy: dy.sum(0)}, "x", r"\(32,\)"),
    "dx, a number": ({"dx": lambda dy: dy.sum()}, "x", r"\(\)"),
    "dx of integers": ({"dx": lambda dy: dy.int()}, "x", "an int32"),
    "dx in float64": ({"dx": lambda dy: dy.double()}, "x", "a float64"),
    "dx, a float": ({"dx": lambda dy: 1.0}, "x", "a float"),
    "dbias, thrice": ({"dbias": lambda dy: dy.sum(0).expand(3, H).clone()}, "bias", r"\(3, 32\)"),
    "dbias not summed": ({"dbias": lambda dy: dy.clone()}, "bias", r"\(\d+, 32\)"),
    "dbias in bfloat16": ({"dbias": lambda dy: dy.sum(0).bfloat16()}, "bias", "a bfloat16"),
}
NEIGHBOURS = {"alone": lambda: (), "after a custom one": lambda: (Powered(H),), "after a Linear": lambda: (linear(),)}


@pytest.mark.parametrize("before", NEIGHBOURS.values(), ids=NEIGHBOURS)
@pytest.mark.parametrize("what", UNLIKE)
def test_a_gradient_unlike_its_input_is_an_error_that_names_it(what, before):
    functions, name, came = UNLIKE[what]
    model = octavo.Sequential(*before(), adding(**functions), ops.ConstantScale(1.0))
    says = rf"Operation \d: Adding's backward returned {came}.* as the gradient of {name}"
    says = says.replace("returned \\(", "returned a float32 tensor of shape \\(")
    with pytest.raises(RuntimeError, match=says):
        stepped(model)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=says):
        stepped(model, compiled(model))


def test_gradients_like_their_inputs_are_none():
    model, x, dy = octavo.Sequential(Powered(H), adding(), linear()), spiky(4, H), spiky(4, H, seed=2)
    want = assert_unfused(model, x, dy)
    assert_equal(step(model, x, dy, call=compiled(model)), want)


LEGACY_UNLIKE = {
    "x": lambda self, ctx, dy: (dy.sum(0).expand(3, *dy.shape).clone(), (dy.sum(0),)),
    "gain": lambda self, ctx, dy: (dy.clone(), (dy.sum(0).expand(3, H).clone(),)),
}


@pytest.mark.parametrize("name", LEGACY_UNLIKE)
def test_a_gradient_of_a_forward_in_one_piece_is_like_its_input(name):
    op = define({"op_backward": LEGACY_UNLIKE[name]}, Legacy, "Old")(H)
    with pytest.raises(RuntimeError, match=rf"Old.op_backward returned a float32 .* as the gradient of {name}, which"):
        stepped(op)


# -- rows that move ----------------------------------------------------------------------------------------------------


class Turned(ops.BasicOperation):
    """x, its first two dims exchanged: a fresh tensor of a shape that a plan on made up sizes does not tell apart."""

    @staticmethod
    def op_forward_compute(config, inputs):
        return inputs.x.transpose(0, 1).clone(memory_format=torch.contiguous_format), ()

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        return ()

    @staticmethod
    def op_backward(config, saved, dy, wants):
        return (dy.transpose(0, 1).contiguous(),)


@pytest.mark.parametrize("shape", [(5, 7, H), (1, 7, H), (5, 1, H), (H, 5), (0, 3, H)], ids=str)
def test_rows_may_change_places(shape):
    x = spiky(*shape)
    for model in (
        octavo.Sequential(Turned(), Doubled(), Turned(), Doubled()), octavo.Sequential(Doubled(), Turned(), Turned()),
    ):  # fmt: skip
        want = assert_unfused(model, x, x)
        assert_equal(step(model, x, x, call=compiled(model)), want)


class Padded(Turned):
    """Rows, up to a multiple of 8."""

    params = ("rows",)

    def __init__(self):
        super().__init__()
        self.rows = nn.Buffer(torch.zeros(3, H))

    @staticmethod
    def op_forward_compute(config, inputs):
        return torch.cat([inputs.x, inputs.x.new_zeros(-inputs.x.shape[0] % 8, H)]), (inputs.x.new_empty(0),)

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        return (inputs.x,)

    @staticmethod
    def op_backward(config, saved, dy, wants):
        return dy[: saved[0].shape[0]].clone(), None


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_rows_may_be_added(rows):
    x, dy = spiky(rows, H), spiky(8, H, seed=2)
    for model in (octavo.Sequential(Doubled(), Padded()), octavo.Sequential(Padded(), Doubled())):
        assert_unfused(model, x, dy)
