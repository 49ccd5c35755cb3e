"""The backward of a compiled Linear: what it saves and releases, a second one, eager ones beside it."""

import gc
import weakref

import pytest
import torch
from torch import nn

import octavo
from octavo.recipes import SHIPPED
from tests.support.compiled_twins import (
    K,
    N,
    assert_logs,
    assert_results,
    assert_step,
    bank,
    batch,
    batches,
    pair,
    results,
    stepped,
)
from tests.support.linear_oracle import assert_same, seed_of
from tests.support.recipe_traits import WITHOUT_BUFFERS, is_stochastic
from tests.support.state_tensors import state_tensors
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


# -- saved tensors -----------------------------------------------------------------------------------------------------


class Moved:
    """Hooks that move every saved tensor away and back, as an offloader does. (On a CPU save_on_cpu moves nothing.)"""

    def __init__(self, owner):
        self.packed = self.unpacked = self.bytes = 0
        self.owned = {t.untyped_storage().data_ptr() for t in (*owner.parameters(), *state_tensors(owner))}

    def pack(self, tensor):
        self.packed += 1
        if tensor.untyped_storage().data_ptr() not in self.owned:
            self.bytes += tensor.numel() * tensor.element_size()
        return tensor.detach().clone()

    def unpack(self, tensor):
        self.unpacked += 1
        return tensor.clone()

    def around(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


HOOKED = [
    (recipe, mode, main_grad) for recipe in SHIPPED for mode in ("eager", "compiled") for main_grad in (False, True)
]


@pytest.mark.parametrize(("recipe", "mode", "main_grad"), HOOKED)
def test_saved_tensors_pass_through_hooks(recipe, mode, main_grad):
    layer, twin = pair(recipe, fuse_wgrad_accumulation=main_grad)
    for m in (layer, twin):
        m.weight.main_grad = torch.zeros(N, K)
    call, hooks = compiled(layer) if mode == "compiled" else layer, Moved(layer)
    for i, around in enumerate((hooks.around, torch.autograd.graph.save_on_cpu) * 2):

        def hooked(x, around=around):
            with around():
                return call(x)

        assert_step((layer, twin), (hooked, twin), batch(i))
        assert_same(layer.weight.main_grad, twin.weight.main_grad)
        stepped(layer, twin)
    assert hooks.packed and hooks.packed == hooks.unpacked
    assert_state(layer, twin)


def test_hooks_of_a_block_are_the_programs_again_after_it():
    layer, twin = pair("fp8-delayed")
    call, outer = compiled(layer), Moved(layer)
    with outer.around():
        with torch.autograd.graph.save_on_cpu():
            first = call(batch(0)[0])
        before = outer.packed
        second = call(batch(1)[0])
        after = outer.packed
        torch.ones(3, requires_grad=True).exp()
        assert before == 0 < after < outer.packed
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    want = [twin(batch(i)[0]) for i in range(2)]
    for found, y in zip((first, second), want, strict=True):
        assert_same(found, y)
        found.sum().backward(), y.sum().backward()
    assert_state(layer, twin)


def test_hooks_around_a_graph_that_defers_its_weight_gradient_are_refused():
    """Backward would leave the operands of dw in a copy."""
    layer, _ = pair("bf16", delay_wgrad_compute=True)
    call = compiled(layer)
    with (
        Moved(layer).around(),
        pytest.raises(octavo.errors.UnsupportedConfig, match="leave the operands of dw in a copy"),
    ):
        call(batch(0)[0])


@pytest.mark.parametrize("recipe", WITHOUT_BUFFERS)
def test_a_graph_saves_no_more_bytes_than_eager(recipe):
    """The module's own weight and buffers cost nothing to save."""
    layer, twin = pair(recipe)
    hooks = []
    for m, call in ((layer, compiled(layer)), (twin, twin)):
        hooks.append(Moved(m))
        with hooks[-1].around():
            call(batch(0)[0].requires_grad_())
    compiled_bytes, eager_bytes = (hook.bytes for hook in hooks)
    assert 0 < compiled_bytes <= eager_bytes


# -- the counter of stochastic rounding --------------------------------------------------------------------------------


def test_the_rounding_counter_advances_once_for_each_compiled_backward():
    layer, twin = pair("nvfp4")
    call, start = compiled(layer), seed_of(layer)
    weights = []
    for i in range(3):
        with torch.no_grad():
            call(batch(i)[0])  # inference draws nothing
        data = batch(0)  # the same every time, so that only the counter makes a difference
        weights.append(assert_step((layer, twin), (call, twin), data)["weight"])
        assert_same(seed_of(layer), start + torch.tensor([0, i + 1]))
        assert_same(seed_of(layer), seed_of(twin))
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    octavo.load_state_dict(layer, {key: value for key, value in octavo.state_dict(pair("nvfp4")[0]).items()})
    octavo.load_state_dict(twin, octavo.state_dict(layer))
    assert_step((layer, twin), (call, twin), batch(5))  # and a loaded counter is the one a graph reads


def test_a_loaded_counter_repeats_a_compiled_step():
    layer, _ = pair("nvfp4")
    call = compiled(layer)
    kept = {key: value.clone() for key, value in octavo.state_dict(layer).items()}
    first = results(layer, call, *batch(0))
    assert not torch.equal(results(layer, call, *batch(0))["weight"], first["weight"])
    octavo.load_state_dict(layer, kept)
    assert_results(results(layer, call, *batch(0)), first)


# -- order and number of backwards -------------------------------------------------------------------------------------


def test_a_second_backward_through_a_retained_graph():
    """Buffers a compiled backward may overwrite are torch's own setting, and it asks for this one to be off."""
    model, twin = bank()
    logs = []
    with torch._functorch.config.patch(donated_buffer=False):
        for m, call in ((model, compiled(model)), (twin, twin)):
            leaf = batches(0)[0].requires_grad_()
            y = call(leaf)
            logs.append([])
            for retain in (True, False):
                m.zero_grad(set_to_none=True)
                leaf.grad = None
                y.backward(batches(0)[1], retain_graph=retain)
                logs[-1].append([leaf.grad, *[p.grad for p in m.parameters()]])
    (first, second), want = logs
    assert_logs(first, want[0])
    assert_logs(second, want[1])
    dw = [model_grads[1::2] for model_grads in (first, second)]  # one of each recipe; a stochastic one rounds anew
    assert [torch.equal(a, b) for a, b in zip(*dw, strict=True)] == [not is_stochastic(recipe) for recipe in SHIPPED]
    assert_state(model, twin)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
def test_eager_and_compiled_microbatches_in_flight_together(recipe, order):
    layer, twin = pair(recipe)
    call = compiled(layer)
    for calls in ((call, layer, call), (twin, twin, twin)):
        outputs = [run(batch(i)[0]) for i, run in enumerate(calls)]
        for i in (*order, 2):
            outputs[i].backward(batch(i)[1])
    assert_same(layer.weight.grad, twin.weight.grad)
    stepped(layer, twin)
    assert_state(layer, twin)


# -- memory ------------------------------------------------------------------------------------------------------------


def live_tensors():
    gc.collect()
    return sum(type(o) in (torch.Tensor, nn.Parameter) for o in gc.get_objects())


def test_what_backward_needed_is_released_by_it():
    """The output lives on; what was saved for it does not, and steps leave nothing behind."""
    model, _ = bank()
    call, alive = compiled(model), []
    for i in range(5):
        x, dy = batches(i)
        kept = weakref.ref(x)
        y = call(x)
        y.backward(dy)
        del x, dy
        if i in (1, 4):
            model.zero_grad(set_to_none=True)
            alive.append(live_tensors())
            assert kept() is None, "the input is still held after backward"
    assert y is not None
    assert alive[1] <= alive[0]
