"""delay_wgrad_compute under torch.compile: backward_dw() gives each dw once, oldest first, whoever watches."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.weights import wgrad_delivery
from tests.support.compiled_twins import (
    K,
    N,
    assert_logs,
    assert_nothing_pending,
    assert_step,
    bank,
    batch,
    batches,
    flight_of,
    graphs,
    pair,
    results,
    stepped,
)
from tests.support.linear_oracle import assert_same, graphs_of, make, spiky
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


# -- every dw once, oldest first ---------------------------------------------------------------------------------------


def test_delayed_dw_with_every_recipe():
    model, twin = bank(delay_wgrad_compute=True)
    call = compiled(model, dynamic=True)
    for step in range(2):
        data = [batches(3 * step + i, (24, 7, 33)[(step + i) % 3]) for i in range(3)]
        assert_logs(flight_of(model, call, data), flight_of(twin, twin, data))
        stepped(model, twin)
    assert_state(model, twin)
    assert graphs() == 2  # one of them for the step in which delayed scaling measures
    assert_nothing_pending(model)


@pytest.mark.parametrize(("recipe", "flight"), [("fp8-current", 1), ("nvfp4", 12)])
def test_delayed_dw_of_many_microbatches_comes_oldest_first_from_one_graph(recipe, flight):
    layer, twin = pair(recipe, delay_wgrad_compute=True)
    call = compiled(layer, dynamic=True)
    for step in range(2):
        data = [batch(20 * step + i, (24, 7, 33)[(step + i) % 3]) for i in range(flight)]
        assert_logs(flight_of(layer, call, data), flight_of(twin, twin, data))
    assert_state(layer, twin)
    assert graphs() == 1
    assert_nothing_pending(layer)


def test_delayed_dw_is_the_dw_of_a_layer_without_delay():
    """The oldest first, told apart by what a layer that delays nothing gives for each."""
    layer, twin = make("fp8-block", delay_wgrad_compute=True), make("fp8-block")
    call, data = compiled(layer), [batch(i) for i in range(3)]
    for y, (_, dy) in zip([call(x) for x, _ in data], data, strict=True):
        y.backward(dy)
    for x, dy in data:
        layer.weight.grad = None
        layer.backward_dw()
        assert_same(layer.weight.grad, results(twin, twin, x, dy)["weight"])


def test_two_backwards_in_reverse_order_give_the_same_sum():
    layer, twin = pair("fp8-current", delay_wgrad_compute=True)
    for m, call in ((layer, compiled(layer)), (twin, twin)):
        outputs = [call(batch(i)[0]) for i in range(2)]
        for i in (1, 0):
            outputs[i].backward(batch(i)[1])
        m.backward_dw()
        m.backward_dw()
    assert_same(layer.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("recipe", ["fp8-current", "bf16", "fp8-block"])
def test_equal_calls_in_one_graph_keep_their_own_weight_gradients(recipe):
    layer = make(recipe, delay_wgrad_compute=True)
    twin, x = copy.deepcopy(layer), spiky(24, 48)
    for model, run in ((layer, compiled(lambda x: (layer(x), layer(x)))), (twin, lambda x: (twin(x), twin(x)))):
        torch.autograd.backward(run(x), (spiky(24, 40, seed=1), spiky(24, 40, seed=2)))
        model.backward_dw()
        model.backward_dw()
    assert_same(layer.weight.grad, twin.weight.grad)


# -- main_grad, cached weights, frozen ones ----------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "overwrite"), [("fp8-current", True), ("fp8-delayed", False), ("nvfp4", False)])
def test_delayed_dw_goes_to_main_grad(recipe, overwrite):
    layer, twin = pair(recipe, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    for m in (layer, twin):
        m.weight.main_grad = torch.ones(N, K)
        m.weight.overwrite_main_grad = overwrite
    call = compiled(layer)
    for step in range(2):
        logs = []
        for m, run in ((layer, call), (twin, twin)):
            before = m.weight.main_grad.clone()
            outputs = [run(batch(3 * step + i)[0]) for i in range(3)]
            for i, y in enumerate(outputs):
                y.backward(batch(3 * step + i)[1])
            assert_same(m.weight.main_grad, before)
            logs.append([])
            for _ in range(3):
                m.backward_dw()
                logs[-1].append(m.weight.main_grad.clone())
            assert m.weight.grad is None
        assert_logs(*logs)
        assert not torch.equal(logs[0][0], logs[0][1])
    assert_state(layer, twin)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_delayed_dw_with_cached_weights(recipe):
    layer, twin = pair(recipe, delay_wgrad_compute=True)
    call = compiled(layer)
    for step in range(2):
        data = [batch(3 * step + i) for i in range(3)]
        assert_logs(flight_of(layer, call, data, is_first_microbatch=True),
                    flight_of(twin, twin, data, is_first_microbatch=True))  # fmt: skip
        with torch.no_grad():
            for m in (layer, twin):
                m.weight.sub_(m.weight.grad * 0.01)
        stepped(layer, twin)
    assert_state(layer, twin)
    assert graphs() == graphs_of(recipe, 2)


def test_a_frozen_weight_has_no_delayed_dw():
    layer, twin = pair("fp8-current", delay_wgrad_compute=True)
    for m in (layer, twin):
        m.weight.requires_grad_(False)
    call = compiled(layer)
    for i in range(2):
        assert_step((layer, twin), (call, twin), batch(i))
        layer.backward_dw()
    assert layer.weight.grad is None


# -- what is pending ---------------------------------------------------------------------------------------------------


def test_forwards_without_gradients_leave_no_dw_pending():
    layer, twin = make("fp8-current", delay_wgrad_compute=True), make("fp8-current")
    call = compiled(layer)
    with torch.no_grad():
        call(batch(1)[0])
    assert_nothing_pending(layer)
    x, dy = batch(2)
    call(x).backward(dy)
    layer.backward_dw()
    assert_same(layer.weight.grad, results(twin, twin, x, dy)["weight"])


def test_a_delayed_dw_whose_backward_never_came_is_nan(monkeypatch):
    """Not a number that could pass for a gradient, where the host does not look: on a GPU."""
    monkeypatch.setattr(wgrad_delivery, "_is_filled", lambda *_: True)
    layer = make("fp8-current", delay_wgrad_compute=True)
    compiled(layer)(batch(0)[0])
    layer.backward_dw()
    assert layer.weight.grad.isnan().all()


def test_what_was_pending_is_released_after_a_compiled_step():
    layer = make("bf16", delay_wgrad_compute=True)
    call = compiled(layer)
    for i in range(2):
        x, dy = batch(i)
        kept = weakref.ref(x)
        call(x).backward(dy)
        layer.backward_dw()
        del x, dy
        gc.collect()
        assert kept() is None


def test_an_input_that_is_written_to_does_not_change_a_deferred_weight_gradients():
    layer = make("bf16", delay_wgrad_compute=True)
    twin = make("bf16")
    x, dy = spiky(24, 48), spiky(24, 40)

    def call(x):
        h = x * 2
        y = layer(h)
        h.zero_()
        return y

    compiled(call)(x).backward(dy)
    layer.backward_dw()
    twin(x * 2).backward(dy)
    assert_same(layer.weight.grad, twin.weight.grad)


# -- beside eager microbatches, modes and Inductor ---------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "order"), [("fp8-current", "compiled first"), ("nvfp4", "eager first")])
def test_eager_and_compiled_microbatches_each_give_their_dw_once(recipe, order):
    """In whichever order: docs/compile.md."""
    layer, twin = pair(recipe, delay_wgrad_compute=True)
    runs = [compiled(layer), layer]
    if order == "eager first":
        runs.reverse()
    data, logs = [batch(i, 8 + i) for i in range(4)], []
    for m, calls in ((layer, runs * 2), (twin, [twin] * 4)):
        for y, (_, dy) in zip([run(x) for run, (x, _) in zip(calls, data, strict=True)], data, strict=True):
            y.backward(dy)
        logs.append([])
        for _ in data:
            m.weight.grad = None
            m.backward_dw()
            logs[-1].append(m.weight.grad)
        assert_nothing_pending(m)
    found, want = (sorted(log, key=lambda dw: dw.sum().item()) for log in logs)
    assert_logs(found, want)
    assert_state(layer, twin)


class Mixed(nn.Module):
    """Products between the layers, whose memory Inductor plans and uses again; bf16 keeps x itself for its dw."""

    def __init__(self, recipes, **options):
        super().__init__()
        self.layers = nn.ModuleList([make(recipe, K, K, seed=i, **options) for i, recipe in enumerate(recipes)])
        self.register_buffer("mix", torch.eye(K).roll(1, 0))  # a permutation: exact in any order of sums

    def forward(self, x):
        for layer in self.layers:
            x = layer(x @ self.mix)
        return x @ self.mix


def test_a_model_of_four_layers_that_delay_their_dw_under_inductor():
    model = Mixed(("bf16", "fp8-current", "bf16", "nvfp4"), delay_wgrad_compute=True)
    twin = copy.deepcopy(model)
    call = compiled(model, backend="inductor", dynamic=True)
    for step in range(2):
        data = [batch(3 * step + i, (8, 12, 20)[i], n=K) for i in range(3)]
        assert_logs(flight_of(model, call, data), flight_of(twin, twin, data))
    assert_state(model, twin)
    assert graphs() == 1


def recompute_all(*_, **__):
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("mode", ["selective checkpoint", "flops"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "bf16"])
def test_deferred_weight_gradients_in_eager_mode_while_a_mode_watches(recipe, mode):
    layer = make(recipe, delay_wgrad_compute=True)
    twin = copy.deepcopy(layer)
    x, dy = spiky(24, 48), spiky(24, 40)
    if mode == "flops":
        with FlopCounterMode(display=False):
            checkpoint(layer, x, use_reentrant=False).backward(dy)
    else:
        contexts = functools.partial(create_selective_checkpoint_contexts, recompute_all)
        checkpoint(layer, x, use_reentrant=False, context_fn=contexts).backward(dy)
    twin(x).backward(dy)
    for model in (layer, twin):
        model.backward_dw()
    assert_same(layer.weight.grad, twin.weight.grad)


# -- forwards without a backward ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"])
def test_a_forward_without_a_backward_leaves_no_gradient(recipe):
    """The next calls of backward_dw() give each backward's own dw, as in eager mode."""
    layer, twin = pair(recipe, delay_wgrad_compute=True)
    call = compiled(layer)
    call(batch(9)[0])
    with pytest.warns(UserWarning, match=r"1 forward of Linear\(.*ran in a graph, and no backward after it"):
        layer.backward_dw()
    assert layer.weight.grad is None
    for step in range(3):
        x, dy = batch(step)
        for m, run in ((layer, call), (twin, twin)):
            m.weight.grad = None
            run(x).backward(dy)
            m.backward_dw()
        assert_same(layer.weight.grad, twin.weight.grad)
    assert layer.discard_dw() == 1


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "mxfp8"])
def test_a_gradient_of_nan_is_a_gradient(recipe):
    layer = make(recipe, delay_wgrad_compute=True)
    x, dy = batch(0)
    for value in (float("nan"), float("inf")):
        layer.weight.grad = None
        compiled(layer)(x).backward(torch.full_like(dy, value))
        layer.backward_dw()
        assert layer.weight.grad is not None and not layer.weight.grad.isfinite().any()
    assert_nothing_pending(layer)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_groups_without_a_row_have_a_gradient(recipe):
    layer = octavo.GroupedLinear(3, 64, 32, recipe=recipe, delay_wgrad_compute=True)
    call = compiled(layer)
    for sizes in ([0, 0, 0], [0, 16, 0]):
        layer.weight.grad = None
        x = torch.randn(16, 64, requires_grad=True)
        call(x, torch.tensor(sizes)).sum().backward()
        layer.backward_dw()
        assert layer.weight.grad.isfinite().all() and not layer.weight.grad[0].any()
    assert_nothing_pending(layer)


def test_a_forward_in_eval_mode_leaves_nothing_to_backward_dw():
    layer, twin = make("fp8-current", delay_wgrad_compute=True), make("fp8-current")
    call, (x, dy) = compiled(layer), batch(0)
    layer.eval()
    call(x)
    assert_nothing_pending(layer)
    call(x).backward(dy)  # with a backward, dw arrives in it
    assert_same(layer.weight.grad, results(twin, twin, x, dy)["weight"])
    assert_nothing_pending(layer)
    layer.train()
    layer.weight.grad = None
    call(x).backward(dy)
    assert layer.weight.grad is None
    layer.backward_dw()
    assert_same(layer.weight.grad, results(twin, twin, x, dy)["weight"])
