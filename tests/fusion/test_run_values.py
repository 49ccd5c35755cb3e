"""Runs on odd sizes, odd values and odd strides give what their operations give one by one."""

import copy

import pytest
import torch

import octavo
from octavo import ops
from octavo.kernels.activation import ACTIVATIONS
from tests.support.linear_oracle import spiky
from tests.support.sequentials import H, M, assert_unfused, batch, every, fill, linear, residual, sample, unfused
from tests.support.steps import assert_equal, compiled, step


@every
@pytest.mark.parametrize("act", [ops.SwiGLU, ops.GELU], ids=lambda act: act.NAME)
@pytest.mark.parametrize(("h", "f", "m"), [(35, 37, 5), (33, 130, 1), (129, 17, 131), (1, 1, 3), (16, 16, 0)], ids=str)
def test_sizes_that_are_multiples_of_nothing(recipe, act, h, f, m):
    wide = 2 * f if ACTIVATIONS[act.NAME].gated else f
    model = octavo.Sequential(
        ops.MakeExtraOutput(channel="r", output_to_caller=False),
        ops.RMSNorm(h),
        octavo.Linear(h, wide, recipe=recipe),
        act(),
        octavo.Linear(f, h, recipe=recipe),
        ops.AddExtraInput(source="r"),
    )
    assert_unfused(fill(model), spiky(m, h, seed=m), spiky(m, h, seed=3))


NAN, INF = float("nan"), float("inf")


@every
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e38, 1e-42], ids=str)
@pytest.mark.parametrize("where", ["x", "dy"])
def test_values_that_are_no_numbers_and_extreme_ones_end_up_where_they_do_unfused(recipe, value, where):
    x, dy = batch()
    (x if where == "x" else dy)[3, 5] = value
    assert_unfused(residual(recipe), x, dy)


@every
@pytest.mark.parametrize("where", ["x", "dy"])
def test_zeros_of_x_or_dy_fuse_with_the_same_bits(recipe, where):
    x, dy = batch()
    assert_unfused(residual(recipe), 0 * x if where == "x" else x, 0 * dy if where == "dy" else dy)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_strides_do_not_matter(recipe):
    model, (x, dy) = residual(recipe), batch()
    want = step(model, x, dy)
    leaf = x.t().contiguous().t().requires_grad_()
    model.zero_grad()
    y = model(leaf)
    y.backward(dy.t().contiguous().t())
    assert_equal([y.detach(), leaf.grad, *(p.grad for p in model.parameters())], want)


def test_a_gradient_that_is_one_element_everywhere():
    model, twin, (x, _) = residual("fp8-current"), residual("fp8-current"), batch()
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    want = step(twin, x, torch.ones(M, H))
    assert_equal([leaf.grad, *(p.grad for p in model.parameters())], want[1:])


@sample
def test_no_tokens_compiled(recipe):
    model, (x, dy) = residual(recipe), batch(0)
    twin = copy.deepcopy(model)
    assert_equal(step(model, x, dy, call=compiled(model)), step(twin, x, dy))


def test_a_hundred_operations():
    model = octavo.Sequential(*[ops.ConstantScale(1 + i / 1000) for i in range(100)])
    x, dy = batch()
    want = step(unfused(model), x, dy)
    assert_equal(step(model, x, dy), want)
    assert_equal(step(model, x, dy, call=compiled(model)), want)


def test_a_number_has_no_columns():
    with pytest.raises(octavo.errors.UnsupportedShape, match=r"got \(\)"):
        octavo.Sequential(ops.GELU(), linear())(torch.tensor(1.0))


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_deterministic_mode_is_no_error_and_repeats(recipe):
    layers = [ops.LayerNorm(H), linear(recipe=recipe), ops.GELU(), ops.Bias(H)]
    model, x, dy = fill(octavo.Sequential(*layers)), *batch()
    want = step(model, x, dy)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            assert_equal(step(model, x, dy), want)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("last", [octavo.Linear(0, 8), ops.Bias(0)], ids=lambda op: type(op).__name__)
def test_a_layer_of_no_features(last):
    x = torch.randn(M, H, requires_grad=True)
    model = octavo.Sequential(octavo.Linear(H, 0), last)
    y = model(x)
    assert y.shape == (M, 8 if isinstance(last, octavo.Linear) else 0)
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros(M, H))
