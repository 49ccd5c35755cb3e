"""A recipe that a program registers, of two schemes, in layers, graphs and groups: no list of recipes names it."""

import copy

import pytest
import torch

import octavo
from octavo import ops
from tests.support.experts import Alone, assert_steps, experts, step
from tests.support.experts import batch as batch_of_groups
from tests.support.linear_oracle import assert_result, assert_same, check, expected, make, run
from tests.support.mixed_recipe import MIXED
from tests.support.steps import batch, compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_multiplies_the_codes_of_both_schemes(dtype):
    layer, (x, dy) = make(MIXED, 144, 40, dtype=dtype), batch(m=37, k=144, dtype=dtype)
    check(layer, MIXED, x, dy)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_has_the_bits_of_the_layer():
    layer, (x, dy) = make(MIXED), batch()
    call = compiled(layer)
    y = call(x.requires_grad_())
    y.backward(dy)
    want = expected(MIXED, x, layer.weight, layer.bias, dy)
    assert_same(y.detach(), want.y)
    assert_same(layer.weight.grad, want.dw)


def test_cached_codes_give_the_bits_of_a_cast():
    layer, (x, dy) = make(MIXED), batch()
    want = run(copy.deepcopy(layer), x, dy)
    for first in (True, False):
        assert_result(run(layer, x, dy, is_first_microbatch=first), want)


def test_each_group_has_the_bits_that_its_rows_have_alone():
    layer, (x, dy) = experts(MIXED), batch_of_groups()
    assert_steps(step(layer, x, dy), Alone(layer, MIXED).step(x, dy))


def test_a_fused_run_has_the_bits_of_its_layers():
    torch.manual_seed(0)
    fused = octavo.Sequential(ops.RMSNorm(64), octavo.Linear(64, 96, bias=False, recipe=MIXED))
    unfused = octavo.Sequential(*copy.deepcopy(list(fused)), rules=None)
    x, dy = batch(k=64, n=96)
    results = []
    for model in (fused, unfused):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], dy)])
    for a, b in zip(*results, strict=True):
        assert_same(a, b)
