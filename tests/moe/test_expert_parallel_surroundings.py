"""Experts over ranks inside of what programs put around layers: copies, checkpoints, autocast, caches, shapes alone."""

import copy
import functools
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import moe
from tests.support.linear_oracle import assert_same
from tests.support.split_experts import D, E, K, N, data, mixture, step
from tests.support.steps import assert_equal

WAYS = {
    "exact, codes": {},
    "exact, values": {"payload": "values"},
    "padded, values": {"engine": "padded"},
    "padded, codes": {"engine": "padded", "payload": "codes"},
    "symmetric, codes": {"engine": "symmetric"},
    "symmetric, values": {"engine": "symmetric", "payload": "values"},
}
ways = pytest.mark.parametrize("way", WAYS)


def layer(way, **settings):
    return mixture("fp8-block", dispatcher=moe.ExpertParallel(**WAYS[way]), **settings)


@ways
def test_copies_and_checkpoints_have_the_same_bits(way):
    want = step(layer(way), *data(0))
    for twin in (copy.deepcopy(layer(way)), pickle.loads(pickle.dumps(layer(way)))):
        assert_equal(step(twin, *data(0)), want)
    model = layer(way)
    for reentrant in (False, True):
        call = functools.partial(checkpoint, model, use_reentrant=reentrant)
        assert_equal(step(model, *data(0), call=call), want)
    with torch.inference_mode():
        assert_same(model(data(0)[0]), want[0])
    batch = data(0)
    with torch.device("meta"):  # a default that no tensor of the layer follows
        assert_equal(step(model, *batch), want)


def test_memory_that_ranks_share_may_be_made_in_inference_mode_and_grow():
    model, settings = layer("symmetric, values"), {"engine": "symmetric", "payload": "values"}
    wide = octavo.MoE(4 * D, N, E, K, recipe="bf16", dispatcher=moe.ExpertParallel(**settings), dtype=torch.bfloat16)
    x, dy = data(0)
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    with torch.inference_mode(), torch.device("meta"):  # more memory than any layer before
        assert wide(x.repeat(9, 4)).isfinite().all()
    y.backward(dy)
    assert_equal([y.detach(), leaf.grad], step(layer("exact, values"), x, dy)[:2])
    assert all(t.isfinite().all() for t in step(wide, x.repeat(9, 4), dy.repeat(9, 4)))


@ways
def test_gradients_are_those_that_are_wanted(way):
    want, (x, dy) = step(layer(way), *data(0)), data(0)
    model = layer(way)
    model(x).backward(dy)  # x wants none
    assert_same(model.experts.fc2.weight.grad, want[3])
    model = layer(way)
    model.experts.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(dy, retain_graph=True)
    assert_same(leaf.grad, want[1])
    leaf.grad = None
    y.backward(dy)
    assert_same(leaf.grad, want[1])


@ways
def test_weights_are_cached_deferred_and_accumulated(way):
    (x, dy), want = data(0), step(layer(way), *data(0))
    model = layer(way, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    for p in model.experts.parameters():
        p.main_grad = torch.zeros(p.shape, dtype=torch.float32)
    with octavo.microbatch(first=True):
        first = model(x)
    with octavo.microbatch(first=False):
        second = model(x)
    assert_same(second.detach(), want[0])
    for y in (first, second):
        y.backward(dy)
    for fc in (model.experts.fc1, model.experts.fc2):
        fc.backward_dw()
        fc.backward_dw()
    torch.testing.assert_close(model.experts.fc1.weight.main_grad, 2 * want[2].float(), rtol=1e-2, atol=1.0)


@ways
def test_autocast_sends_its_dtype(way):
    model = octavo.MoE(D, N, E, K, recipe="fp8-block", dispatcher=moe.ExpertParallel(**WAYS[way]))
    twin = octavo.MoE(D, N, E, K, recipe="fp8-block", dispatcher=moe.LocalDispatch())
    twin.load_state_dict(model.state_dict())
    x = data(0)[0].float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, want = model(x), twin(x)
    assert_same(y.detach(), want.detach())
    y.sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.isfinite().all()


@ways
def test_padding_and_no_tokens_are_no_rows(way):
    model, (x, dy) = layer(way), data(0)
    y = model(x, tokens=10)
    assert not y[10:].any() and model.load.sum() == 10 * K
    found = step(model, x[:0], dy[:0])
    assert found[0].shape == (0, D) and not found[2].any()
    x[3] = torch.nan
    assert model(x).isnan().any(1).nonzero().tolist() == [[3]]


@ways
def test_shapes_alone_are_enough_for_shapes(way):
    with torch.device("meta"):
        model = octavo.MoE(D, N, E, K, recipe="fp8-block", dispatcher=moe.ExpertParallel(**WAYS[way]))
        assert model(torch.empty(8, D)).shape == (8, D)
    with FakeTensorMode():
        model = octavo.MoE(D, N, E, K, recipe="fp8-block", dispatcher=moe.ExpertParallel(**WAYS[way]))
        assert model(torch.empty(8, D)).shape == (8, D)


def _deep(group, rank, recomputes, engine):
    """Two layers, two microbatches in flight."""
    dispatcher = moe.ExpertParallel(group, engine=engine)
    layers = torch.nn.ModuleList(mixture("fp8-block", dispatcher=dispatcher) for _ in range(2))

    def call(x):
        for each in layers:
            x = x + (checkpoint(each, x, use_reentrant=False) if recomputes else each(x))
        return x

    leaves = [data(rank + 2 * i)[0].requires_grad_() for i in range(2)]
    outputs = [call(x) for x in leaves]
    for y, i in zip(outputs, (0, 2), strict=True):
        y.backward(data(rank + i)[1])
    return [y.detach() for y in outputs] + [x.grad for x in leaves] + [p.grad for p in layers.parameters()]


@pytest.mark.parametrize(("engine", "recomputes"), [("auto", True), ("symmetric", False), ("symmetric", True)])
def test_layers_that_run_again_in_backward_send_again(ranks, engine, recomputes):
    """Layers of `symmetric` share one memory, also those of one backward."""
    right = ranks.run(_deep, False, "all-to-all", size=2)
    for found, want in zip(ranks.run(_deep, recomputes, engine, size=2), right, strict=True):
        assert_equal(found, want)
