"""Legacy operations and legacy fused operations with extra inputs and outputs, and what their context says."""

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig
from tests.support.custom_operations import Doubled, Emit, Take, define
from tests.support.linear_oracle import spiky
from tests.support.sequentials import H
from tests.support.steps import assert_equal, step


class Mixed(ops.BasicOperation):
    """y = weight · x + extra0, and x · extra1 beside it, as one function."""

    num_extra_inputs = 2
    num_extra_outputs = 1
    by_name = True

    def __init__(self, size=H):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, size))

    def op_forward(self, ctx, x, first, second, scale=1.0):
        ctx.save_for_backward(x, second)
        ctx.scale = scale
        return scale * (self.weight * x + first), (x * second,)

    def op_backward(self, ctx, dy, dextra):
        x, second = ctx.saved_tensors
        dy = ctx.scale * dy
        dx = self.weight.detach() * dy + second * dextra
        dweight, dfirst, dsecond = (dy * x).sum(0), dy, x * dextra
        if self.by_name:
            return {"extra1": dsecond, "x": dx, "weight": dweight, "extra0": dfirst}
        return dx, (dweight,), (dfirst, dsecond)


class Split(Mixed):
    """The same with a forward that is split."""

    params = ("weight",)

    @staticmethod
    def fuser_forward_compute(config, inputs):
        return inputs.weight * inputs.x + inputs.extra0, (inputs.x * inputs.extra1,), ()

    @staticmethod
    def fuser_forward_save_ctx(config, inputs, outputs, fresh):
        return inputs.x, inputs.weight, inputs.extra1

    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        x, weight, second = saved
        dy, dextra = (torch.zeros_like(x) if g is None else g for g in grads)
        return {"x": weight * dy + second * dextra, "weight": (dy * x).sum(0), "extra0": dy, "extra1": x * dextra}


def tensors(count=3, seed=0):
    return [spiky(4, H, seed=seed + i) for i in range(count)]


@pytest.mark.parametrize("by_name", [True, False])
def test_extra_inputs_and_outputs_of_a_legacy_operation(by_name):
    old, new, given, dys = Mixed(), Split(), tensors(), tensors(2, seed=9)
    old.by_name = by_name
    assert_equal(step(old, given, dys), step(new, given, dys))
    one, two = (octavo.Sequential(Doubled(), op, ops.ConstantScale(0.5)) for op in (old, new))
    assert_equal(step(one, given, dys), step(two, given, dys))
    assert_equal(step(one, given, (dys[0], None)), step(two, given, (dys[0], None)))


def test_channels_reach_and_leave_a_legacy_operation():
    def chained(kind):
        return octavo.Sequential(
            Emit().set_extra_output_channel(0, "a", output_to_caller=False),
            Take().set_extra_input_channel(0, "a"),
            kind().set_extra_input_channel(0, "a").set_extra_output_channel(0, "b", output_to_caller=False),
            Doubled(),
            Take().set_extra_input_channel(0, "b"),
        )

    given, dy = tensors(2), spiky(4, H, seed=7)
    assert_equal(step(chained(Mixed), given, dy), step(chained(Split), given, dy))


def test_a_graph_breaks_around_one_that_is_not_strict():
    torch._dynamo.reset()
    model, given, dys = octavo.Sequential(Doubled(), Mixed(), ops.ConstantScale(0.5)), tensors(), tensors(2, seed=9)
    model[1].strict = False
    want = step(model, given, dys)
    assert_equal(step(model, given, dys, call=torch.compile(model, backend="aot_eager")), want)
    model[1].strict = True
    with pytest.raises(Exception, match="a graph cannot tell what it saves"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(*given)


def test_the_context_says_whether_there_is_a_backward():
    said = []

    def forward(self, ctx, x):
        said.append(ctx.requires_grad)
        return 2 * x

    op = define({"op_forward": forward, "op_backward": lambda self, ctx, dy: (2 * dy, ())})()
    x = spiky(4, H)
    op(x), op(x.requires_grad_()), octavo.Sequential(ops.ConstantScale(1.0), op)(x)
    with torch.no_grad():
        op(x)
    assert said == [False, True, True, False]


def test_what_a_legacy_operation_returns_is_counted():
    def forward(found):
        return {"op_forward": lambda self, ctx, x, a, b: found(x)}

    for found, said in (
        (lambda x: x * 2, "returns y and a tuple of extra outputs"),
        (lambda x: (x * 2, ()), r"returns \[1\] extra outputs, by operation, got \[0\]"),
        (lambda x: (x * 2, (3,)), "returns tensors, got"),
    ):
        with pytest.raises(RuntimeError, match=said):
            define(forward(found), Mixed)()(*tensors())
    with pytest.raises(ValueError, match="takes 2 extra inputs besides x, got 1"):
        Mixed()(*tensors(2))
    two = define({"op_backward": lambda self, ctx, dy, dextra: (dy, ())}, Mixed)()
    with pytest.raises(RuntimeError, match="gradients of the extra inputs"):
        two(*[t.requires_grad_() for t in tensors()])[0].sum().backward()
    unlike = define({"op_backward": lambda self, ctx, dy, dextra: {"extra1": dy[:1]}}, Mixed)()
    with pytest.raises(RuntimeError, match="gradient of extra1"):
        unlike(*[t.requires_grad_() for t in tensors()])[0].sum().backward()


class OldDoubleMixed(ops.FusedOperation):
    """Doubled, then Mixed, as one legacy fused operation."""

    @staticmethod
    def fuser_forward(ctxs, inputs):
        x, own = 2 * inputs[0].x, inputs[1]
        assert ctxs[0].requires_grad == ctxs[1].requires_grad
        ctxs[1].save_for_backward(x, own.weight, own.extra1)
        return own.weight * x + own.extra0, ((), (x * own.extra1,))

    @staticmethod
    def fuser_backward(ctxs, dy, dextra):
        x, weight, second = ctxs[1].saved_tensors
        dx = 2 * (weight * dy + second * dextra)
        return {"x": dx}, {"weight": (dy * x).sum(0), "extra0": dy, "extra1": x * dextra}


RULE = ops.Rule("old-double-mixed", (Doubled, Split), OldDoubleMixed)


def test_extra_inputs_and_outputs_of_a_legacy_fused_operation():
    given, dys = tensors(), tensors(2, seed=9)
    fused = octavo.Sequential(Doubled(), Split(), ops.ConstantScale(0.5), rules=(ops.Joint(RULE),))
    assert fused.explain(*given).fired == ("old-double-mixed",)
    assert_equal(step(fused, given, dys), step(octavo.Sequential(*fused, rules=None), given, dys))


def test_channels_around_a_legacy_fused_operation():
    def chained(rules):
        return octavo.Sequential(
            Emit().set_extra_output_channel(0, "a", output_to_caller=False),
            Take().set_extra_input_channel(0, "a"),
            Doubled(),
            Split().set_extra_input_channel(1, "a").set_extra_output_channel(0, "b"),
            Take().set_extra_input_channel(0, "b"),
            rules=rules,
        )

    given, dys = tensors(2), tensors(2, seed=9)
    fused = chained((ops.Joint(RULE),))
    assert fused.explain(*given).fired == ("old-double-mixed",)
    assert_equal(step(fused, given, dys), step(chained(None), given, dys))


def test_a_channel_inside_a_legacy_fused_operation_is_refused():
    class Old(ops.FusedOperation):
        @staticmethod
        def fuser_forward(ctxs, inputs):
            return inputs[0].x, ((None,), ())

        @staticmethod
        def fuser_backward(ctxs, dy, dextra):
            return {"x": dy}, {}

    model = octavo.Sequential(
        Emit().set_extra_output_channel(0, "a"), Take().set_extra_input_channel(0, "a"),
        rules=(ops.Joint(ops.Rule("old-pair", (Emit, Take), Old)),),
    )  # fmt: skip
    with pytest.raises(UnsupportedConfig, match="the channel 'a' joins two operations of its pattern"):
        model(spiky(4, H))


def test_a_function_in_place_of_a_rule_is_refused_in_a_sentence():
    def fuse(ops, *, recipe=None):
        return ops

    for register in (
        ops.register_forward_fusion, ops.register_backward_fusion, ops.register_forward_backward_fusion,
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"{register.__name__} takes a Rule, got the function .*fuse"):
            register(fuse)


def test_a_channel_is_taken_back_by_none():
    emit = Emit().set_extra_output_channel(0, "a", output_to_caller=False).set_extra_output_channel(0, None)
    take = Take().set_extra_input_channel(0, "a").set_extra_input_channel(0, None)
    x, extra = tensors(2)
    y, beside = octavo.Sequential(emit, take)(x, extra)
    assert torch.equal(beside, 3 * x) and torch.equal(y, octavo.Sequential(Emit(), Take())(x, extra)[0])
    with pytest.raises(UnsupportedConfig, match="has no channel, and the caller is not to get it either"):
        Emit().set_extra_output_channel(0, None, output_to_caller=False)
