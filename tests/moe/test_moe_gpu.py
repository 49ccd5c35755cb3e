"""octavo.MoE on a GPU: whole steps captured and replayed, compiled, without waiting, with buffers handed over."""

import warnings

import pytest
import torch

import octavo
from octavo import moe
from tests.support.linear_oracle import assert_same
from tests.support.mixtures import step
from tests.support.sequentials import recipes
from tests.support.state_tensors import named_state
from tests.support.steps import relative_error
from tests.support.waiting import no_waiting

pytestmark = pytest.mark.gpu
E, D, N, T, K = 8, 256, 384, 300, 2
RICH = {
    "score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "expert_bias": True, "aux_loss_coef": 0.1,
    "z_loss_coef": 0.01, "shared_ffn_size": 128, "shared_gate": True,
}  # fmt: skip


def mixture(recipe, **settings):
    torch.manual_seed(0)
    model = octavo.MoE(D, N, E, K, recipe=recipe, device="cuda", dtype=torch.bfloat16, **settings)
    for name, buffer in named_state(model):
        if name.endswith("rounding_seed"):
            buffer.copy_(torch.tensor([7, 0]))
    return model


def batch(seed):
    """x and dy; a shift of x that differs from batch to batch moves all tokens to some experts."""
    generator = torch.Generator().manual_seed(seed + 100)
    x, dy = (torch.randn(T, D, generator=generator) for _ in range(2))
    if seed % 3:
        x += seed % 3 * torch.randn(1, D, generator=generator)
    return x.cuda().bfloat16(), dy.cuda().bfloat16() / T


def train(model, optimizer, x, dy):
    """A whole step: forward, backward, optimizer, delayed scales, the bias of the experts."""
    y = model(x)
    ((y * dy).sum() + model.aux_loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    octavo.step(model)
    moe.update_bias(model.expert_bias, model.load, 0.01)
    return y


def warmed(model):
    """Delayed scales that have seen every expert."""
    for seed in (0, 3, 6):
        step(model, *batch(seed))
        octavo.step(model)
    return model


@pytest.mark.gpu_smoke
@recipes(["fp8-delayed", "fp8-current", "fp8-block", "nvfp4"])
def test_a_captured_training_step_follows_the_routing(recipe):
    """Weights, bias and routing change from replay to replay; an eager twin takes the same steps."""
    model, twin = (warmed(mixture(recipe, **RICH)) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (model, twin)]
    x, dy = batch(0)
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        train(each, optimizer, x, dy)  # makes the momenta
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train(model, optimizers[0], x, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = train(model, optimizers[0], x, dy)
    with torch.no_grad():
        for a, b in zip([*model.parameters(), model.expert_bias], [*twin.parameters(), twin.expert_bias], strict=True):
            a.copy_(b)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            optimizers[0].state[a]["momentum_buffer"].copy_(optimizers[1].state[b]["momentum_buffer"])
    octavo.load_state_dict(model, octavo.state_dict(twin))
    loads = set()
    for seed in range(20):
        data = batch(seed)
        for into, new in zip((x, dy), data, strict=True):
            into.copy_(new)
        graph.replay()
        want = train(twin, optimizers[1], *data)
        assert_same(y.detach(), want.detach(), f"y, replay {seed}")
        assert torch.equal(model.load, twin.load)
        for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert_same(a, b, f"{name}, replay {seed}")
        assert_same(model.expert_bias, twin.expert_bias)
        loads.add(tuple(model.load.tolist()))
    assert len(loads) > 10 and y.isfinite().all()  # the routing did change


@pytest.mark.usefixtures("fresh_compiler")
@recipes(["fp8-delayed", "fp8-block"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_is_near_eager(recipe, mode):
    """Octavo's nodes have eager's bits; the router's sums are Inductor's, and move values to the next code."""
    model, twin = (warmed(mixture(recipe, **RICH)) for _ in range(2))
    call = torch.compile(lambda x: (model(x), model.aux_loss), fullgraph=True, mode=mode)
    for seed in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found, want = step(model, *batch(seed), call=call), step(twin, *batch(seed))
        assert torch.equal(found[2], want[2])
        for i, (a, b) in enumerate(zip(found, want, strict=True)):
            assert relative_error(a, b) < 0.1, f"step {seed}, {i}: {relative_error(a, b):.3g}"


@recipes(["fp8-delayed", "fp8-block"])
def test_no_value_is_read_on_the_host(recipe):
    model, tokens = warmed(mixture(recipe, **RICH)), torch.tensor(200, device="cuda")
    x, dy = batch(1)
    for _ in range(3):
        step(model, x, dy, call=lambda x: (model(x, tokens=tokens), model.aux_loss))
    with no_waiting():
        step(model, x, dy, call=lambda x: (model(x, tokens=tokens), model.aux_loss))
        moe.update_bias(model.expert_bias, model.load)
    assert model.load.sum() == 200 * K


@recipes(["fp8-delayed", "fp8-block", "nvfp4"])
def test_twenty_runs_have_the_same_bits(recipe):
    want = step(mixture(recipe, **RICH), *batch(1))
    for _ in range(19):
        for a, b in zip(step(mixture(recipe, **RICH), *batch(1)), want, strict=True):
            assert_same(a, b)


class Handed:
    """A dispatcher with memory of its own for y and for dx."""

    def __init__(self):
        self.out, self.dgrad_out = (torch.empty(T * K, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def dispatch(self, x, index, weights, num_experts):
        rows, permutation = moe.permute(x, index, num_experts, tail="untouched")
        state = (permutation, weights)
        return moe.Dispatched(rows, permutation.sizes, state, out=self.out, dgrad_out=self.dgrad_out)

    def combine(self, rows, dispatched):
        assert rows.data_ptr() == self.out.data_ptr()
        return moe.unpermute(rows, *dispatched.state, tail="untouched")


def launches(model):
    """The kernels and copies of a forward, by name."""
    x = batch(0)[0]
    for _ in range(3):
        model(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model(x)
        torch.cuda.synchronize()
    return {e.key: e.count for e in profile.key_averages() if e.self_device_time_total > 0}


def test_no_copy_between_the_second_layer_and_combine():
    """Memory that is handed over costs no launch more than memory that the layer allocates."""
    dispatcher = Handed()
    model = mixture("fp8-block", dispatcher=dispatcher)
    for _ in range(3):
        want = step(mixture("fp8-block", dispatcher=moe.LocalDispatch()), *batch(0))
        found = step(model, *batch(0))
    for a, b in zip(found, want, strict=True):
        assert_same(a, b)
    assert launches(model) == launches(mixture("fp8-block", dispatcher=moe.LocalDispatch()))


def test_a_warning_of_dropped_slots_comes_without_waiting():
    model = mixture("fp8-block", dispatcher=moe.LocalDispatch(T * K - 12))
    x, dy = batch(0)
    for _ in range(3):
        step(model, x, dy)
    model.overflow()
    model(x)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with no_waiting():
            octavo.step(model)
        torch.cuda.synchronize()
        octavo.step(model)  # the copy has arrived, if not before
    assert len([w for w in warned if "dropped up to 12 assignments" in str(w.message)]) == 1
    assert model.overflow() == 12
