"""Linear in CUDA graphs that the user captures: torch.cuda.make_graphed_callables, and torch.cuda.graph by hand.

Capturing wants warm-up steps, and those move what a recipe remembers: amaxes of delayed scaling (make_graphed_callables
even runs backward on uninitialised memory), the counter of stochastic rounding. It is saved before and loaded after.
"""

import copy
import gc

import pytest
import torch
from torch import nn
from torch._inductor.cudagraph_trees import get_block_addrs

import octavo
from octavo.recipes import SHIPPED
from tests.support.captured_twins import (
    DEVICE,
    K,
    M,
    N,
    batches,
    clear_gradients,
    gradients,
    microbatches,
    same_microbatches,
    twins,
)
from tests.support.linear_oracle import make
from tests.support.steps import assert_equal, assert_state, update

pytestmark = pytest.mark.gpu

every = pytest.mark.parametrize("recipe", SHIPPED)
STEPS = 3


def static(*shape):
    return torch.zeros(*shape, device=DEVICE, dtype=torch.bfloat16)


# -- make_graphed_callables ----------------------------------------------------------------------------------------


def one(recipe):
    return make(recipe, K, N, dtype=torch.bfloat16)


def mlp(recipe):
    return nn.Sequential(one(recipe), nn.GELU(), make(recipe, N, N, dtype=torch.bfloat16, seed=3))


@pytest.mark.parametrize("build", [one, mlp], ids=["linear", "mlp"])
@every
def test_make_graphed_callables_replays_the_bits_of_eager(recipe, build):
    model = build(recipe).to(DEVICE)
    twin, kept = copy.deepcopy(model), octavo.state_dict(model)
    call = torch.cuda.make_graphed_callables(model, (static(M, K).requires_grad_(),))
    octavo.load_state_dict(model, kept)
    for i in range(STEPS):
        same_microbatches((model, twin), (call, twin), batches(i, 2), f"step {i}")
        for m in (model, twin):
            update(m)
    assert_state(model, twin)


# -- by hand ---------------------------------------------------------------------------------------------------------


def captured(step):
    """A CUDA graph of `step`, which has run once before on a stream beside, and allocates nothing lazily after that:
    anything unsafe, by any thread, is an error while it is captured."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step()
    torch.cuda.synchronize()
    gc.collect()  # graphs of earlier tests that are freed during a capture end it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        step()
    return graph


class Microbatch:
    """One forward and backward in a CUDA graph, and the tensors it reads and writes."""

    def __init__(self, model, **arguments):
        self.x, self.dy = static(M, K).requires_grad_(), static(M, N)
        self.y = None

        def step():
            self.y = self.x.grad = None
            y = model(self.x, **arguments)
            y.backward(self.dy)
            self.y = y.detach()

        self.graph = captured(step)

    def __call__(self, x, dy):
        with torch.no_grad():
            self.x.copy_(x)
            self.dy.copy_(dy)
        self.graph.replay()
        return [self.y.clone(), self.x.grad.clone()]


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
@every
def test_steps_captured_by_hand(recipe, cached):
    """Two microbatches a step: one graph quantizes the weight and another finds it in the cache, or one graph serves
    both. Gradients add up at fixed addresses; weights change and octavo.step is called between replays."""
    model, twin = twins(recipe)
    clear_gradients(model)
    kept = octavo.state_dict(model)
    schedule = [{"is_first_microbatch": first} for first in (True, False)] if cached else [{}]
    graphs = [Microbatch(model, **arguments) for arguments in schedule]
    octavo.load_state_dict(model, kept)
    for i in range(STEPS):
        data = batches(i, 2)
        for p in model.parameters():
            p.grad.zero_()
        found = [t for j, (x, dy) in enumerate(data) for t in graphs[j % len(graphs)](x, dy)]
        want = microbatches(twin, twin, data, arguments=schedule if cached else None)
        assert_equal([*found, *gradients(model)], want, f"step {i}")
        for m in (model, twin):
            update(m)
    assert_state(model, twin)


@every
def test_a_capture_keeps_nothing_but_what_it_returns(recipe):
    """No scratch was made for later inside the graph's pool. cuBLAS's own is torch's to keep, and let go first."""
    model, _ = twins(recipe)
    clear_gradients(model)
    graphs = [Microbatch(model), *[Microbatch(model, is_first_microbatch=first) for first in (True, False)]]
    torch._C._cuda_clearCublasWorkspaces()
    for made in graphs:
        returned = {t.untyped_storage().data_ptr() for t in (made.y, made.x.grad)}
        assert set(get_block_addrs(made.graph.pool())) == returned
