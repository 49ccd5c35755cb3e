"""Linear under torch.compile on a GPU: eager's bits in the default mode, and with mode="reduce-overhead" from replayed
CUDA graphs, nothing left out of them.

The compiler runs a graph once to warm it up, records it at its second run, and replays it from the third on."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import CUDAGraphNode

import octavo
from octavo.recipes import SHIPPED
from tests.support.captured_twins import (
    DEVICE,
    K,
    M,
    N,
    batch,
    batches,
    clear_gradients,
    compiled,
    finish,
    gradients,
    same_microbatches,
    twins,
)
from tests.support.linear_oracle import assert_same, graphs_of, make
from tests.support.recipe_traits import QUANTIZED
from tests.support.steps import assert_equal, assert_state, update

pytestmark = pytest.mark.gpu

every = pytest.mark.parametrize("recipe", SHIPPED)
quantized = pytest.mark.parametrize("recipe", QUANTIZED)
some = pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "nvfp4"])
STEPS = 5


class Replays:
    """Counts what was replayed, since it was last asked."""

    def __init__(self):
        self.nodes = []

    def expect(self, count):
        """Each of `count` calls was one replay, and no graph was left without a CUDA graph."""
        assert counters["inductor"]["cudagraph_skips"] == 0
        assert len(self.nodes) == count, f"{len(self.nodes)} replays of {len(set(self.nodes))} graphs"


@pytest.fixture
def replays(monkeypatch):
    found, run_graph = Replays(), CUDAGraphNode.run_graph

    def counted(node):
        found.nodes.append(node.id)
        run_graph(node)

    monkeypatch.setattr(CUDAGraphNode, "run_graph", counted)
    return found


@pytest.fixture(autouse=True)
def _asserting_graphs(forgetful_compiler):
    """Memory left in the graphs' pool that is no output of theirs is an error whenever one is run or recorded."""
    with torch._inductor.config.patch({"triton.slow_path_cudagraph_asserts": True}):
        yield


def run_steps(pair, call, replays, *, flight=1, step=None, sizes=None, **settings):
    """Steps of the compiled layer and its twin, compared; in the last one everything is a replay. Weights change."""
    step = step or same_microbatches
    for i in range(STEPS):
        replays.nodes.clear()
        step(pair, (call, pair[1]), batches(i, flight, **(sizes or {})), f"step {i}", **settings)
        for model in pair:
            update(model)
    assert_state(*pair)
    replays.expect(2 * flight)


# -- every recipe ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu_smoke
@every
def test_compiled_is_eager_bit_for_bit(recipe):
    pair = twins(recipe)
    call = compiled(pair[0], "default")
    for i in range(3):
        same_microbatches(pair, (call, pair[1]), [batch(i)], f"step {i}")
        for model in pair:
            update(model)
    assert_state(*pair)
    assert counters["stats"]["unique_graphs"] == graphs_of(recipe)


@pytest.mark.parametrize(
    ("recipe", "flight"), [*[(name, 1) for name in SHIPPED], *[(name, 2) for name in ("fp8-delayed", "mxfp8", "nvfp4")]]
)
def test_a_replayed_graph_is_eager_bit_for_bit(recipe, flight, replays):
    """fp8-delayed: with the amaxes of x, w and dy of every microbatch; nvfp4: with the counter of its rounding."""
    pair = twins(recipe)
    run_steps(pair, compiled(pair[0], dynamic=False), replays, flight=flight, deferred=True)
    assert counters["stats"]["unique_graphs"] == graphs_of(recipe)


@some
def test_a_stack_of_layers(recipe, replays):
    """Activations that round nothing lie between, since a compiler may round others elsewhere."""
    model = nn.Sequential(*[m for i in range(3) for m in (make(recipe, K, K, dtype=torch.bfloat16, seed=i), nn.ReLU())])
    model = model.to(DEVICE)
    pair = model, copy.deepcopy(model)
    run_steps(pair, compiled(model), replays, flight=2, deferred=True, sizes={"n": K})


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@some
def test_every_batch_size_has_its_graphs(recipe, dynamic, replays):
    pair = twins(recipe)
    call = compiled(pair[0], dynamic=dynamic)
    for i in range(STEPS):
        replays.nodes.clear()
        for m in (M, 40):
            same_microbatches(pair, (call, pair[1]), [batch(i, m)], f"step {i}")
    replays.expect(4)
    assert counters["stats"]["unique_graphs"] == (1 if dynamic else 2)


@some
def test_a_graph_without_gradients_has_the_bits_of_eager(recipe, replays):
    layer, twin = twins(recipe)
    call = compiled(layer)
    with torch.no_grad():
        for i in range(STEPS):
            replays.nodes.clear()
            assert_same(call(batch(i)[0]).clone(), twin(batch(i)[0]), f"step {i}")
    replays.expect(1)


# -- state and buffers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "flight", "overwrite"),
    [*[(name, 3, False) for name in SHIPPED], ("fp8-current", 2, False), ("fp8-current", 2, True), ("nvfp4", 2, True)],
)
def test_replays_write_main_grad_in_place(recipe, flight, overwrite, replays):
    """Added to, or overwritten, by each of the microbatches in flight; at an address of its own, never a copy."""
    pair = twins(recipe, fuse_wgrad_accumulation=True)
    for model in pair:
        model.weight.main_grad = torch.ones(N, K, device=DEVICE)
        model.weight.overwrite_main_grad = overwrite

    def step(pair, calls, data, what, **settings):
        same_microbatches(pair, calls, data, what, **settings)
        assert_same(pair[0].weight.main_grad, pair[1].weight.main_grad, what)
        assert not pair[0].weight.grad.any()

    run_steps(pair, compiled(pair[0]), replays, flight=flight, step=step, deferred=True)


@pytest.mark.parametrize("deferred", [False, True], ids=["interleaved", "deferred"])
@quantized
def test_the_weight_cache(recipe, deferred, replays):
    """From a cold start, True, False, False each step, weights changed between steps, no step marked by hand."""
    pair = twins(recipe)
    schedule = [{"is_first_microbatch": first} for first in (True, False, False)]
    run_steps(pair, compiled(pair[0]), replays, flight=3, deferred=deferred, arguments=schedule)
    assert counters["stats"]["unique_graphs"] == graphs_of(recipe, 2)


def deferred(pair, calls, data, what):
    """Forwards, backwards, and the weight gradients after all of them."""
    found = []
    torch.compiler.cudagraph_mark_step_begin()  # once a step: what a weight gradient waits for outlives its backward
    for model, call in zip(pair, calls, strict=True):
        clear_gradients(model)
        leaves = [x.clone().requires_grad_() for x, _ in data]
        outputs = [call(x) for x in leaves]
        made = [t for y, x, (_, dy) in zip(outputs, leaves, data, strict=True) for t in finish(y, x, dy)]
        for _ in data:
            model.backward_dw()
        target = getattr(model.weight, "main_grad", model.weight.grad)
        assert target.any(), "no gradient came"
        found.append([*made, *gradients(model), target.clone()])
    assert_equal(*found, what)


@pytest.mark.parametrize(
    ("recipe", "flight", "main_grad"),
    [
        *[(name, flight, False) for name in ("bf16", "fp8-delayed", "fp8-current", "nvfp4") for flight in (1, 2)],
        *[(name, 2, True) for name in ("fp8-current", "fp8-block", "mxfp8")],
    ],
)
def test_deferred_weight_gradients(recipe, flight, main_grad, replays):
    pair = twins(recipe, delay_wgrad_compute=True, fuse_wgrad_accumulation=main_grad)
    if main_grad:
        for model in pair:
            model.weight.main_grad = torch.zeros(N, K, device=DEVICE)
    run_steps(pair, compiled(pair[0]), replays, flight=flight, step=deferred)


def test_stochastic_rounding_draws_anew_at_every_replay(replays):
    """The same data each time: only the counter differs. It is a tensor that the graph itself advances."""
    layer, twin = twins("nvfp4")
    call, seen = compiled(layer), set()
    for i in range(STEPS):
        replays.nodes.clear()
        same_microbatches((layer, twin), (call, twin), [batch(0)], f"step {i}")
        assert layer._hidden.rounding_seed[1].item() == i + 1
        seen.add(layer.weight.grad.double().sum().item())
    assert len(seen) == STEPS
    replays.expect(2)


# -- codes -------------------------------------------------------------------------------------------------------------


@quantized
def test_codes_between_two_layers(recipe, replays):
    layers = [make(recipe, K, N, dtype=torch.bfloat16), make(recipe, N, K, dtype=torch.bfloat16, seed=3)]
    model = nn.ModuleList(layers).to(DEVICE)
    pair = model, copy.deepcopy(model)

    def chain(model):
        return lambda x: model[1](model[0](x, fp8_output=True))

    def step(pair, calls, data, what, **settings):
        same_microbatches(pair, (calls[0], chain(pair[1])), data, what, **settings)

    run_steps(pair, compiled(chain(model)), replays, flight=2, step=step, sizes={"n": K}, deferred=True)


@quantized
def test_weights_held_as_codes(recipe, replays):
    layer, _ = twins(recipe)
    octavo.quantize_weights(layer)
    pair = layer, copy.deepcopy(layer)
    call = compiled(layer)
    for i in range(STEPS):
        replays.nodes.clear()
        same_microbatches(pair, (call, pair[1]), batches(i, 2), f"step {i}", deferred=True)
        for model in pair:
            octavo.step(model)
    assert_state(*pair)
    replays.expect(4)


# -- what needs a gradient ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "frozen"),
    [
        *[("fp8-current", parts) for parts in ("weight", "bias", "input", "weight, bias", "weight, input")],
        *[(name, parts) for name in ("fp8-delayed", "nvfp4") for parts in ("input", "weight, bias")],
    ],
)
def test_replays_give_no_gradient_to_frozen_parts(recipe, frozen, replays):
    pair = twins(recipe)
    for model in pair:
        model.weight.requires_grad_("weight" not in frozen)
        model.bias.requires_grad_("bias" not in frozen)
    run_steps(pair, compiled(pair[0]), replays, leaf="input" not in frozen)


@some
def test_training_and_evaluating_in_turn(recipe, replays):
    pair = twins(recipe)
    call = compiled(pair[0])
    for i, training in enumerate((True, False) * STEPS):
        replays.nodes.clear()
        for model in pair:
            model.train(training)
        same_microbatches(pair, (call, pair[1]), [batch(i)], f"step {i}")
        for model in pair:
            update(model)
    assert_state(*pair)
    replays.expect(2)
