"""Sizes of a compiled Linear: one graph for any batch, none and one token, multiples of nothing, any strides."""

from itertools import cycle

import pytest
import torch

from octavo.recipes import SHIPPED
from tests.support.compiled_twins import (
    K,
    M,
    N,
    assert_logs,
    assert_step,
    bank,
    batch,
    batches,
    graphs,
    pair,
    refused,
    stepped,
)
from tests.support.linear_oracle import assert_same, spiky
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_a_batch_marked_dynamic_has_one_graph_after_one_call():
    model, twin = bank()
    call = compiled(model)
    for i, m in enumerate((24, 2, 7, 33, 130)):
        x, dy = batches(i, m)

        def marked(x, i=i):
            if i == 0:
                torch._dynamo.mark_dynamic(x, 1)
            return call(x)

        assert_step((model, twin), (marked, twin), (x, dy))
        assert graphs() == 1, f"{m} tokens"
    assert_state(model, twin)


def test_sizes_found_dynamic_on_the_way_take_two_graphs_at_most():
    model, twin = bank()
    call = compiled(model)
    for i, m in enumerate((24, 9, 33, 2, 65)):
        assert_step((model, twin), (call, twin), batches(i, m))
    assert 1 <= graphs() <= 2


def test_no_token_and_one_token_through_a_callable_compiled_for_many():
    model, twin = bank("bf16", "fp8-delayed", "fp8-block", "nvfp4")
    call = compiled(model, dynamic=True)
    for i, m in enumerate((24, 0, 1, 9, 0)):
        assert_step((model, twin), (call, twin), batches(i, m, 4))
        stepped(model, twin)
    assert_state(model, twin)
    assert 1 <= graphs() <= 4  # one of them for the step in which delayed scaling measures


SIZES = [(7, 33, 19), (13, 5, 1), (3, 131, 17), (5, 1, 3), (9, 129, 33), (13, 1, 5), (3, 35, 17)]
ODD = list(zip(SHIPPED, cycle(SIZES), strict=False))


@pytest.mark.parametrize(("recipe", "size"), ODD, ids=str)
def test_sizes_that_are_multiples_of_nothing(recipe, size):
    m, k, n = size
    layer, twin = pair(recipe, k, n)
    call = compiled(layer, dynamic=True)
    for i in range(2):
        assert_step((layer, twin), (call, twin), batch(i, m + 2 * i, k, n))
    assert graphs() == 1


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_a_wrong_number_of_features_is_said_with_both_numbers(dynamic):
    layer, twin = pair("fp8-block")
    call = compiled(layer, dynamic=dynamic)
    for i in range(2):  # the second time the callable has a graph, with sizes that are symbols
        assert refused(call, spiky(3 + i, 47), words=("47", "48"))
        assert_step((layer, twin), (call, twin), batch(i))  # and is as good as before


@pytest.mark.parametrize("recipe", ["nvfp4"])
def test_inputs_and_gradients_that_are_not_contiguous(recipe):
    layer, twin = pair(recipe, bias=False)
    call = compiled(layer)
    x, dy = batch(0)
    for form in (x.T.contiguous().T, torch.stack((x, x), -1)[..., 0], x.view(2, M // 2, K).transpose(0, 1)):
        given = dy if form.dim() == 2 else dy.view(2, M // 2, N).transpose(0, 1)
        logs = []
        for m, run in ((layer, call), (twin, twin)):
            m.zero_grad(set_to_none=True)
            leaf = form.detach().requires_grad_()
            assert not leaf.is_contiguous()
            y = run(leaf)
            (y * given).sum().backward()
            logs.append([y.detach(), leaf.grad, m.weight.grad])
        assert_logs(*logs)
    assert_state(layer, twin)


def test_a_gradient_that_is_one_number_expanded():
    layer, twin = pair("fp8-current")
    for m, call in ((layer, compiled(layer)), (twin, twin)):
        call(batch(0)[0]).sum().backward()
        assert m.weight.grad.any()
    assert_same(layer.weight.grad, twin.weight.grad)
