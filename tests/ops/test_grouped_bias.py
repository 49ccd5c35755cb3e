"""The bias of a GroupedLinear: added in float32, scaled by the token, and what its scales may be."""

import pytest
import torch

import octavo
from octavo.recipes import SHIPPED
from tests.support.experts import (
    DTYPES,
    LAYOUTS,
    NAN,
    ROWS,
    SPLITS,
    USED,
    Alone,
    K,
    N,
    assert_steps,
    batch,
    close,
    every,
    experts,
    grid,
    named,
    own,
    same_seed,
    sizes,
    slices,
    stacked,
    step,
)
from tests.support.linear_oracle import assert_same, spiky


def products(layer, recipe, x, splits=SPLITS):
    """x · Wᵀ of each group in float32."""
    found = torch.zeros(len(x), N)
    for weight, rows in zip(own(layer), slices(splits), strict=True):
        linear = octavo.Linear(K, N, bias=False, recipe=recipe)
        with torch.no_grad():
            linear.weight.copy_(weight)
            found[rows] = linear(x[rows].float())
    return found


@grid(SHIPPED, layout=LAYOUTS, dtype=DTYPES)
def test_a_bias_is_added_in_float32_and_rounded_once(recipe, layout, dtype):
    layer, (x, dy) = experts(recipe, dtype=dtype, **layout), batch(dtype=dtype)
    found, want = step(layer, x, dy), products(layer, recipe, x)
    for bias, rows in zip(own(layer, "bias"), slices(SPLITS), strict=True):
        want[rows] += bias.float()
    assert_same(found["y"], want.to(dtype))


@grid(SHIPPED, layout=LAYOUTS, dtype=DTYPES)
def test_a_bias_scaled_by_the_token(recipe, layout, dtype):
    """y bit by bit; the gradients of bias and scales against float64; those of x and the weight are as without."""
    layer = experts(recipe, dtype=dtype, scale_bias=True, **layout)
    (x, dy), scales = batch(dtype=dtype), spiky(ROWS, seed=4)
    scales[USED:] = NAN
    want_y, rest = products(layer, recipe, x), Alone(layer, recipe).step(x, dy)
    found = step(layer, x, dy, scales=scales)
    for g, rows in enumerate(slices(SPLITS)):
        bias = own(layer, "bias")[g].float()
        want_y[rows] += bias * scales[rows, None]
        d, s, b = dy[rows].double(), scales[rows, None].double(), bias.double()
        close(found["db"][g], (d * s).sum(0), (d * s).abs().sum(0), torch.finfo(dtype).eps)
        close(found["ds"][rows], (d * b).sum(1), (d * b).abs().sum(1), torch.finfo(torch.float32).eps)
    assert_same(found["y"], want_y.to(dtype))
    assert_same(found["dx"], rest["dx"])
    assert_same(found["dw"], rest["dw"])
    assert (found["ds"].dtype, found["db"].dtype) == (torch.float32, dtype)
    assert not found["ds"][USED:].any()


@every
def test_scales_of_one_are_no_scales(recipe):
    layer, twin = experts(recipe, scale_bias=True), experts(recipe)
    found, want = step(layer, *batch(), scales=torch.ones(ROWS)), step(twin, *batch())
    assert_steps({**found, "db": want["db"]}, want)
    close(found["db"], want["db"].double(), batch(poison=0.0)[1].abs().sum(0).double(), 1e-7)


@every
def test_scales_that_want_no_gradient_and_nothing_else_that_does(recipe):
    (x, dy), scales = batch(), spiky(ROWS, seed=4)
    layer = experts(recipe, scale_bias=True)
    want = step(layer, x, dy, scales=scales)
    same_seed(layer)
    layer.zero_grad()
    layer(x, sizes(), scales=scales).backward(dy)
    assert_same(stacked(layer, "bias"), want["db"])
    layer.requires_grad_(False)
    leaf = scales.clone().requires_grad_()
    layer(x, sizes(), scales=leaf).backward(dy)
    assert_same(leaf.grad, want["ds"])


@every
def test_a_frozen_bias_still_passes_the_gradient_of_its_scales(recipe):
    (x, dy), scales = batch(), spiky(ROWS, seed=4)
    layer, twin = experts(recipe, scale_bias=True), experts(recipe, scale_bias=True)
    layer.bias.requires_grad_(False)
    found, want = step(layer, x, dy, scales=scales), step(twin, x, dy, scales=scales)
    assert found["db"] is None
    assert_steps({**found, "db": want["db"]}, want)


def test_scales_are_wanted_where_they_are_used_and_nowhere_else():
    x = batch()[0]
    with pytest.raises(ValueError, match="scales"):
        experts("fp8-current")(x, sizes(), scales=torch.ones(ROWS))
    scaled = experts("fp8-current", scale_bias=True)
    with pytest.raises(ValueError, match="scales"):
        scaled(x, sizes())
    for wrong in (torch.ones(ROWS - 1), torch.ones(USED), torch.ones(ROWS, 2), torch.ones(ROWS, device="meta")):
        with pytest.raises(ValueError, match="scales"):
            scaled(x, sizes(), scales=wrong)
    with pytest.raises((ValueError, TypeError), match="scales"):
        scaled(x, sizes(), scales=torch.ones(ROWS, dtype=torch.int64))


@grid(SHIPPED, layout=LAYOUTS)
def test_a_layer_without_a_bias(recipe, layout):
    layer = experts(recipe, bias=False, **layout)
    assert not named(layer, "bias")
    assert_steps(step(layer, *batch()), Alone(layer, recipe).step(*batch()))
