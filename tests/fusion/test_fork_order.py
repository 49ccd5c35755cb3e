"""Where several gradients of one value are added, they are added in one order, fused, unfused, called one by one and
compiled. At a fork: those of the extra output, the last use first, then that of y, then what else uses x."""

import itertools

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from tests.support.custom_operations import Emit, Take
from tests.support.sequentials import H, M, fill
from tests.support.steps import assert_equal, compiled

FIRST = {
    "linear-add": lambda: octavo.Linear(H, H, bias=False, recipe="fp8-current"),
    "gelu": ops.GELU,
    "an ordinary module": nn.Tanh,
}


def forked(first, consumers, public=True, **settings):
    """x forks, goes through `first`, and is added again by each consumer."""
    own = [ops.MakeExtraOutput(channel="r", output_to_caller=public), first]
    for i in range(consumers):
        own += [ops.ConstantScale(0.7 + i), ops.AddExtraInput(source="r")]
    return fill(octavo.Sequential(*own, **settings))


def one_by_one(model, *, public=True):
    def call(x):
        extra = None
        for op in model:
            if op.__class__ in (ops.MakeExtraOutput, Emit):
                x, extra = op(x)
            elif op.__class__ in (ops.AddExtraInput, Take):
                x = op(x, extra)
            else:
                x = op(x)
        return (x, extra) if public else x

    return call


def used_elsewhere(call):
    """x is used before and after, and the extra output twice."""

    def around(x):
        before = x * 1.3
        y, extra = call(x)
        return y, extra * 0.9, extra.tanh(), before, x.sin()

    return around


def gradients(call, dtype=torch.float32, *, inner=False):
    """What reaches x, a leaf or a value that was computed."""
    draws = (torch.randn(M, H, generator=torch.Generator().manual_seed(i), dtype=dtype) for i in itertools.count())
    leaf = next(draws).requires_grad_()
    outputs = call(leaf * 1.5 if inner else leaf)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [next(draws) for _ in outputs])
    return [leaf.grad]


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize(("consumers", "public"), [(1, True), (2, True), (3, False)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_three_gradients_at_a_fork_in_one_order(first, consumers, public, dtype):
    model = forked(FIRST[first](), consumers, public).to(dtype)
    by_hand = one_by_one(model, public=public)
    want = gradients(by_hand, dtype)
    assert_equal(gradients(model, dtype), want, "fused")
    assert_equal(gradients(octavo.Sequential(*model, rules=None), dtype), want, "unfused")
    assert_equal(gradients(compiled(model), dtype), want, "compiled")
    assert_equal(gradients(compiled(by_hand), dtype), want, "one by one, compiled")


@pytest.mark.parametrize("first", FIRST)
def test_a_fork_whose_x_and_extra_output_are_used_elsewhere(first):
    model = forked(FIRST[first](), 2)
    calls = [used_elsewhere(call) for call in (one_by_one(model), model)]
    for inner in (False, True):
        want = gradients(calls[0], inner=inner)
        assert_equal(gradients(calls[1], inner=inner), want, "fused")
        for call in calls:
            assert_equal(gradients(compiled(call), inner=inner), want, "compiled")


@pytest.mark.parametrize("fork", [ops.MakeExtraOutput, Emit])
def test_a_fork_after_another_operation(fork):
    model = octavo.Sequential(
        ops.GELU(), fork().set_extra_output_channel(0, "r"), ops.SiLU(), ops.AddExtraInput(source="r"),
        Take().set_extra_input_channel(0, "r"), ops.ConstantScale(0.3), ops.AddExtraInput(source="r"),
    )  # fmt: skip
    want = gradients(one_by_one(model))
    assert_equal(gradients(model), want, "fused")
    assert_equal(gradients(compiled(model)), want, "compiled")


def test_gradients_at_a_fork_are_added_the_last_use_first():
    """By numbers that only one order adds up to: 2^24 swallows a 1 that is added to it, and not a 2."""
    x = torch.zeros(1, H, requires_grad=True)
    model = octavo.Sequential(
        ops.MakeExtraOutput(channel="r"), ops.ConstantScale(0.0), ops.AddExtraInput(source="r"),
        ops.ConstantScale(2.0**24), ops.AddExtraInput(source="r"),
    )  # fmt: skip
    y, extra = model(x)
    torch.autograd.backward([y, extra], [torch.ones(1, H), torch.ones(1, H)])
    assert (x.grad == 2**24 + 2).all()  # (1 + 1) + 2^24; 1 + 2^24 first would lose both


def test_a_fork_without_gradients_is_x_itself():
    fork, x = ops.MakeExtraOutput(), torch.randn(M, H)
    assert all(t is x for t in fork(x))
    with torch.no_grad():
        assert all(t is x for t in fork(x.requires_grad_()))


def test_layers_and_extra_inputs_that_are_in_one_run_three_times():
    layer, norm, add = octavo.Linear(H, H, recipe="fp8-current"), ops.RMSNorm(H), ops.AddExtraInput()
    model = fill(octavo.Sequential(norm, layer, add, norm, layer, add, norm, layer, add))

    def by_hand(x, extra, *_):
        for op in model:
            x = op(x, extra) if op is add else op(x)
        return x

    def step(call):
        x, extra, dy = (torch.randn(M, H, generator=torch.Generator().manual_seed(i)) for i in range(3))
        model.zero_grad()
        call(x.requires_grad_(), *[extra.requires_grad_()] * 3).backward(dy)
        return [x.grad, extra.grad, *[p.grad for p in model.parameters()]]

    want = step(by_hand)
    assert_equal(step(model), want, "fused")
    assert_equal(step(compiled(model)), want, "compiled")
