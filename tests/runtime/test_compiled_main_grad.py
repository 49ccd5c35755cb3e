"""fuse_wgrad_accumulation under torch.compile: dw goes into weight.main_grad, bit for bit as in eager mode."""

import copy
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.compiled_twins import K, N, assert_step, batch, graphs, pair, refused, stepped
from tests.support.linear_oracle import assert_same, graphs_of, make, spiky
from tests.support.state_tensors import made_in_inference_mode
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")
BUFFERS = [
    ("bf16", torch.float32, False), ("bf16", torch.bfloat16, True), ("fp8-current", torch.bfloat16, False),
    ("fp8-current", torch.bfloat16, True), ("fp8-delayed", torch.bfloat16, False), ("nvfp4", torch.float32, True),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "dtype", "overwrite"), BUFFERS, ids=str)
def test_main_grad_of_either_dtype_added_to_or_overwritten(recipe, dtype, overwrite):
    layer, twin = pair(recipe, fuse_wgrad_accumulation=True)
    call = compiled(layer)
    for m in (layer, twin):
        m.weight.main_grad = spiky(N, K, seed=3, dtype=dtype)
        m.weight.overwrite_main_grad = overwrite
    buffer, address = layer.weight.main_grad, layer.weight.main_grad.data_ptr()
    for i in range(3):
        before = buffer.clone()
        found = assert_step((layer, twin), (call, twin), batch(i))
        assert found["weight"] is None
        assert_same(buffer, twin.weight.main_grad, f"microbatch {i}")
        assert not torch.equal(buffer, before)
        stepped(layer, twin)
    assert layer.weight.main_grad is buffer and buffer.data_ptr() == address
    assert_state(layer, twin)
    assert graphs() == graphs_of(recipe)


def test_overwriting_is_read_at_each_forward():
    layer, twin = pair("fp8-current", fuse_wgrad_accumulation=True)
    call = compiled(layer)
    for m in (layer, twin):
        m.weight.main_grad = torch.full((N, K), float("nan"))
    for i, overwrite in enumerate((True, False, False, True, False)):
        for m in (layer, twin):
            m.weight.overwrite_main_grad = overwrite
        assert_step((layer, twin), (call, twin), batch(i))
        assert_same(layer.weight.main_grad, twin.weight.main_grad)
    assert not layer.weight.main_grad.isnan().any()
    assert graphs() == 2


@pytest.mark.parametrize(("recipe", "flight"), [("fp8-current", 1), ("fp8-delayed", 3), ("nvfp4", 3)])
def test_grad_added_to_main_grad_is_set_and_zeros_make_the_hooks_fire(recipe, flight):
    layer, twin = pair(recipe, fuse_wgrad_accumulation=True)
    call, fired = compiled(layer), {id(layer): [], id(twin): []}
    for m in (layer, twin):
        m.weight.main_grad = torch.zeros(N, K)
        m.weight.register_hook(lambda g, m=m: fired[id(m)].append(g.clone()))
        m.weight.register_post_accumulate_grad_hook(lambda p, m=m: fired[id(m)].append(p.grad.clone()))
    for step in range(2):
        for m, run in ((layer, call), (twin, twin)):
            m.weight.grad_added_to_main_grad, m.weight.grad = False, None
            outputs = [run(batch(flight * step + i)[0]) for i in range(flight)]
            for i, y in enumerate(outputs):
                y.backward(batch(flight * step + i)[1])
            assert m.weight.grad_added_to_main_grad is True
            assert_same(m.weight.grad, torch.zeros(N, K))
        assert_same(layer.weight.main_grad, twin.weight.main_grad)
    assert layer.weight.main_grad.any()
    assert len(fired[id(layer)]) == len(fired[id(twin)]) == 4 * flight
    for found, want in zip(fired[id(layer)], fired[id(twin)], strict=True):
        assert_same(found, want)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("how", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_hooks_that_a_graph_would_call_with_none_are_refused(how, hook):
    """A weight that gets no gradient in backward: eager mode does not call its hooks then, and a graph would."""
    layer = make("fp8-current", **{how: True})
    layer.weight.main_grad = torch.zeros(N, K)
    getattr(layer.weight, hook)(lambda _: None)
    refused(compiled(layer), batch(0)[0], words=("hooks", how))


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_get_main_grad_is_asked_in_every_step(recipe):
    """As FSDP gives it: another buffer in each step, and a main_grad that is not to be touched."""
    layer, twin = pair(recipe, fuse_wgrad_accumulation=True)
    call = compiled(layer)
    held = {}
    for m in (layer, twin):
        m.weight.main_grad = torch.full((N, K), 5.0)
        m.weight.get_main_grad = lambda m=m: held[id(m)]
    for i in range(3):
        for m in (layer, twin):
            held[id(m)] = torch.zeros(N, K)
        assert_step((layer, twin), (call, twin), batch(i))
        assert_same(held[id(layer)], held[id(twin)])
        assert held[id(layer)].any(), f"step {i}"
        stepped(layer, twin)
    assert torch.equal(layer.weight.main_grad, torch.full((N, K), 5.0))
    assert layer.weight.grad is None


def test_get_main_grad_without_a_main_grad():
    layer, twin = pair("fp8-block", fuse_wgrad_accumulation=True)
    held = {id(m): torch.zeros(N, K) for m in (layer, twin)}
    for m in (layer, twin):
        m.weight.get_main_grad = lambda m=m: held[id(m)]
    assert_step((layer, twin), (compiled(layer), twin), batch(0))
    assert_same(held[id(layer)], held[id(twin)])
    assert held[id(layer)].any()


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("fp8-current", torch.bfloat16), ("fp8-delayed", torch.float32), ("nvfp4", torch.float32)],
)
def test_main_grad_under_a_checkpoint_is_added_to_once(recipe, dtype):
    layer, twin = pair(recipe, fuse_wgrad_accumulation=True)
    for m in (layer, twin):
        m.weight.main_grad = torch.zeros(N, K, dtype=dtype)
    call = compiled(lambda x: checkpoint(layer, x, use_reentrant=False))
    for i in range(2):
        assert_step((layer, twin), (call, twin), batch(i))
        assert_same(layer.weight.main_grad, twin.weight.main_grad)
    assert layer.weight.main_grad.any()
    assert_state(layer, twin)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "nvfp4"])
def test_compiled_and_eager_microbatches_share_a_gradient_buffer(recipe):
    layer = make(recipe, fuse_wgrad_accumulation=True)
    twin = copy.deepcopy(layer)
    call = compiled(layer)
    for model, runs in ((layer, (call, layer, call)), (twin, (twin, twin, twin))):
        model.weight.main_grad = torch.zeros(40, 48)
        outputs = [run(spiky(24, 48, seed=i)) for i, run in enumerate(runs)]
        for i, y in enumerate(outputs):
            y.backward(spiky(24, 40, seed=9 + i))
    assert_same(layer.weight.main_grad, twin.weight.main_grad)


WRONG = {
    "a list": (lambda: [0.0], "is a list"),
    "on meta": (lambda: torch.zeros(N, K, device="meta"), "on meta, where"),
    "inference": (lambda: made_in_inference_mode(N, K), "made in torch.inference_mode()"),
    "overlaps": (lambda: torch.zeros(N * K).as_strided((N, K), (1, 1)), "overlap"),
}


@pytest.mark.parametrize("getter", [False, True], ids=["main_grad", "get_main_grad"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_buffer_that_dw_cannot_be_added_to_is_refused(wrong, getter):
    layer, (form, words) = make("fp8-current", fuse_wgrad_accumulation=True), wrong
    held = form()
    if getter:
        layer.weight.get_main_grad = lambda: held
    else:
        layer.weight.main_grad = held
    x, dy = batch(0)
    with pytest.raises(Exception, match=re.escape(words)):
        compiled(layer)(x).backward(dy)
