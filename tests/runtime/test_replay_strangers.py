"""Replay beside tensors without memory of the usual kind, and modes, hooks and quantizers of users: they do not change
what is replayed for the next call, and a call that would not be the same is not recorded."""

import ctypes
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import octavo
from octavo import recipes, values
from octavo.quant.tensorwise import Tensorwise
from octavo.runtime import call_cache as calls
from tests.support.recorded_calls import K, Stub, as_written, assert_equal, build, call, example, recordings, step


def gradients(module, x, loss, more=()):
    leaf = x.detach().requires_grad_()
    return list(torch.autograd.grad(loss(module(leaf, *more)), [leaf, *module.parameters()]))


@pytest.mark.parametrize("first", ["zeros", "values"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-delayed"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped"])
def test_a_gradient_that_is_zeros_without_memory(kind, recipe, first, device, monkeypatch):
    """As the backward of torch.sgn hands one on: same shape, same strides, no address."""
    module, (x, dy, more) = build(kind, recipe, device), example(kind, device)

    def zeros(y):
        return torch.sgn(y).sum()

    def times(y):
        return (y * dy).sum()

    for loss in (zeros, times) if first == "zeros" else (times, zeros):
        want = as_written(monkeypatch, partial(gradients, module, x, loss, more))
        for _ in range(3):
            assert_equal(gradients(module, x, loss, more), want)
        assert all((t == 0).all() for t in want) == (loss is zeros)


@pytest.mark.parametrize("which", ["x", "dy"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_a_tensor_that_is_the_negative_of_its_memory(recipe, which, device):
    module, (x, dy, _) = build("linear", recipe, device), example("linear", device)

    def negative(t):
        return torch.complex(torch.zeros_like(t.float()), t.float()).conj().imag

    twin = build("linear", recipe, device).float()
    twin.load_state_dict(module.float().state_dict())
    x, dy = x.float(), dy.float()
    for _ in range(3):
        usual = step(twin, -x if which == "x" else x, -dy if which == "dy" else dy)
        assert negative(x).is_neg()
        assert_equal(step(module, negative(x) if which == "x" else x, negative(dy) if which == "dy" else dy), usual)


def test_a_sparse_gradient(device):
    ops = octavo.ops
    module = octavo.Sequential(ops.AddExtraInput(), ops.AddExtraInput())
    x, e = torch.randn(8, K, device=device, requires_grad=True), torch.randn(8, K, device=device)
    at = torch.tensor([1, 2], device=device)
    for _ in range(4):
        (found,) = torch.autograd.grad(F.embedding(at, module(x, e, e), sparse=True).sum(), x)
        assert torch.equal(found.to_dense().sum(1).nonzero().flatten(), at)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func in (torch.mm, torch.Tensor.__matmul__, torch.matmul) else found


@pytest.mark.parametrize("first", ["inside", "outside"])
def test_a_mode_that_watches_functions(first, device):
    module, (x, _, _) = build("linear", "bf16", device), example("linear", device)
    with torch.no_grad():
        want = module(x)
        with Doubling():
            other = module(x)
        calls.forget()
        for _ in range(3):
            if first == "inside":
                with Doubling():
                    assert torch.equal(module(x), other)
        for _ in range(4):
            assert torch.equal(module(x), want)
        assert recordings() == 1
        with Doubling():
            assert torch.equal(module(x), other)


def test_a_default_device_keeps_nothing_from_being_recorded(device):
    module, args = build("linear", "fp8-current", device), example("linear", device)
    with torch.device("meta"):
        for _ in range(3):
            step(module, *args)
    assert recordings() == 2


def test_where_uninitialized_memory_must_be_nan(device):
    module = build("linear", "fp8-current", device)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            step(module, *example("linear", device))
        assert recordings() == 0
        torch.utils.deterministic.fill_uninitialized_memory = False
        for _ in range(3):
            step(module, *example("linear", device))
        assert recordings() == 2
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block", "fp8-rowwise", "mxfp8"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped"])
def test_hooks_of_one_saved_tensor(kind, recipe, device, monkeypatch):
    """They bring back what was saved, in other memory and turned around; the next call has none."""
    module, (x, dy, more) = build(kind, recipe, device), example(kind, device)

    def away(t):
        return t.detach().clone()

    def back(t):
        return t.T.contiguous().T if t.dim() == 2 else t

    def times(y):
        return (y * dy).sum()

    def hooked():
        leaf = x.detach().requires_grad_()
        y = module(leaf, *more)
        for saved in y.grad_fn._raw_saved_tensors:
            with suppress(RuntimeError):  # what it says of None
                saved.register_hooks(away, back)
        return torch.autograd.grad(y, [leaf, *module.parameters()], dy)

    want = as_written(monkeypatch, partial(gradients, module, x, times, more))
    for _ in range(4):
        assert_equal(gradients(module, x, times, more), want)
    for _ in range(3):
        assert_equal(hooked(), want)
        assert_equal(gradients(module, x, times, more), want)


@values.register("test-stranger")
class Stranger(Tensorwise):
    def _fill(self, x, pair, given):
        super()._fill(x, pair, given)
        for q in pair:
            if q is not None and q.codes.device.type == "cpu":  # stands for a kernel that Octavo does not know of
                ctypes.memset(q.codes.data_ptr(), 0x38, q.codes.numel())


@values.register("test-stranger-recipe")
class StrangerRecipe(recipes.Recipe):
    def gemms(self):
        own, ours = Stranger(), Tensorwise()
        return recipes.LinearQuant.of(x=(own, own), w=(ours, ours), dy=(ours, ours))


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_quantizer_of_somebody_elses(kind, device, monkeypatch):
    module, args = build(kind, StrangerRecipe(), device), example(kind, device)
    want = as_written(monkeypatch, lambda: step(module, *args))
    for _ in range(4):
        assert_equal(step(module, *args), want)
    assert recordings() == 0


def test_rounding_by_somebody_elses(device):
    module, x = octavo.ops.Quantize(recipe=StrangerRecipe()), torch.randn(4, K, device=device)
    with torch.no_grad():
        codes = [module(x).codes.float() for _ in range(4)]
    assert all(torch.equal(codes[0], other) for other in codes)
    assert recordings() == 0


class Maximum(Stub):
    """A kernel that writes its number to the last of its pointers, where it finds zero."""

    def __init__(self, number):
        super().__init__()
        self.tail = (number,)

    def launch(self, *arguments):
        at, number = arguments[-2:]
        assert ctypes.c_float.from_address(at).value == 0
        ctypes.c_float.from_address(at).value = number


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("size", [1, 5, 4096])
def test_kernels_find_zeros_in_every_replay(size, returned, monkeypatch):
    from octavo import launch
    from octavo.runtime.replay import recorder

    monkeypatch.setattr(calls, "DEVICES", {"cpu"})
    monkeypatch.setattr(recorder.Recorder, "_opening", lambda self: ["stream = 0"])
    monkeypatch.setattr(launch._threads, "listener", None, raising=False)
    kernels, seen = [Maximum(3.0), Maximum(7.0)], torch.zeros(1)

    def work(tensors):
        made = []
        for kernel in kernels:
            room = torch.zeros(size)
            kernel.launch(0, 0, 0, 0, room.data_ptr(), *kernel.tail)
            if launch._threads.listener is not None:
                launch._threads.listener(kernel, (room,))
            made.append(room)
        return None, [tensors[0] + 1, *(made if returned else ())]

    for _ in range(4):
        found = call([seen], work)[1]
        assert not returned or [t[0].item() for t in found[1:]] == [3, 7]
    assert recordings() == 1
