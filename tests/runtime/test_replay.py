"""Recorded calls: a replay has the bits of a call that runs as it is written, for as long as calls are of one kind, and
nothing is recorded that could be otherwise the next time."""

import copy
import ctypes
import gc
import importlib
import sys
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo import launch
from octavo._torch.tensors import GUARDS
from octavo.recipes import SHIPPED
from octavo.runtime import call_cache as calls
from octavo.runtime.replay import recorder, source
from tests.support.recipe_traits import is_stochastic
from tests.support.recorded_calls import (
    GROUPS,
    ROWS,
    K,
    N,
    Stub,
    as_written,
    assert_equal,
    build,
    call,
    example,
    recordings,
    step,
)
from tests.support.state_tensors import state_tensors

KINDS = ("linear", "mlp", "grouped", "norm", "activation")


@pytest.mark.parametrize(
    ("kind", "recipe"), [(k, r) for k in KINDS[:3] for r in SHIPPED] + [(k, "") for k in KINDS[3:]]
)
def test_a_replay_does_what_is_written(kind, recipe, device, monkeypatch):
    module = build(kind, recipe, device)
    twin = copy.deepcopy(module)
    for i in range(4):
        args = example(kind, device)
        assert_equal(step(module, *args), as_written(monkeypatch, partial(step, twin, *args)))
        # the first step of delayed scaling measures, and is another call. On a CPU stochastic rounding shifts a
        # number by a tensor, which torch before 2.15 makes a tensor of: such a call is not recorded
        if i > 1 and not (device == "cpu" and recipe and is_stochastic(recipe)):
            assert recordings() == (0 if device == "cpu" and kind == "grouped" else 2)  # that reference reads sizes


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_a_replay_of_products_that_decode_first(kind, recipe, monkeypatch):
    """With more than 64 rows, and features that leave rows of decoded values padded."""
    where = {"recipe": recipe, "device": "cuda", "dtype": torch.bfloat16}
    module = octavo.Linear(100, 132, **where) if kind == "linear" else octavo.GroupedLinear(GROUPS, 100, 132, **where)
    twin = copy.deepcopy(module)
    for _ in range(4):
        x, dy = (torch.randn(300, n, device="cuda", dtype=torch.bfloat16) for n in (100, 132))
        more = () if kind == "linear" else (torch.tensor([100, 0, 150], device="cuda"),)
        assert_equal(step(module, x, dy, more), as_written(monkeypatch, partial(step, twin, x, dy, more)))
    assert recordings() == 2


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block"])
def test_shapes_that_come_and_go(recipe, device, monkeypatch):
    module = build("mlp", recipe, device)
    twin = copy.deepcopy(module)
    for rows in (16, 32, 16, 32, 7, 16, 32, 7, 7):
        args = example("mlp", device, rows)
        assert_equal(step(module, *args), as_written(monkeypatch, partial(step, twin, *args)))
    assert recordings() == 6


def test_memory_that_lies_otherwise(device, monkeypatch):
    """Turned, and off its alignment; each is a kind of its own."""
    module, (x, dy, _) = build("linear", "fp8-current", device), example("linear", device)
    turned = x.T.contiguous().T
    pad = torch.zeros(x.numel() + 1, device=device, dtype=x.dtype)
    shifted = pad[1:].view(x.shape).copy_(x)
    expanded = dy[:1].expand(dy.shape)
    for _ in range(3):
        for given, back in ((x, dy), (turned, dy), (shifted, dy), (x, expanded)):
            want = as_written(monkeypatch, partial(step, module, given, back))
            assert_equal(step(module, given, back), want)
    assert recordings() == 5  # forward of three, and backward of two: what forward saves lies alike in all


def test_a_replay_runs_nothing_else(device, monkeypatch):
    module, args = build("linear", "fp8-current", device), example("linear", device)
    for _ in range(2):
        step(module, *args)
    want = as_written(monkeypatch, partial(step, module, *args))
    monkeypatch.setattr("octavo.ops.linear_layer.layer.forward", None)
    monkeypatch.setattr("octavo.ops.linear_layer.layer.backward", None)
    assert_equal(step(module, *args), want)


@pytest.mark.parametrize("recipe", SHIPPED)
def test_replays_of_a_compiled_model_have_the_bits_of_eager(recipe, device, monkeypatch):
    torch.compiler.reset()
    module = build("mlp", recipe, device)
    twin = copy.deepcopy(module)
    call = torch.compile(module, backend="aot_eager", fullgraph=True)
    for i in range(4):
        args = example("mlp", device)
        assert_equal(step(module, *args, call=call), as_written(monkeypatch, partial(step, twin, *args)))
        assert i < 2 or is_stochastic(recipe) or recordings() == 2


def test_calls_without_gradients_are_replayed(device):
    module, (x, _, _) = build("mlp", "fp8-current", device), example("mlp", device)
    with torch.no_grad():
        want = module(x)
        for _ in range(3):
            assert torch.equal(module(x), want)
    assert recordings() == 1
    with torch.inference_mode():
        assert torch.equal(module(x), want)
    assert torch.equal(module(x), want)


def test_autocast_is_a_kind_of_its_own(device):
    layer = octavo.Linear(K, N, recipe="bf16", device=device)
    x = torch.randn(ROWS, K, device=device)
    for _ in range(3):
        plain = layer(x)
        with torch.autocast(device, torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert plain.dtype == torch.float32 and torch.equal(layer(x), plain)


def test_saved_tensors_that_come_back_otherwise(device, monkeypatch):
    """A hook may hand back what was saved in other strides than it had."""
    module, args = build("linear", "bf16", device), example("linear", device)
    want = as_written(monkeypatch, partial(step, module, *args))

    def turned(t):
        return t.T.contiguous().T if t.dim() == 2 else t.clone()

    for _ in range(3):
        assert_equal(step(module, *args), want)
        with torch.autograd.graph.saved_tensors_hooks(turned, lambda t: t):
            assert_equal(step(module, *args), want)


def test_saved_inputs_that_are_given_other_memory(device, monkeypatch):
    """By their owner, between forward and backward: autograd does not see it, and a replay must."""
    layer = octavo.Linear(K, N, recipe="bf16", device=device, dtype=torch.bfloat16)
    dy = torch.randn(2, 8, N, device=device, dtype=torch.bfloat16)

    def gradients(turn):
        x = torch.ones(2, 8, K, device=device, dtype=torch.bfloat16).requires_grad_()
        y = layer(x)
        if turn:
            x.data = x.data.transpose(0, 1).contiguous().transpose(0, 1)
        return torch.autograd.grad(y, [x, layer.weight], dy)

    want = as_written(monkeypatch, partial(gradients, False))
    for turn in (False, False, False, True, False, True, True):
        assert_equal(gradients(turn), want)


def test_a_backward_from_a_value_that_was_saved(device, monkeypatch):
    """dy is x itself: one name for both would be wrong for the next."""
    layer = octavo.Linear(K, K, recipe="bf16", device=device, dtype=torch.bfloat16)
    x = torch.randn(ROWS, K, device=device, dtype=torch.bfloat16)
    other = torch.randn_like(x)
    for dy in (x, x, x, other, other, other, x):
        found = layer(x.requires_grad_())
        grads = torch.autograd.grad(found, [x, layer.weight], dy)
        want = as_written(monkeypatch, lambda dy=dy: torch.autograd.grad(layer(x), [x, layer.weight], dy))
        assert_equal(grads, want)


def test_calls_of_the_reference_are_not_recorded(device):
    layer, (x, _, _) = build("linear", "fp8-current", device), example("linear", device)
    for _ in range(3):
        want = layer(x)
        with octavo.backend.use("reference"):
            assert torch.equal(layer(x), want) or device == "cuda"  # whose GEMM sums otherwise
    assert recordings() == 1


@pytest.mark.parametrize("settings", [{}, {"tail": "untouched"}, {"bias": False}], ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-block"])
@pytest.mark.parametrize("needs_dx", [False, True])
def test_sizes_of_groups_that_change(recipe, needs_dx, settings, device, monkeypatch):
    where = {"device": device, "dtype": torch.bfloat16}
    layer = octavo.GroupedLinear(GROUPS, K, N, recipe=recipe, **where, **settings)
    twin = copy.deepcopy(layer)
    for sizes in ([10, 12, 10], [2, 20, 10], [30, 1, 1], [0, 0, 32], [16, 0, 16]):
        x, dy, _ = example("grouped", device)
        splits = torch.tensor(sizes, device=device)

        def gradients(m, x=x, dy=dy, splits=splits):
            leaf = x.clone().requires_grad_(needs_dx)
            y = m(leaf, splits)
            wanted = [*m.parameters(), *([leaf] if needs_dx else [])]
            return [y, *torch.autograd.grad(y, wanted, dy)]

        assert_equal(gradients(layer), as_written(monkeypatch, partial(gradients, twin)))


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.running_amaxes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.running_amaxes.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_that_watches_sees_the_same_calls_every_time(device):
    layer, (x, _, _) = build("linear", "fp8-current", device), example("linear", device)
    for _ in range(3):
        layer(x)
    for _ in range(3):
        with Watch() as watch:
            layer(x)
        assert any("octavo" in name for name in watch.running_amaxes)


def test_a_custom_operation_is_never_recorded(device):
    ran = []

    class Counted(octavo.ops.BasicOperation):
        @staticmethod
        def op_forward_compute(config, inputs):
            ran.append(1)
            return inputs.x * 2, ()

        @staticmethod
        def op_forward_save_ctx(config, inputs, y, fresh):
            return ()

        @staticmethod
        def op_backward(config, saved, dy, wants):
            return (dy * 2,)

    model = octavo.Sequential(Counted(), octavo.Linear(K, N, recipe="fp8-current", device=device))
    x = torch.randn(ROWS, K, device=device)
    for _ in range(2):
        model(x)
    before = len(ran)
    for _ in range(3):
        model(x)
    assert len(ran) == before + 3


def test_modules_that_change_under_way(device, monkeypatch):
    module = build("mlp", "fp8-delayed", device)
    twin = copy.deepcopy(module)
    for i in range(12):
        for m in (module, twin):
            if i == 3:
                m.eval()
            if i == 5:
                m.train()
                m[1].weight.requires_grad_(False)
            if i == 7:
                m[1].weight.requires_grad_(True)
                m[3].weight = nn.Parameter(torch.randn_like(m[3].weight, generator=None) * 0 + 0.5)
            if i == 9:
                m.float()
        x, dy, _ = example("mlp", device)
        dtype = module[1].weight.dtype
        args = (x.to(dtype), dy.to(dtype))
        assert_equal(step(module, *args), as_written(monkeypatch, partial(step, twin, *args)))


@pytest.mark.parametrize("mode", ["add", "overwrite"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped"])
def test_gradients_that_go_to_main_grad(kind, mode, device, monkeypatch):
    """Buffers that change from step to step; those of groups are looked at every time."""
    module = build(kind, "fp8-current", device)
    twin = copy.deepcopy(module)
    for i in range(4):
        args, found = example(kind, device), []
        for m, run in ((module, step), (twin, lambda *a: as_written(monkeypatch, partial(step, *a)))):
            for layer in [layer for layer in m.modules() if hasattr(layer, "_weight_parts")]:
                layer.fuse_wgrad_accumulation = True
                for p in layer._weight_parts():
                    p.grad_added_to_main_grad, p.overwrite_main_grad = False, mode == "overwrite"
                    if i != 2:
                        p.main_grad = torch.full(p.shape, 0.5, device=device)
            made = run(m, *args)
            flags = [p.grad_added_to_main_grad for p in m.parameters() if hasattr(p, "main_grad")]
            assert flags and all(flags)
            found.append([*made, *[p.main_grad for p in m.parameters() if hasattr(p, "main_grad")]])
        assert_equal(*found)
    assert recordings() == (2 if kind != "grouped" else device == "cuda")


def test_two_backwards_of_one_forward(device, monkeypatch):
    layer, (x, dy, _) = build("linear", "fp8-current", device), example("linear", device)
    want = as_written(monkeypatch, lambda: torch.autograd.grad(layer(x), layer.weight, dy))
    for _ in range(3):
        y = layer(x)
        assert_equal(torch.autograd.grad(y, layer.weight, dy, retain_graph=True), want)
        assert_equal(torch.autograd.grad(y, layer.weight, dy), want)


def test_vmap_goes_on(device):
    layer = octavo.Linear(K, N, recipe="bf16", device=device)
    x = torch.randn(4, 3, K, device=device)
    with torch.no_grad():
        for _ in range(3):
            found = torch.vmap(layer)(x)
    torch.testing.assert_close(found, layer(x))


def test_threads_replay_calls_with_the_bits_of_one_thread(device, monkeypatch):
    layers = [build("linear", "fp8-current", device) for _ in range(4)]
    examples = [example("linear", device) for _ in layers]
    want = [as_written(monkeypatch, partial(step, m, *a)) for m, a in zip(layers, examples, strict=True)]
    wrong = []

    def work(i):
        for _ in range(8):
            found = step(layers[i], *examples[i])
            if not all(torch.equal(a, b) for a, b in zip(found, want[i], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- the latest one, found by guards ----------------------------------------------------------------------------------


@pytest.fixture
def keys(monkeypatch):
    """The calls for which a key was made."""
    made = []
    real = calls.key_of
    monkeypatch.setattr(calls, "key_of", lambda *a: made.append(a) or real(*a))
    return made


@pytest.mark.parametrize(("kind", "recipe"), [("linear", "fp8-delayed"), ("mlp", "fp8-current"), ("norm", "")])
def test_a_call_like_the_last_one_needs_no_key(kind, recipe, device, monkeypatch, keys):
    module = build(kind, recipe, device)
    twin = copy.deepcopy(module)
    for i in range(6):
        keys.clear()
        args = example(kind, device)
        found = step(module, *args)
        assert i < 4 or not keys, "as written, twice; recorded; found by its key; found by guards"
        assert_equal(found, as_written(monkeypatch, partial(step, twin, *args)))


def test_calls_that_differ_from_the_last_one_are_told_apart(device, monkeypatch, keys):
    module, (x, dy, _) = build("linear", "fp8-current", device), example("linear", device)
    turned = x.T.contiguous().T
    pad = torch.zeros(x.numel() + 1, device=device, dtype=x.dtype)
    shifted, expanded = pad[1:].view(x.shape).copy_(x), dy[:1].expand(dy.shape)
    for given, back in ((x, dy), (turned, dy), (shifted, dy), (x, expanded), (-x, torch._neg_view(dy))):
        for _ in range(5):
            step(module, x, dy)
        keys.clear()
        step(module, x, dy)
        assert not keys
        want = as_written(monkeypatch, partial(step, module, given, back))
        assert_equal(step(module, given, back), want)


def test_latest_calls_under_modes_run_as_written(device, monkeypatch):
    module, args = build("linear", "fp8-current", device), example("linear", device)
    for _ in range(5):
        step(module, *args)
    want = as_written(monkeypatch, partial(step, module, *args))
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        found = step(module, *args)
    assert_equal(found, want)
    assert torch.ops.octavo.run.default in seen
    with torch.autocast(device, torch.float16):
        assert module(args[0].float()).dtype == torch.float16


def test_a_kind_that_keeps_changing_stops_making_guards(device, monkeypatch):
    made = []
    monkeypatch.setattr(calls, "same_layouts", lambda tensors: made.append(tensors) or (lambda *_: False))
    module, args = build("linear", "bf16", device), example("linear", device)
    for _ in range(calls.GUARDED + 6):
        step(module, *args)
    assert len(made) == 2 * calls.GUARDED  # forward and backward


def test_without_torch_s_guards_calls_are_replayed_by_their_keys(device, monkeypatch):
    monkeypatch.setattr(GUARDS, "_reason", "this test says so")
    module, args = build("linear", "bf16", device), example("linear", device)
    for _ in range(5):
        step(module, *args)
    assert recordings() == 2 and not calls._hits


def test_guards_keep_no_tensor(device):
    module, (x, dy, _) = build("linear", "bf16", device), example("linear", device)
    for _ in range(5):
        step(module, x, dy)
    assert calls._hits
    gone = weakref.ref(x), weakref.ref(dy), weakref.ref(module.weight)
    del x, dy, module
    gc.collect()
    assert [one() for one in gone] == [None] * 3


# -- by itself ---------------------------------------------------------------------------------------------------------


def numbers(device, n=4):
    return torch.arange(float(n), device=device)


def test_the_second_call_is_written_down_and_the_third_is_read(device):
    ran = []

    def work(tensors):
        ran.append(1)
        return "about", [tensors[0] + 1, None, tensors[0], tensors[0].view(2, 2)]

    for i in range(5):
        x = numbers(device) * i
        about, (y, nothing, same, view) = call([x], work)
        assert (about, nothing) == ("about", None) and same is x
        assert torch.equal(y, x + 1) and view.data_ptr() == x.data_ptr() and view.shape == (2, 2)
    assert len(ran) == 2


def test_what_is_not_needed_is_let_go_and_what_is_not_used_is_not_made(device):
    def work(tensors):
        torch.empty(3, device=device)  # for nobody
        between = tensors[0] * 2
        y = between + 1
        del between
        return None, [y * 3]

    for _ in range(2):
        call([numbers(device)], work)
    (source,) = calls.sources()
    lines = [line.strip() for line in source.splitlines()]
    assert not any("(3,)" in line for line in lines)
    assert [line.split()[0] for line in lines if line.startswith("del")] == ["del", "del", "del"]
    assert torch.equal(call([numbers(device)], work)[1][0], (numbers(device) * 2 + 1) * 3)


def refused(work, tensors):
    for _ in range(4):
        found = call(tensors(), work)
    assert recordings() == 0
    return found[1][0]


def test_a_value_that_is_read_keeps_a_call_from_being_recorded(device):
    values = iter(range(1, 9))

    def work(tensors):
        return None, [tensors[0] * tensors[0].sum().item()]

    assert refused(work, lambda: [numbers(device) * next(values)]).tolist() == [0, 4 * 24, 8 * 24, 12 * 24]


@pytest.mark.parametrize(
    "read", [lambda t: t.tolist()[1], lambda t: t.cpu().numpy()[1], lambda t: memoryview(t.cpu().numpy())[1]]
)
def test_a_value_that_is_read_without_an_operator_keeps_a_call_from_being_recorded(read, device):
    values = iter(range(1, 9))
    found = refused(lambda tensors: (None, [tensors[0] * read(tensors[0])]), lambda: [numbers(device) * next(values)])
    assert found.tolist() == [0, 16, 32, 48]


def test_memory_that_is_exchanged_keeps_a_call_from_being_recorded(device):
    def work(tensors):
        y = tensors[0] + 1
        y.data = tensors[0] * 2
        return None, [y]

    assert refused(work, lambda: [numbers(device)]).tolist() == [0, 2, 4, 6]


def test_a_shape_that_depends_on_values_keeps_a_call_from_being_recorded(device):
    assert refused(lambda tensors: (None, [tensors[0].nonzero()]), lambda: [numbers(device)]).numel() == 3


def test_a_tensor_from_elsewhere_keeps_a_call_from_being_recorded(device):
    elsewhere = numbers(device)

    def work(tensors):
        elsewhere.add_(1)
        return None, [tensors[0] + elsewhere]

    assert refused(work, lambda: [numbers(device)])[0] == 4


def test_one_tensor_given_twice_is_a_kind_of_its_own(device):
    def work(tensors):
        return None, [tensors[0] * 2 + tensors[1]]

    def hits(tensors):
        hit = calls.find(("hit",), tensors)
        return calls.run(("work",), tensors, work, ("hit",))[1][0] if hit is None else hit.replay(tensors)[1][0]

    x = numbers(device)
    for _ in range(5):
        assert torch.equal(hits([x, x]), x * 3)
    assert recordings() == 1 and calls.find(("hit",), [x, x]) is not None
    assert calls.find(("hit",), [x, x * 10]) is None, "its recording has one name for both"
    for _ in range(5):
        assert torch.equal(hits([x, x * 10]), x * 12)
    assert torch.equal(hits([x, x]), x * 3) and recordings() == 2


@pytest.mark.parametrize("inference", [False, True])
def test_addresses_of_views(inference, monkeypatch):
    """They are reckoned from what the view is of, however it came about, itself included."""
    monkeypatch.setattr(calls, "DEVICES", {"cpu"})
    monkeypatch.setattr(recorder.Recorder, "_opening", lambda self: ["stream = 0"])
    stub = Stub()

    def work(tensors):
        x = tensors[0]
        fresh, copy, turned = x + 1, x.to(torch.float64), x.view(2, 2).T.reshape(4)
        views = (
            x.detach(), x[1:], x[1:].view(3, 1)[1:].T, x.unbind()[3], x.view(torch.int32)[2:], x.to(x.dtype)[1:],
            torch.ops.aten.lift_fresh(x), torch.ops.aten.lift_fresh(x)[2:], fresh.view(2, 2)[1], x[4:], None,
            copy[1:], turned[1:], x.reshape(2, 2)[1],
        )  # fmt: skip
        if launch._threads.listener is not None:
            launch._threads.listener(stub, views)
        return None, [fresh, copy, turned]

    launch._threads.listener = None
    for _ in range(4):
        x = numbers("cpu")
        with torch.inference_mode(inference):  # where torch shows aten.to and aten.reshape themselves
            found = call([x], work)[1]
        if stub.launched:
            at, (fresh, copy, turned) = x.data_ptr(), [t.data_ptr() for t in found]
            assert stub.launched.pop() == (
                at, at + 4, at + 8, at + 12, at + 8, at + 4, at, at + 8, fresh + 8, x[4:].data_ptr(), 0,
                copy + 8, turned + 4, at + 8,
            )  # fmt: skip
    assert recordings() == 1 and "data_ptr() + 8" in calls.sources()[0]


class Adding(Stub):
    """A kernel that adds the first number at each pointer but the last to the one at the last, and sets them to 9."""

    def launch(self, *arguments):
        *given, into = [ctypes.c_float.from_address(address) for address in arguments[4:]]
        for one in given:
            into.value += one.value
            one.value = 9.0


def test_zeros_that_kernels_get_are_one_allocation(monkeypatch):
    monkeypatch.setattr(calls, "DEVICES", {"cpu"})
    monkeypatch.setattr(recorder.Recorder, "_opening", lambda self: ["stream = 0"])
    stub, large = Adding(), source.SMALL // 4 + 1

    def work(tensors):
        x = tensors[0].clone()
        first, second, third = torch.zeros(3, 1), torch.zeros(large), torch.zeros(65, dtype=torch.int32)
        leaves, read = torch.zeros(2), torch.zeros(1)
        pointers = first, second, third, third[64:], first[2:], leaves, read, x
        stub.launch(0, 0, 0, 0, *[t.data_ptr() for t in pointers])
        if launch._threads.listener is not None:
            launch._threads.listener(stub, pointers)
        return None, [x, leaves, read + 1]

    launch._threads.listener = None
    for i in range(5):
        x = numbers("cpu") + i
        found = call([x], work)[1]
        assert_equal(found, [x, torch.tensor([9.0, 0.0]), torch.tensor([10.0])])
    (text,) = calls.sources()
    assert "(768, dtype=" in text, text  # 12 and 260 bytes, each from a multiple of 256 on
    assert text.count("device=") == 4, text  # and the large ones, those that leave, those that an operator reads


class Writing(Stub):
    """A kernel that writes 0, 1, 2, ... to the first of its pointers."""

    def launch(self, *arguments):
        ctypes.memmove(arguments[4], (ctypes.c_float * 6)(*range(6)), 24)


def turned(room):
    return room.T


def turned_twice(room):
    return room.view(6).view(3, 2).t().detach()


def as_it_is(room):
    return room.view(2, 3)


def left_out(room):
    return room[:, 1:]


def of_other_bits(room):
    return room.view(torch.int32)


def inserted(room):
    return room.unsqueeze(1).permute(2, 1, 0)


@pytest.mark.parametrize("view", [turned, turned_twice, as_it_is, left_out, of_other_bits, inserted])
@pytest.mark.parametrize("used", ["as a view", "both ways", "returned", "both returned"])
def test_room_that_is_used_in_another_form(view, used, monkeypatch):
    """It is allocated in that form, unless somebody uses it as it was, or a view is not all of it."""
    monkeypatch.setattr(calls, "DEVICES", {"cpu"})
    monkeypatch.setattr(recorder.Recorder, "_opening", lambda self: ["stream = 0"])
    stub, launched = Writing(), []

    def work(tensors):
        room = torch.empty(2, 3)
        stub.launch(None, None, None, None, room.data_ptr())
        if launch._threads.listener is not None:
            launch._threads.listener(stub, (room,))
        seen = view(room)
        launched.append(1)
        if used == "as a view":
            return None, [seen + tensors[0]]
        if used == "both ways":
            return None, [seen + tensors[0], room * 2]
        return None, [seen] if used == "returned" else [seen, room]

    monkeypatch.setattr(launch._threads, "listener", None, raising=False)
    found = [call([torch.ones(1)], work)[1] for _ in range(4)]
    assert len(launched) == 2 and recordings() == 1
    for again in found[1:]:
        for one, other in zip(found[0], again, strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype
    folds = view not in (left_out, of_other_bits) and used in ("as a view", "returned")
    assert calls.sources()[0].count("(2, 3), (3, 1)") == (0 if folds and view is not as_it_is else 1)
    if used.endswith("returned") and len(found[3]) == 2:
        assert found[3][0].untyped_storage().data_ptr() == found[3][1].untyped_storage().data_ptr()


def test_room_with_something_in_it_is_not_allocated_anew(device):
    def work(tensors):
        room = torch.zeros(2, 3, device=device)
        filled = torch.empty(2, 3, device=device).fill_(2)
        return None, [room.T + tensors[0], filled.T + tensors[0]]

    for _ in range(4):
        zeros, twos = call([torch.ones(1, device=device)], work)[1]
        assert (zeros == 1).all() and (twos == 3).all()
    assert recordings() == 1


def test_what_is_written_in_place(device):
    def work(tensors):
        x, buffer = tensors
        torch.maximum(buffer, x.sum(), out=buffer)
        return None, [x * 2]

    buffer = torch.zeros(1, device=device)
    for i in range(5):
        call([numbers(device) * i, buffer], work)
        assert buffer.item() == 6 * i


def test_an_error_while_a_call_is_recorded(device):
    fails = iter([False, True, False, False])

    def work(tensors):
        y = tensors[0] + 1
        if next(fails):
            raise ValueError("halfway")
        return None, [y]

    call([numbers(device)], work)
    with pytest.raises(ValueError, match="halfway"):
        call([numbers(device)], work)
    assert getattr(launch._threads, "listener", None) is None and torch._C._len_torch_dispatch_stack() == 0
    for _ in range(3):
        assert call([numbers(device)], work)[1][0][0] == 1
    assert recordings() == 1


def test_many_kinds_in_many_threads(device, monkeypatch):
    monkeypatch.setattr(calls, "MOST", 2)
    failed = []

    def work(tensors):
        return None, [tensors[0] + 1]

    def run(seed):
        try:
            for i in range(300):
                n = 1 + (i * seed) % 5
                assert torch.equal(call([numbers(device, n)], work)[1][0], numbers(device, n) + 1)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2, 3, 4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed


def test_a_replay_keeps_no_tensor_alive(device):
    def work(tensors):
        return None, [tensors[0] + 1]

    x = numbers(device)
    for _ in range(3):
        y = call([x], work)[1][0]
    gone = weakref.ref(x), weakref.ref(y)
    del x, y
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_detached_twins_are_left_out_unless_they_leave(device):
    def work(tensors):
        inside, leaves, base = tensors[0].detach(), tensors[0].detach(), tensors[1].detach()
        return None, [inside + 1, leaves, base.view(2, 2)]

    for i in range(4):
        x, y = numbers(device) + i, numbers(device) * i
        with torch.no_grad():
            found = call([x, y], work)[1]
        assert_equal(found, [x + 1, x, y.view(2, 2)])
        assert found[1] is not x
    (text,) = calls.sources()
    made = [line for line in text.splitlines() if line.strip().startswith("t")]
    assert len(made) == 4, text  # a sum, two twins, a view


def test_the_kinds_used_last_are_remembered(device, monkeypatch):
    monkeypatch.setattr(calls, "MOST", 3)

    def work(tensors):
        return None, [tensors[0] + 1]

    for n in (1, 2, 3, 1, 4, 1, 5, 1, 6, 1):
        call([numbers(device, n)], work)
    assert len(calls._recordings) == 3 and recordings() == 1


def test_on_a_cpu_nothing_is_recorded():
    layer, args = build("linear", "fp8-current", "cpu"), example("linear", "cpu")
    for _ in range(3):
        step(layer, *args)
    assert not calls._recordings


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_replay_in_a_cuda_graph(recipe):
    module = build("mlp", recipe, "cuda")
    x, dy, _ = example("mlp", "cuda")
    x.requires_grad_()

    def call():
        y = module(x)
        grads = torch.autograd.grad(y, [x, *module.parameters()], dy)
        return y.detach(), *grads  # a graph that lives on would bring its own stream into the capture

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        octavo.step(module)
        for _ in range(3):
            call()
        assert recordings() == 2
        seeds = [b.clone() for b in state_tensors(module)]
        want = call()
        for buffer, before in zip(state_tensors(module), seeds, strict=True):
            buffer.copy_(before)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for buffer, before in zip(state_tensors(module), seeds, strict=True):
        buffer.copy_(before)
    graph.replay()
    assert_equal(found, want)


@pytest.mark.gpu
def test_a_profiler_of_launches_is_told_of_each(monkeypatch):
    layer, (x, _, _) = build("linear", "fp8-current", "cuda"), example("linear", "cuda")
    with torch.no_grad():
        for _ in range(3):
            want = layer(x)
        calls = []
        hook = importlib.import_module("triton.knobs").runtime.launch_enter_hook
        hook.add(lambda metadata: calls.append(1))
        try:
            assert torch.equal(layer(x), want) and calls
        finally:
            hook.calls.clear()


@pytest.mark.parametrize(("dtype", "once"), [(torch.uint8, True), (torch.int16, False)])
def test_memory_that_is_used_in_one_other_dtype_of_its_size_is_allocated_in_it(dtype, once):
    """A graph has codes as bytes: no view is made for that at every step."""

    def work(tensors):
        codes = torch.empty(8, 4, dtype=torch.float8_e4m3fn)
        return None, (codes.view(dtype).fill_(3),)

    watch = recorder.Recorder([torch.ones(1)])
    with watch.watching():
        made = work(())
    replay = watch.function(*made)
    assert (replay.source.count(" = ") == 2) == once  # the input, the allocation, and no view of it
    assert_equal(replay([torch.ones(1)])[1], made[1])


def test_a_call_of_another_alignment_does_not_run_the_replay_of_the_last_one(device, keys):
    module, (x, dy, _) = build("linear", "fp8-current", device), example("linear", device)
    shifted = torch.zeros(x.numel() + 1, device=device, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    for _ in range(5):
        step(module, x, dy)
    keys.clear()
    step(module, shifted, dy)
    assert keys, "no key was made: the replay of the last call ran"
