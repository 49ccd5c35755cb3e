"""Named channels: an extra output of one operation is an extra input of a later one, inside one Sequential.

Data are small integers, so that sums of gradients are exact in any order."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from tests.support.custom_operations import Emit, Take, Twice
from tests.support.sequentials import H, M, mlp, whole
from tests.support.steps import assert_equal, compiled, step

PUBLIC = pytest.mark.parametrize("public", [False, True], ids=["hidden", "public"])


def linear():
    layer = octavo.Linear(H, H, bias=False)
    with torch.no_grad():
        layer.weight.copy_(whole(H, H, seed=40))
    return layer


def residual(*between, public=False, **settings):
    return octavo.Sequential(
        ops.MakeExtraOutput(channel="residual", output_to_caller=public),
        *between,
        ops.AddExtraInput(source="residual"),
        **settings,
    )


def linear_gradients(layer, x, dy):
    """dx and dw of x · Wᵀ."""
    return dy @ layer.weight.detach(), dy.T @ x


# -- what comes in and what goes out -----------------------------------------------------------------------------------


def test_a_residual_inside_one_sequential():
    model, x, dy = residual(linear()), whole(M, H), whole(M, H, seed=1)
    dx, dw = linear_gradients(model[1], x, dy)
    assert_equal(step(model, x, dy), [x + model[1](x).detach(), dy + dx, dw])


def test_a_residual_that_the_caller_sees_and_gives_a_gradient_to():
    model, x = residual(linear(), public=True), whole(M, H)
    dy, droute = whole(M, H, seed=1), whole(M, H, seed=2)
    dx, dw = linear_gradients(model[1], x, dy)
    y = x + model[1](x).detach()
    assert_equal(step(model, x, (dy, droute)), [y, x, dy + dx + droute, dw])


def test_a_residual_that_the_caller_sees_and_does_not_use():
    model, x, dy = residual(linear(), public=True), whole(M, H), whole(M, H, seed=1)
    dx, dw = linear_gradients(model[1], x, dy)
    assert_equal(step(model, x, (dy, None))[2:], [dy + dx, dw])


def test_only_the_callers_gradient():
    model, x, droute = residual(linear(), public=True), whole(M, H), whole(M, H, seed=2)
    dx, dw = step(model, x, (None, droute))[2:]
    assert torch.equal(dx, droute)
    assert dw is None or not dw.any()


def test_a_public_output_that_nobody_consumes_has_a_gradient_of_zero():
    model, x, dy = octavo.Sequential(ops.MakeExtraOutput(channel="a"), linear()), whole(M, H), whole(M, H, seed=1)
    dx, dw = linear_gradients(model[1], x, dy)
    assert_equal(step(model, x, (dy, None))[2:], [dx, dw])


def test_a_hidden_output_that_nobody_consumes_is_not_returned():
    model = octavo.Sequential(ops.MakeExtraOutput(channel="a", output_to_caller=False), linear())
    x, dy = whole(M, H), whole(M, H, seed=1)
    dx, dw = linear_gradients(model[1], x, dy)
    assert_equal(step(model, x, dy), [model[1](x).detach(), dx, dw])


@PUBLIC
def test_a_hidden_output_is_not_returned_and_a_public_one_is(public):
    model, x = residual(linear(), public=public), whole(M, H)
    found = model(x)
    assert isinstance(found, tuple) == public
    if public:
        assert len(found) == 2 and torch.equal(found[1], x)


def test_inputs_from_a_channel_and_from_the_caller_together():
    model = octavo.Sequential(
        ops.MakeExtraOutput(channel="a", output_to_caller=False),
        ops.AddExtraInput(),  # + 1st
        ops.AddExtraInput(source="a"),  # + x
        ops.ConstantScale(2.0),
        ops.AddExtraInput(),  # + 2nd
    )
    x, first, second, dy = (whole(M, H, seed=i) for i in range(4))
    found = step(model, (x, first, second), dy)
    assert_equal(found, [2 * (2 * x + first) + second, 4 * dy, 2 * dy, dy])
    with pytest.raises(ValueError, match=r"(?s)(2\D.*3|3\D.*2)"):
        model(x, first, second, second)


def test_public_outputs_come_in_order_and_hidden_ones_are_left_out():
    model = octavo.Sequential(
        ops.MakeExtraOutput(),
        ops.ConstantScale(2.0),
        ops.MakeExtraOutput(channel="hidden", output_to_caller=False),
        ops.ConstantScale(2.0),
        ops.MakeExtraOutput(channel="seen"),
        ops.AddExtraInput(source="hidden"),
        ops.AddExtraInput(source="seen"),
        ops.MakeExtraOutput(),
    )
    x = whole(M, H)
    y, *extra = model(x)
    assert torch.equal(y, 10 * x)
    assert_equal(extra, [x, 4 * x, 10 * x])


def test_slots_of_one_operation_are_bound_one_by_one():
    op = Twice().set_extra_output_channel(1, "second", output_to_caller=False)
    model, x, dy = octavo.Sequential(op, ops.AddExtraInput(source="second")), whole(M, H), whole(M, H, seed=1)
    d0 = whole(M, H, seed=2)
    assert_equal(step(model, x, (dy, d0)), [2 * x + 2, x + 1, 2 * dy + d0])


# -- fan-out, and outputs that are made --------------------------------------------------------------------------------


def test_two_consumers_and_the_caller():
    model = octavo.Sequential(
        ops.MakeExtraOutput(channel="a"), ops.AddExtraInput(source="a"), ops.AddExtraInput(source="a")
    )
    x, dy, droute = (whole(M, H, seed=i) for i in range(3))
    assert_equal(step(model, x, (dy, droute)), [3 * x, x, 3 * dy + droute])


def test_two_consumers_without_gradients():
    model = octavo.Sequential(
        ops.MakeExtraOutput(channel="a"), ops.AddExtraInput(source="a"), ops.AddExtraInput(source="a")
    )
    x = whole(M, H)
    with torch.no_grad():
        y, extra = model(x)
    assert torch.equal(y, 3 * x) and torch.equal(extra, x)
    assert not y.requires_grad


def test_two_channels_that_cross():
    model = octavo.Sequential(
        ops.MakeExtraOutput(channel="a", output_to_caller=False),
        ops.ConstantScale(2.0),
        ops.MakeExtraOutput(channel="b", output_to_caller=False),
        ops.ConstantScale(3.0),
        ops.AddExtraInput(source="a"),
        ops.AddExtraInput(source="b"),
    )
    x, dy = whole(M, H), whole(M, H, seed=1)
    assert_equal(step(model, x, dy), [9 * x, 9 * dy])


@PUBLIC
def test_an_output_that_is_made_keeps_its_gradient(public):
    model = octavo.Sequential(
        Emit().set_extra_output_channel(0, "a", output_to_caller=public), Take().set_extra_input_channel(0, "a")
    )
    x, dy, droute = (whole(M, H, seed=i) for i in range(3))
    outputs, dys = ([17 * x, 3 * x], (dy, droute)) if public else ([17 * x], (dy,))
    assert_equal(step(model, x, dys), [*outputs, 17 * dy + (3 * droute if public else 0)])


def test_a_gradient_reaches_parameters_through_a_channel_alone():
    bias = ops.Bias(H)
    model = octavo.Sequential(
        bias,
        ops.MakeExtraOutput(channel="a", output_to_caller=False),
        ops.ConstantScale(0.0),
        ops.AddExtraInput(source="a"),
    )
    x, dy = whole(M, H), whole(M, H, seed=1)
    _, dx, db = step(model, x, dy, frozen=())
    assert torch.equal(dx, dy) and torch.equal(db, dy.sum(0))
    _, dx, db = step(model, x, dy, frozen=(0,))
    assert dx is None and torch.equal(db, dy.sum(0))


# -- a fusion that owns a channel --------------------------------------------------------------------------------------


def seventeen(configs, inputs):
    assert inputs[1].extra0 is None  # inside the fusion: its own business
    x = inputs[0].x
    return 17 * x, ((3 * x,), ()), ((), ())


class ForwardOnly(ops.FusedOperation):
    fuser_forward_compute = staticmethod(seventeen)

    @staticmethod
    def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
        return (), ()


class BackwardOnly(ops.FusedOperation):
    @staticmethod
    def fuser_backward(configs, saved, grads, wants):
        dy, dextra = grads
        return (17 * dy + (0 if dextra is None else 3 * dextra),), (None, None)


class Joint(ForwardOnly):
    @staticmethod
    def fuser_backward(configs, saved, grads, wants):
        return BackwardOnly.fuser_backward(configs, saved, grads, wants)


OWNERS = {"forward": (ForwardOnly, ops.Forward), "backward": (BackwardOnly, ops.Backward), "joint": (Joint, ops.Joint)}


def emit_and_take(public, rules=None):
    return octavo.Sequential(
        Emit().set_extra_output_channel(0, "a", output_to_caller=public),
        Take().set_extra_input_channel(0, "a"),
        rules=rules,
    )


@PUBLIC
@pytest.mark.parametrize(("fused", "side"), OWNERS.values(), ids=OWNERS)
def test_a_fusion_owns_the_channel_between_its_operations(fused, side, public):
    rule = ops.Rule("seventeen", (Emit, Take), fused)
    model, twin = emit_and_take(public, (side(rule),)), emit_and_take(public)
    x, dy, droute = (whole(M, H, seed=i) for i in range(3))
    assert model.explain(x.clone().requires_grad_()).fired == ("seventeen",)
    assert twin.explain(x.clone().requires_grad_()).fired == ()
    for dys in [(dy, droute), (dy, None)] if public else [(dy,)]:
        assert_equal(step(model, x, dys), step(twin, x, dys))
    with torch.no_grad():
        found, want = model(x), twin(x)
    assert_equal(found if public else [found], want if public else [want])


class WithoutItsOutput(ForwardOnly):
    @staticmethod
    def fuser_forward_compute(configs, inputs):
        return 17 * inputs[0].x, ((None,), ()), ((), ())


def test_a_fusion_may_leave_out_an_output_that_nobody_else_sees():
    rule = ops.Rule("seventeen", (Emit, Take), WithoutItsOutput)
    model, x, dy = emit_and_take(False, (ops.Forward(rule),)), whole(M, H), whole(M, H, seed=1)
    assert model.explain(x.clone().requires_grad_()).fired == ("seventeen",)
    assert_equal(step(model, x, dy), [17 * x, 17 * dy])


def test_a_fusion_that_leaves_out_a_public_output_is_refused():
    rule = ops.Rule("seventeen", (Emit, Take), WithoutItsOutput)
    model = emit_and_take(True, (ops.Forward(rule),))
    with pytest.raises(RuntimeError, match="public"):
        model(whole(M, H))


def test_a_fusion_that_leaves_out_an_output_for_a_later_operation_is_refused():
    rule = ops.Rule("seventeen", (Emit, Take), WithoutItsOutput)
    model = emit_and_take(False, (ops.Forward(rule),)).append(ops.AddExtraInput(source="a"))
    with pytest.raises(RuntimeError, match="outside"):
        model(whole(M, H))


# -- bindings that make no sense ---------------------------------------------------------------------------------------


def duplicate_within_one():
    return octavo.Sequential(Twice().set_extra_output_channel(0, "a").set_extra_output_channel(1, "a"))


BROKEN = {
    "no producer": lambda: octavo.Sequential(ops.Identity(), ops.AddExtraInput(source="nowhere")),
    "a later producer": lambda: octavo.Sequential(
        ops.AddExtraInput(source="later"), ops.MakeExtraOutput(channel="later")
    ),
    "two producers": lambda: octavo.Sequential(
        ops.MakeExtraOutput(channel="twice"), ops.MakeExtraOutput(channel="twice"), ops.AddExtraInput(source="twice")
    ),
    "two producers in one": duplicate_within_one,
    "no producer, nested": lambda: octavo.Sequential(octavo.Sequential(ops.Identity(), ops.AddExtraInput(source="x"))),
    "across a module, no producer": lambda: octavo.Sequential(nn.Identity(), ops.AddExtraInput(source="nowhere")),
}


@pytest.mark.parametrize("build", BROKEN.values(), ids=BROKEN)
def test_a_broken_channel_is_a_value_error_before_any_forward(build):
    with pytest.raises(ValueError, match=r"nowhere|later|twice|'a'|'x'"):
        build()


@pytest.mark.parametrize("edit", ["append", "insert", "set", "delete"])
def test_an_edit_that_breaks_a_channel_is_a_value_error_and_leaves_things_as_they_were(edit):
    model, x = residual(ops.Identity()), whole(M, H)
    edits = {
        "append": lambda: model.append(ops.AddExtraInput(source="nowhere")),
        "insert": lambda: model.insert(0, ops.AddExtraInput(source="residual")),
        "set": lambda: model.__setitem__(0, ops.Identity()),
        "delete": lambda: model.__delitem__(0),
    }
    with pytest.raises(ValueError, match=r"residual|nowhere"):
        edits[edit]()
    assert len(model) == 3
    assert torch.equal(model(x), 2 * x)


@pytest.mark.parametrize("index", [-1, 1, 7])
@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_slot_that_is_not_there_is_an_index_error(index, kind):
    op = Take() if kind == "input" else Emit()
    with pytest.raises(IndexError):
        getattr(op, f"set_extra_{kind}_channel")(index, "a")


def test_an_operation_without_slots_has_none_to_bind():
    with pytest.raises(IndexError):
        ops.Bias(H).set_extra_input_channel(0, "a")
    with pytest.raises(IndexError):
        octavo.Linear(H, H).set_extra_output_channel(0, "a")


@pytest.mark.parametrize("name", ["", 3, b"a"], ids=str)
def test_a_name_that_is_no_name_is_a_value_error(name):
    with pytest.raises(ValueError):  # noqa: PT011
        Take().set_extra_input_channel(0, name)
    with pytest.raises(ValueError):  # noqa: PT011
        Emit().set_extra_output_channel(0, name)


@pytest.mark.parametrize("value", ["yes", 1, None], ids=str)
def test_output_to_caller_is_a_bool(value):
    with pytest.raises(TypeError):
        Emit().set_extra_output_channel(0, "a", output_to_caller=value)
    with pytest.raises(TypeError):
        ops.MakeExtraOutput(channel="a", output_to_caller=value)


def test_a_binding_may_change_until_the_operation_is_in_a_sequential():
    take = ops.AddExtraInput(source="a").set_extra_input_channel(0, "b")
    make = ops.MakeExtraOutput(channel="a").set_extra_output_channel(0, "b", output_to_caller=False)
    model, x = octavo.Sequential(make, take), whole(M, H)
    assert torch.equal(model(x), 2 * x)


@pytest.mark.parametrize("which", ["input", "output"])
def test_a_binding_is_fixed_once_the_operation_is_in_a_sequential(which):
    model, x = residual(ops.Identity()), whole(M, H)
    bind = model[-1].set_extra_input_channel if which == "input" else model[0].set_extra_output_channel
    with pytest.raises(RuntimeError):
        bind(0, "other")
    assert torch.equal(model(x), 2 * x)


def test_a_slice_that_cuts_a_channel_is_a_value_error():
    with pytest.raises(ValueError, match="residual"):
        residual(ops.Identity())[1:]


# -- across ordinary modules, and nested -------------------------------------------------------------------------------


def test_a_channel_across_ordinary_modules():
    plain = nn.Linear(H, H, bias=False)
    with torch.no_grad():
        plain.weight.copy_(whole(H, H, seed=40))
    model, x, dy = residual(plain, ops.ConstantScale(2.0), nn.Identity()), whole(M, H), whole(M, H, seed=1)
    dx, dw = linear_gradients(plain, x, 2 * dy)
    assert_equal(step(model, x, dy), [x + 2 * plain(x).detach(), dy + dx, dw])


@PUBLIC
def test_fan_out_across_ordinary_modules(public):
    model = octavo.Sequential(
        ops.ConstantScale(2.0),
        ops.MakeExtraOutput(channel="a", output_to_caller=public),
        nn.Identity(),
        ops.AddExtraInput(source="a"),
        nn.Identity(),
        ops.AddExtraInput(source="a"),
    )
    x, dy, droute = (whole(M, H, seed=i) for i in range(3))
    outputs, dys = ([6 * x, 2 * x], (dy, droute)) if public else ([6 * x], (dy,))
    assert_equal(step(model, x, dys), [*outputs, 6 * dy + (2 * droute if public else 0)])


def test_a_channel_goes_into_and_out_of_nested_sequentials():
    model = octavo.Sequential(
        octavo.Sequential(ops.MakeExtraOutput(channel="a", output_to_caller=False), ops.ConstantScale(2.0)),
        octavo.Sequential(ops.ConstantScale(3.0)),
        ops.AddExtraInput(source="a"),
    )
    x, dy = whole(M, H), whole(M, H, seed=1)
    assert_equal(step(model, x, dy), [7 * x, 7 * dy])


# -- and under a compiler ----------------------------------------------------------------------------------------------


COMPILED = {
    "residual": lambda: residual(linear()),
    "residual seen by the caller": lambda: residual(linear(), public=True),
    "made, with a consumer": lambda: emit_and_take(True),
    "across a module": lambda: residual(nn.Identity(), linear(), nn.Identity()),
    "fan-out": lambda: octavo.Sequential(
        ops.MakeExtraOutput(channel="a"), linear(), ops.AddExtraInput(source="a"), ops.AddExtraInput(source="a")
    ),
    "fused by the caller": lambda: emit_and_take(False, (ops.Joint(ops.Rule("seventeen", (Emit, Take), Joint)),)),
}


@pytest.mark.parametrize("build", COMPILED.values(), ids=COMPILED)
def test_a_graph_passes_extra_tensors_through_channels(build):
    model = build()
    twin, call = copy.deepcopy(model), compiled(model)
    for seed in range(2):
        x, dys = whole(M, H, seed=seed), [whole(M, H, seed=seed + 5), whole(M, H, seed=seed + 6)]
        dys = dys[: 2 if isinstance(twin(x), tuple) else 1]
        assert_equal(step(model, x, dys, call=call), step(twin, x, dys), f"step {seed}")


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "nvfp4"])
def test_a_residual_around_an_mlp_is_the_sum_by_hand(recipe):
    inner = mlp(recipe)
    model, twin = residual(*copy.deepcopy(list(inner))), copy.deepcopy(inner)
    x, dy = torch.randn(M, H), torch.randn(M, H)
    assert_equal(step(model, x, dy), step(twin, x, dy, call=lambda t: t + twin(t)))
