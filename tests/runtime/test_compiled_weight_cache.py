"""The weight cache that a graph reads: filled, refreshed and completed as in eager mode."""

import copy

import pytest
import torch

import octavo
from tests.support.compiled_twins import K, N, assert_step, bank, batch, batches, graphs, pair
from tests.support.linear_oracle import assert_same, make, spiky
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_a_cache_filled_without_gradients_is_completed_by_a_compiled_training_step():
    model, twin = bank()
    call = compiled(model)
    x = batches(9)[0]
    with torch.no_grad():
        for m in (model, twin):
            m(x, is_first_microbatch=True)
    for i in range(2):
        assert_step((model, twin), (call, twin), batches(i), is_first_microbatch=False)
    with torch.no_grad():  # and inference reads what training left
        assert_same(call(x, is_first_microbatch=False), twin(x, is_first_microbatch=False))
    assert_state(model, twin)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_an_attached_optimizer_refreshes_the_cache_a_graph_reads(recipe):
    layer, twin = pair(recipe)
    call = compiled(layer)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (layer, twin)]
    for m, optimizer in zip((layer, twin), optimizers, strict=True):
        octavo.attach(m, optimizer)
    outputs = []
    for i in range(4):
        found = assert_step((layer, twin), (call, twin), batch(i), is_first_microbatch=i == 0)
        outputs.append(found["y"])
        before = layer.weight.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
        assert not torch.equal(before, layer.weight)
        assert_same(layer.weight.detach(), twin.weight.detach())
    assert_state(layer, twin)
    assert graphs() == 2
    with torch.no_grad():  # the codes are those of the newest weight
        assert_same(call(batch(9)[0], is_first_microbatch=False), twin(batch(9)[0]))


def test_deferred_backwards_of_cached_codes_and_main_grad_together():
    layer, twin = pair("fp8-block", fuse_wgrad_accumulation=True)
    call = compiled(layer)
    for m in (layer, twin):
        m.weight.main_grad = torch.zeros(N, K)
    for step in range(2):
        for run in (call, twin):
            outputs = [run(batch(3 * step + i)[0], is_first_microbatch=i == 0) for i in range(3)]
            for i, y in enumerate(outputs):
                y.backward(batch(3 * step + i)[1])
        assert_same(layer.weight.main_grad, twin.weight.main_grad)
        with torch.no_grad():
            for m in (layer, twin):
                m.weight.sub_(m.weight.main_grad * 0.01)
    assert layer.weight.grad is None and layer.weight.main_grad.any()


@pytest.mark.parametrize("pair", [("fp8-block", "fp8-block(scale='fp32')"), ("mxfp8", "fp8-current")], ids=str)
def test_a_graph_does_not_use_codes_that_another_recipe_left(pair):
    layer, x = make(None), spiky(24, 48)
    call, twin = compiled(layer), copy.deepcopy(layer)
    for recipe, first in ((pair[0], True), (pair[0], False), (pair[1], True), (pair[1], False), (pair[0], False)):
        with octavo.autocast(recipe):
            assert_same(call(x, is_first_microbatch=first), twin(x), recipe)
