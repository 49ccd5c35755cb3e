"""Grouped layers inside a Sequential: extra inputs, codes, frozen groups, parameters that do not match."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from octavo.errors import Unsupported
from octavo.quant.grouped import quantize_groups
from octavo.quant.groups import split
from tests.support.linear_oracle import assert_same, spec_of, spiky
from tests.support.sequentials import FFN, H, batch, every, fill
from tests.support.sequentials import M as TOKENS
from tests.support.steps import assert_equal, assert_state, step

M, K, N = 32, 48, 40


SPLITS = torch.tensor([20, 0, 12])


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a Sequential"])
def test_codes_of_groups_stand_for_their_values(recipe, inside):
    layer, x = fill(octavo.GroupedLinear(3, K, N, recipe=recipe)), spiky(M, K)
    row, _ = quantize_groups(x, spec_of(recipe), None, split(SPLITS, M))
    call = octavo.Sequential(layer) if inside else layer
    assert_same(call(row, SPLITS).detach(), layer(row.dequantize(), SPLITS).detach())


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8"])
def test_a_gradient_in_codes_stands_for_its_values(recipe):
    """A Quantize behind a grouped layer hands it the values of codes; so does one who quantizes dy first."""
    layer, x, dy = fill(octavo.GroupedLinear(3, K, N, recipe=recipe)), spiky(M, K), spiky(M, N, seed=1)
    quantize = ops.Quantize(recipe=recipe, forward=False, backward=True)
    z = torch.zeros(M, N).requires_grad_()
    quantize(z).backward(dy)
    assert not torch.equal(z.grad, dy)
    want = step(copy.deepcopy(layer), (x, SPLITS), z.grad)
    assert_equal(step(octavo.Sequential(layer, quantize), (x, SPLITS), dy), want)


def test_codes_of_the_wrong_shape_are_refused():
    layer = octavo.GroupedLinear(3, K, N, recipe="fp8-current")
    row, _ = quantize_groups(spiky(M, K + 16), spec_of("fp8-current"), None, split(SPLITS, M))
    with pytest.raises(ValueError, match=str(K)):
        octavo.Sequential(layer)(row, SPLITS)


def test_groups_on_two_devices_are_refused():
    layer = octavo.GroupedLinear(3, K, N, single_grouped_weight=False, single_grouped_bias=False)
    layer.weight1 = nn.Parameter(layer.weight1.detach().to("meta"))
    with pytest.raises((Unsupported, RuntimeError)):
        octavo.Sequential(layer)(spiky(M, K), SPLITS)


def test_groups_of_two_dtypes_are_refused_or_each_has_a_gradient_of_its_own():
    layer = fill(octavo.GroupedLinear(3, K, N, single_grouped_weight=False, single_grouped_bias=False))
    layer.weight2 = nn.Parameter(layer.weight2.detach().bfloat16())
    twin = copy.deepcopy(layer)
    twin.weight2 = nn.Parameter(layer.weight2.detach().float())
    x, dy = spiky(M, K), spiky(M, N, seed=1)
    try:
        found = step(octavo.Sequential(layer), (x, SPLITS), dy)
    except (Unsupported, RuntimeError):
        return
    want = step(twin, (x, SPLITS), dy)
    assert layer.weight2.grad.dtype == torch.bfloat16
    for a, b in zip(found, want, strict=True):
        assert_same(a, b if a is None else b.to(a.dtype))


def test_groups_of_which_one_is_frozen_give_the_others_their_gradients():
    layer = fill(octavo.GroupedLinear(3, K, N, single_grouped_weight=False, recipe="fp8-current"))
    layer.weight1.requires_grad_(False)
    model, twin = octavo.Sequential(layer), copy.deepcopy(layer)
    x, dy = spiky(M, K), spiky(M, N, seed=1)
    found = step(model, (x, SPLITS), dy)
    assert_equal(found, step(twin, (x, SPLITS), dy))
    assert layer.weight1.grad is None and layer.weight0.grad is not None


@every
def test_experts_in_a_sequential_are_the_modules_one_after_the_other(recipe):
    layers = [octavo.GroupedLinear(3, *sizes, recipe=recipe) for sizes in ((H, 2 * FFN), (FFN, H))]
    model = fill(octavo.Sequential(ops.RMSNorm(H), layers[0], ops.ScaledSwiGLU(), layers[1], ops.ConstantScale(0.5)))
    twin, probs = copy.deepcopy(model), torch.rand(TOKENS)

    def by_hand(x, sizes, probs, again):
        norm, first, act, second, scale = twin
        return scale(second(act(first(norm(x), sizes), probs), again))

    for seed, splits in enumerate(([10, 0, 14], [24, 0, 0], [3, 20, 1])):
        (x, dy), sizes = batch(seed=seed), torch.tensor(splits)
        inputs = (x, sizes, probs, sizes)
        assert_equal(step(model, inputs, dy), step(twin, inputs, dy, call=by_hand), str(splits))
        octavo.step(model), octavo.step(twin)
    assert_state(model, twin)
