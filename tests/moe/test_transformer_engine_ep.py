"""moe.TransformerEngineEP over a stand-in for transformer_engine.pytorch.ep, against one process."""

import pytest
import torch

import octavo
from octavo import moe
from octavo.errors import Unsupported
from tests.support import upstream_ep
from tests.support.split_experts import D, E, K, T, data, in_one_process, joined, mixture, step
from tests.support.steps import relative_error


def buffer_of(group, capacity=None, **settings):
    return upstream_ep.EpBuffer(K, T, D, E // group.size(), recv_capacity_per_rank=capacity, group=group, **settings)


def split(group, rank, recipe, *buffers):
    dispatcher = moe.TransformerEngineEP(upstream_ep, *buffers)
    model = mixture(recipe, dispatcher=dispatcher, num_local_experts=E // group.size())
    state = mixture(recipe).state_dict()
    for name in ("experts.fc1.weight", "experts.fc2.weight"):
        state[name] = state[name].chunk(group.size())[rank]
    model.load_state_dict(state)
    return model


def _steps(group, rank, recipe, capacity):
    model = split(group, rank, recipe, buffer_of(group, capacity))
    return [*step(model, *data(rank)), model.router.weight.grad, model.overflow()]


@pytest.mark.parametrize("capacity", [None, 2 * T * K])
@pytest.mark.parametrize("recipe", ["fp8-block", pytest.param("bf16", marks=pytest.mark.slow)])
def test_ranks_compute_what_one_process_does_but_for_weights_before_the_sum(ranks, recipe, capacity):
    answers = ranks.run(_steps, recipe, capacity, size=2)
    found, want = joined([answer[:4] for answer in answers]), in_one_process(recipe, 2, False)
    assert relative_error(found[0], want[0]) < 4e-3  # rows are rounded after they are weighted
    for a, b in zip(found[1:], want[1:], strict=True):
        assert relative_error(a, b) < 0.03  # gradients are quantized after they are weighted
    assert all(answer[4].isfinite().all() and answer[4].any() and answer[5] == 0 for answer in answers)


def _in_flight(group, rank, number):
    """Two microbatches forward, then both backward; then one by one."""
    model = split(group, rank, "fp8-block", *[buffer_of(group) for _ in range(number)])
    batches = [data(rank + 2 * i) for i in range(2)]
    leaves = [x.clone().requires_grad_() for x, _ in batches]
    for y, (_, dy) in zip([model(x) for x in leaves], batches, strict=True):
        y.backward(dy)
    found = [x.grad for x in leaves]
    for (x, dy), grad in zip(batches, found, strict=True):
        model.zero_grad()
        assert torch.equal(step(model, x, dy)[1], grad)


def test_calls_in_flight_have_buffers_of_their_own(ranks):
    ranks.run(_in_flight, 2, size=2)


def _overflowing(group, rank):
    model = split(group, rank, "fp8-block", buffer_of(group, 40))
    y = model(data(rank)[0])
    y.sum().backward()
    sent = model.load.view(2, -1).sum(1)  # of this rank's tokens, for each rank
    return model.overflow(), sent, y.isfinite().all() and model.experts.fc1.weight.grad.isfinite().all()


def test_rows_beyond_the_capacity_are_counted(ranks):
    lost, sent, finite = zip(*ranks.run(_overflowing, size=2), strict=True)
    assert list(lost) == [int(n) - 40 for n in sum(sent)] and all(finite)


def _padded(group, rank):
    model = split(group, rank, "fp8-block", buffer_of(group, 2 * T * K))
    x, _ = data(rank)
    y, none = model(x, tokens=10), model(x[:0])
    return y, model(x[:10]), none.shape


def test_tokens_without_experts_get_nothing(ranks):
    for y, want, shape in ranks.run(_padded, size=2):
        assert not y[10:].any() and relative_error(y[:10], want) < 1e-2 and shape == (0, D)


REFUSED = {
    "no module": (lambda b: moe.TransformerEngineEP(object(), b()), "an object without ep_dispatch"),
    "no buffer": (lambda b: moe.TransformerEngineEP(upstream_ep), "got no buffer"),
    "another buffer": (lambda b: moe.TransformerEngineEP(upstream_ep, object()), "got object without top_k"),
    "alignment": (lambda b: moe.TransformerEngineEP(upstream_ep, b(alignment=128)), "no recipe, got alignment=128"),
    "a recipe": (lambda b: moe.TransformerEngineEP(upstream_ep, b(dispatch_fwd_quant_recipe="MX")), "recipe=MX"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_take_is_refused(case):
    build, message = REFUSED[case]
    with pytest.raises(Unsupported, match=message):
        build(lambda **settings: upstream_ep.EpBuffer(K, T, D, E, **settings))


def test_other_tokens_than_the_buffer_is_for_are_refused():
    model = octavo.MoE(
        D, 64, E, K, dispatcher=moe.TransformerEngineEP(upstream_ep, upstream_ep.EpBuffer(K, T, D, E)), recipe="bf16"
    )
    with pytest.raises(Unsupported, match=r"sends bfloat16, got torch.float32"):
        model(torch.zeros(3, D))
    with pytest.raises(Unsupported, match=rf"made for {T} tokens of {D} values with top_k={K}, got {T + 1} of {D}"):
        model.bfloat16()(torch.zeros(T + 1, D, dtype=torch.bfloat16))
