"""octavo.offload: the same bits with saved tensors on the host. On a CPU the copies are made too, without streams."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo._torch.autograd import saved_tensors_hooks
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import assert_same, spiky
from tests.support.steps import assert_equal, assert_state, compiled, step, update

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def pair(recipe="fp8-block", device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(
        octavo.LayerNormMLP(64, 96, normalization="RMSNorm", activation="swiglu", recipe=recipe),
        octavo.Linear(64, 64, recipe=recipe), nn.GELU(),
    ).to(device)  # fmt: skip
    return model, copy.deepcopy(model)


def inside(block, call):
    def run(x):
        with block:
            return call(x)

    return run


def batch(i=0):
    return spiky(16, 64, seed=i), spiky(16, 64, seed=i + 5)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("recipe", SHIPPED)
def test_all_results_have_the_bits_without_it(recipe, mode):
    model, twin = pair(recipe)
    block = octavo.offload(model, least=1)
    call = inside(block, compiled(model) if mode == "compiled" else model)
    for i in range(3):
        assert_equal(step(model, *batch(i), call=call), step(twin, *batch(i)))
        assert block.moved_bytes == block.saved_bytes > 0
        update(model), update(twin)
    assert_state(model, twin)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_gradient_buffer_stays_and_is_written_to(mode):
    layer, twin = (octavo.Linear(64, 48, recipe="fp8-delayed", fuse_wgrad_accumulation=True) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    for each in (layer, twin):
        each.weight.main_grad = torch.zeros(48, 64)
    call = inside(octavo.offload(layer, least=1), compiled(layer) if mode == "compiled" else layer)
    for i in range(2):
        x, dy = batch(i)[0], spiky(16, 48, seed=i + 9)
        assert_equal(step(layer, x, dy, call=call), step(twin, x, dy))
    assert_same(layer.weight.main_grad, twin.weight.main_grad)


def test_codes_take_a_byte_a_value():
    moved = {}
    for recipe in ("fp8-block", "bf16"):
        torch.manual_seed(0)
        model = octavo.Linear(512, 512, recipe=recipe, keep_weight_codes=False)
        block = octavo.offload(model, least=1)
        with block:
            model(torch.randn(256, 512))
        moved[recipe] = block.moved_bytes
    values = 256 * 512
    assert moved["bf16"] == 4 * values and values <= moved["fp8-block"] < 1.05 * values


def test_parameters_and_state_stay():
    model = nn.Sequential(octavo.Linear(64, 64, recipe="bf16"), octavo.Linear(64, 64, recipe="fp8-delayed"))
    own = {t.untyped_storage().data_ptr() for t in model.parameters()}
    block = octavo.offload(model, least=1)
    with block:
        y = model(spiky(16, 64).requires_grad_())
        inner = block._hooks[-1].pack_hook.__self__
    held = [ref() for ref in inner.moved]
    assert held and not any(saved.buffer.data_ptr() in own for saved in held)
    assert not any(tuple(saved.shape) == (64, 64) and saved.dtype == torch.float32 for saved in held)
    y.sum().backward()


def test_the_share_bounds_the_bytes():
    model, _ = pair()
    for share in (0.0, 0.3, 0.6):
        block = octavo.offload(model, share=share, least=1)
        with block:
            model(batch()[0])
        assert block.moved_bytes <= share * block.saved_bytes
        assert (block.moved_bytes > 0) == (share > 0)


def test_what_is_saved_first_is_moved_once_the_bytes_are_known():
    """A copy of what is saved last would have nothing to hide behind."""
    layers, tokens = 8, 16
    model = nn.Sequential(*[octavo.Linear(64, 64, recipe="fp8-block", keep_weight_codes=False) for _ in range(layers)])
    block = octavo.offload(model, share=0.5, least=1)
    for number in range(2):
        with block:
            y = model(torch.randn(tokens, 64))
            inner = block._hooks[-1].pack_hook.__self__
        if number == 1:
            assert inner.moved_bytes[-1] == block.moved_bytes == block.saved_bytes / 2
            assert set(inner.stayed_before) == {0}
        y.sum().backward()


@pytest.mark.parametrize(("prefetch", "want"), [(0, [1, 2, 3, 4]), (2, [2, 2, 3, 4])])
def test_copies_come_back_as_backward_frees_memory(prefetch, want):
    model = nn.Identity()
    block = octavo.offload(model, share=0.5, least=1, prefetch=prefetch)
    for _ in range(2):
        tensors = [torch.full((32,), float(i)) for i in range(8)]
        with block:
            packed = [pack(t) for t in tensors for pack, _ in [saved_tensors_hooks(True)]]
            _, unpack = saved_tensors_hooks(True)
    first, last = packed[:4], packed[4:]
    back = []
    for tensor, saved in zip(reversed(tensors[4:]), reversed(last), strict=True):
        assert_same(unpack(saved), tensor)
        back.append(sum(s._fetched is not None for s in first))
    assert back == want  # one for each that was freed
    for tensor, saved in zip(reversed(tensors[:4]), reversed(first), strict=True):
        assert_same(unpack(saved), tensor)


@pytest.mark.parametrize("least", [1, 2**20])
def test_a_tensor_that_stays_and_is_written_to_is_refused(least):
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    with octavo.offload(layer, least=least, share=0.0):
        y = layer(x).square().sum()
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(UnsupportedConfig, match=r"\[4, 8\].*written to in place before backward"):
        y.backward()


def test_a_parameter_that_is_written_to_before_backward_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with octavo.offload(model, least=1):
        y = model(torch.randn(4, 8))
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    with pytest.raises(UnsupportedConfig, match="written to in place"):
        y.sum().backward()


def test_small_tensors_stay():
    model, _ = pair()
    with octavo.offload(model, least=2**20) as block:
        model(batch()[0])
    assert block.saved_bytes == 0


def test_host_memory_serves_every_step():
    model, _ = pair()
    block, sizes = octavo.offload(model, least=1), []
    for i in range(4):
        step(model, *batch(i), call=inside(block, model))
        gc.collect()
        sizes.append(block._memory.nbytes)
    assert sizes[1] == sizes[3] > 0


def test_a_tensor_that_is_saved_twice_is_moved_once():
    model = nn.Identity()
    x = torch.randn(256, requires_grad=True) * 1.0
    block = octavo.offload(model, least=1)
    with block:
        y = x * x + x.exp() * x
    assert block.moved_bytes == 2 * x.nbytes  # x, and its exponential
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, 2 * x + x.exp() * (x + 1))


def test_a_tensor_written_to_afterwards_is_saved_as_it_was():
    x, model = torch.randn(64, requires_grad=True), nn.Identity()
    with octavo.offload(model, least=1):
        h = x * 2
        first = h * h
        h.add_(1)  # torch refuses this backward without the copy
    first.sum().backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())


def test_backward_twice_and_microbatches_in_flight():
    model, twin = pair()
    block = octavo.offload(model, least=1, prefetch=1)
    ys, wants = [], []
    for i in range(3):
        with block:
            ys.append(model(batch(i)[0]))
        wants.append(twin(batch(i)[0]))
    for i in (1, 0, 2):
        for y in (ys[i], wants[i]):
            y.backward(batch(i)[1], retain_graph=True)
            y.backward(batch(i)[1])
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same(a.grad, b.grad)


def test_beside_a_checkpoint():
    model, twin = pair("fp8-delayed")

    def run(module):
        return lambda x: module[2](checkpoint(module[1], module[0](x), use_reentrant=False))

    for i in range(2):
        found = step(model, *batch(i), call=inside(octavo.offload(model, least=1), run(model)))
        assert_equal(found, step(twin, *batch(i), call=run(twin)))
        update(model), update(twin)
    assert_state(model, twin)


def test_what_does_not_fit():
    model, _ = pair()
    for settings, said in (({"share": 1.5}, "share="), ({"least": -1}, "least="), ({"prefetch": 0.5}, "prefetch=")):
        with pytest.raises(UnsupportedConfig, match=said):
            octavo.offload(model, **settings)
    with pytest.raises(UnsupportedConfig, match="takes a model"):
        octavo.offload(torch.ones(3))
    block = octavo.offload(octavo.Linear(8, 8))
    gc.collect()
    with pytest.raises(UnsupportedConfig, match="keeps no model alive"), block:
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-block", "nvfp4"])
def test_on_a_gpu(recipe, mode):
    model, twin = pair(recipe, "cuda")
    block = octavo.offload(model, least=1)
    call = inside(block, compiled(model, "inductor") if mode == "compiled" else model)
    for i in range(5):
        x, dy = (t.cuda() for t in batch(i))
        want = step(twin, x, dy, call=compiled(twin, "inductor") if mode == "compiled" else None)
        assert_equal(step(model, x, dy, call=call), want)
        assert block.moved_bytes == block.saved_bytes > 0
        update(model), update(twin)
    assert_state(model, twin)


@pytest.mark.gpu
def test_memory_of_the_gpu_is_free_until_backward():
    model = nn.Sequential(*[octavo.Linear(2048, 2048, recipe="fp8-block", keep_weight_codes=False) for _ in range(8)])
    model.cuda()
    x, held = torch.randn(8192, 2048, device="cuda"), {}
    for name, around in (("plain", None), ("offload", octavo.offload(model))):
        before = torch.cuda.memory_allocated()
        if around is None:
            y = model(x)
        else:
            with around:
                y = model(x)
        torch.cuda.synchronize()
        held[name] = torch.cuda.memory_allocated() - before
        y.sum().backward()
        del y
        model.zero_grad()
    assert held["offload"] < held["plain"] - 6 * 8192 * 2048


@pytest.mark.gpu
def test_a_capture_is_refused():
    model = octavo.Linear(64, 64).cuda()
    x, block = torch.randn(16, 64, device="cuda"), octavo.offload(model)
    with pytest.raises(UnsupportedConfig, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()), block:
        model(x)
