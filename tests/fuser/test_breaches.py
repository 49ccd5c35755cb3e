"""Operations and rules that break their contract (P7-P9): refused when a run is planned, or an error that names it."""

import re

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from tests.fuser.custom import Doubled, Emit, Legacy, Powered, Take
from tests.fuser.models import H, assert_equal, assert_unfused, compiled, fill, step
from tests.fuser.test_contract import define
from tests.modules.oracle import spiky

# -- P8, P9: wrong numbers ---------------------------------------------------------------------------------------------


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


# -- P7: a forward-only fusion saves what its operations save ----------------------------------------------------------


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


# -- fused operations are held to what single ones are -----------------------------------------------------------------


def fused(name, compute=None, save=None, backward=None, pattern=(Doubled, Doubled)):
    """A joint rule whose functions are right but for those that are given."""
    body = {
        "fuser_forward_compute": compute or (lambda configs, inputs: (4 * inputs[0].x, ((), ()), ((), ()))),
        "fuser_forward_save_ctx": save or (lambda configs, inputs, outputs, fresh: ((), ())),
        "fuser_backward": backward or (lambda configs, saved, grads, wants: ((4 * grads[0],), (None,))),
    }
    made = define({k: staticmethod(v) for k, v in body.items()}, ops.FusedOperation, name)
    return ops.Joint(ops.Rule("quadruple", pattern, made))


def quadruple(rule):
    return octavo.Sequential(Doubled(), Doubled(), rules=(rule,))


def stepped(model, call=None):
    (model if call is None else call)(spiky(4, H).requires_grad_()).sum().backward()


def computes(make):
    return {"compute": lambda configs, inputs: (make(inputs[0].x), ((), ()), ((), ()))}


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
    "saves a float": ({"save": lambda *_: ((3.0,), ())}, TypeError, "returned a float"),
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


def test_a_fused_operation_that_is_right_runs():
    x, dy = spiky(4, H), spiky(4, H, seed=2)
    assert_unfused(quadruple(fused("Right")), x, dy)


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


def linear():
    return octavo.Linear(H, H)


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


@pytest.mark.parametrize("shape", [(5, 7, H), (1, 7, H), (5, 1, H), (H, 5), (0, 3, H)], ids=str)
def test_rows_may_change_places(shape):
    x = spiky(*shape)
    for model in (
        octavo.Sequential(Turned(), Doubled(), Turned(), Doubled()), octavo.Sequential(Doubled(), Turned(), Turned()),
    ):  # fmt: skip
        want = assert_unfused(model, x, x)
        assert_equal(step(model, x, x, call=compiled(model)), want)


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_rows_may_be_added(rows):
    x, dy = spiky(rows, H), spiky(8, H, seed=2)
    for model in (octavo.Sequential(Doubled(), Padded()), octavo.Sequential(Padded(), Doubled())):
        assert_unfused(model, x, dy)


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


LEGACY_UNLIKE = {
    "x": lambda self, ctx, dy: (dy.sum(0).expand(3, *dy.shape).clone(), (dy.sum(0),)),
    "parameter 0": lambda self, ctx, dy: (dy.clone(), (dy.sum(0).expand(3, H).clone(),)),
}


@pytest.mark.parametrize("name", LEGACY_UNLIKE)
def test_a_gradient_of_a_forward_in_one_piece_is_like_its_input(name):
    op = define({"op_backward": LEGACY_UNLIKE[name]}, Legacy, "Old")(H)
    with pytest.raises(RuntimeError, match=rf"Old.op_backward returned a float32 .* as the gradient of {name}, which"):
        stepped(op)


# -- run without data --------------------------------------------------------------------------------------------------


def only_positive(x):
    return x if x.sum() > 0 else 2 * x


PEEKS = {
    "item": lambda x: x * x.abs().max().item(),
    "bool": lambda x: only_positive(x).clone(),
    "sizes": lambda x: x[x > 0],
}


@pytest.mark.parametrize("wrap", [lambda m: m, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("make", PEEKS.values(), ids=PEEKS)
def test_compute_that_reads_values_is_a_type_error_that_says_what_to_do(make, wrap):
    op = define({"op_forward_compute": staticmethod(lambda config, inputs: (make(inputs.x), ()))}, Doubled, "Peeking")()
    for model in (op, octavo.Sequential(ops.ConstantScale(1.0), op)):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"Peeking's compute .* without data .* or define op_protos") as refused:
            wrap(model)(spiky(4, H))
        assert wrap is compiled or isinstance(refused.value, TypeError)


def test_what_reads_values_and_says_its_shapes_runs():
    body = {
        "op_forward_compute": staticmethod(lambda config, inputs: (2 * only_positive(inputs.x), ())),
        "op_protos": staticmethod(lambda config, inputs: (torch.empty_like(inputs.x), ())),
    }
    op, x, dy = define(body, Doubled)(), spiky(4, H).abs(), spiky(4, H, seed=2)
    assert_equal(step(op, x, dy), [2 * x, 2 * dy])
    assert_equal(step(op, x, dy, call=compiled(op)), [2 * x, 2 * dy])


@pytest.mark.parametrize("make", [PEEKS["item"], PEEKS["bool"]], ids=["item", "bool"])
def test_a_backward_that_reads_values_is_said_where_a_graph_asks_for_shapes(make):
    backward = staticmethod(lambda config, saved, dy, wants: (make(dy),))
    op = define({"op_backward": backward}, Doubled, "Peeking")()
    stepped(op)  # in eager mode it has data
    with pytest.raises(Exception, match=r"Peeking's backward .* without data"):
        stepped(op, compiled(op))


def test_a_fused_operation_that_reads_values_is_a_type_error():
    model = quadruple(fused("Peeking", **computes(lambda x: 4 * x * x.abs().max().item())))
    with pytest.raises(TypeError, match=r"Peeking.fuser_forward_compute .* without data"):
        stepped(model)


def fails(*_):
    raise KeyError("mine")


FAILING = {"op_forward_compute": "compute", "op_forward_save_ctx": "save_ctx", "op_protos": "op_protos"}


@pytest.mark.parametrize("name", FAILING)
def test_what_an_operation_raises_without_data_names_it(name):
    op = define({name: staticmethod(fails)}, Doubled, "Failing")()
    with pytest.raises(KeyError) as caught:
        op(spiky(4, H))
    assert f"Raised by Failing's {FAILING[name]}, which is run without data" in "".join(caught.value.__notes__)


def test_what_a_fused_operation_raises_without_data_names_it():
    for which, name in (("compute", "fuser_forward_compute"), ("save", "fuser_forward_save_ctx")):
        with pytest.raises(KeyError) as caught:
            stepped(quadruple(fused("Failing", **{which: fails})))
        assert f"Raised by Failing.{name}" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(("extra", "said"), [(None, "None"), (3.0, "a float"), ([1], "1 entry")], ids=str)
def test_an_extra_input_that_is_no_tensor_is_named(extra, said):
    for call in (Take(), octavo.Sequential(Doubled(), Take())):
        with pytest.raises(TypeError, match=f"Take takes a tensor as extra input 0, got {said}"):
            call(spiky(4, H), extra)
