"""What docs/compile.md and the acceptance list promise of Linear under torch.compile, from outside.

Every comparison is bit by bit against a copy of the module that runs in eager mode, on data that is new in every
iteration. Unless a test is about Inductor, graphs run under aot_eager: the same nodes, without code generation."""

import copy
import functools
import gc
import hashlib
import inspect
import json
import logging
import os
import subprocess
import sys
import textwrap
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import octavo
import octavo.quant as Q
from octavo import values
from octavo.errors import UnsupportedConfig
from octavo.kernels.gemm import reference as gemm_reference
from octavo.lower import graph
from octavo.recipes import SHIPPED
from tests.lower.recorder import Recorder, recorded, without_gradients
from tests.modules.oracle import OTHERS, QUANTIZED, assert_same, graphs_of, make, seed_of, spiky
from tests.quant.sameness import assert_same as assert_same_codes

K, N, M = 48, 40, 24
ALL_RECIPES = len(SHIPPED)
every = pytest.mark.parametrize("recipe", SHIPPED)
quantized = pytest.mark.parametrize("recipe", QUANTIZED)
sample = pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "nvfp4"])


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # a third of the time under pytest


def compiled(call, **options):
    return torch.compile(call, fullgraph=True, **{"backend": "aot_eager", **options})


def graphs():
    assert "unique_graphs" in counters["stats"], "nothing was compiled, or the counter has another name"
    return counters["stats"]["unique_graphs"]


def batch(i, m=M, k=K, n=N, dtype=torch.float32):
    return spiky(m, k, seed=100 + i, dtype=dtype), spiky(m, n, seed=500 + i, dtype=dtype)


def pair(recipe, k=K, n=N, **options):
    layer = make(recipe, k, n, **options)
    return layer, copy.deepcopy(layer)


def results(model, call, x, dy, **flags):
    """The output and every gradient of one step that starts without gradients."""
    model.zero_grad(set_to_none=True)
    leaf = x.detach().clone().requires_grad_()
    y = call(leaf, **flags)
    y.backward(dy)
    return {"y": y.detach().clone(), "dx": leaf.grad, **{name: p.grad for name, p in model.named_parameters()}}


def assert_results(found, want):
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert_same(found[name], value, name)


def assert_step(twins, calls, data, **flags):
    """One step of each of two modules gives the same; returns what it gave."""
    found, want = (results(m, call, *data, **flags) for m, call in zip(twins, calls, strict=True))
    assert_results(found, want)
    return found


def assert_state(a, b):
    """Windows and scales of delayed scaling, counters of stochastic rounding."""
    want = octavo.state_dict(b)
    assert octavo.state_dict(a).keys() == want.keys()
    for key, value in octavo.state_dict(a).items():
        assert_same(value, want[key], key)


def stepped(*models):
    for model in models:
        octavo.step(model)


def said(text, *words):
    """The line of an error or warning that has all of these words; source lines of a traceback do not count."""
    lines = [line.strip() for line in str(text).splitlines()]
    hits = [line for line in lines if all(word in line for word in words) and not line.startswith(("File ", "return "))]
    assert hits, f"no sentence with {words} in:\n{text}"
    return hits[0]


def refused(call, *args, words):
    """The sentence a call was refused with."""
    with pytest.raises(Exception) as caught:  # noqa: PT011, a compiler wraps whatever is raised while it traces
        call(*args)
    return said(caught.value, *words)


# -- 15-17: sizes ----------------------------------------------------------------------------------------------------


class Bank(nn.Module):
    """A layer of every recipe side by side, each with its own slice of x: one compilation for all of them."""

    def __init__(self, recipes=SHIPPED, **options):
        super().__init__()
        self.layers = nn.ModuleList([make(recipe, seed=i, **options) for i, recipe in enumerate(recipes)])

    def forward(self, x, **flags):
        return torch.stack([layer(x[i], **flags) for i, layer in enumerate(self.layers)])


def bank(*recipes, **options):
    model = Bank(recipes or SHIPPED, **options)
    return model, copy.deepcopy(model)


def batches(i, m=M, layers=ALL_RECIPES):
    """Slices of x and dy for a bank."""
    return spiky(layers, m, K, seed=100 + i), spiky(layers, m, N, seed=500 + i)


def test_a_batch_marked_dynamic_has_one_graph_after_one_call():
    model, twin = bank()
    call = compiled(model)
    for i, m in enumerate((24, 2, 7, 33, 130)):
        x, dy = batches(i, m)

        def marked(x, i=i):
            if i == 0:
                torch._dynamo.mark_dynamic(x, 1)
            return call(x)

        assert_step((model, twin), (marked, twin), (x, dy))
        assert graphs() == 1, f"{m} tokens"
    assert_state(model, twin)


def test_sizes_found_dynamic_on_the_way_take_two_graphs_at_most():
    model, twin = bank()
    call = compiled(model)
    for i, m in enumerate((24, 9, 33, 2, 65)):
        assert_step((model, twin), (call, twin), batches(i, m))
    assert 1 <= graphs() <= 2


def test_no_token_and_one_token_through_a_callable_compiled_for_many():
    model, twin = bank("bf16", "fp8-delayed", "fp8-block", "nvfp4")
    call = compiled(model, dynamic=True)
    for i, m in enumerate((24, 0, 1, 9, 0)):
        assert_step((model, twin), (call, twin), batches(i, m, 4))
        stepped(model, twin)
    assert_state(model, twin)
    assert 1 <= graphs() <= 4  # one of them for the step in which delayed scaling measures


SIZES = [(7, 33, 19), (13, 5, 1), (3, 131, 17), (5, 1, 3), (9, 129, 33), (13, 1, 5), (3, 35, 17)]
ODD = list(zip(SHIPPED, SIZES, strict=True))


@pytest.mark.parametrize(("recipe", "size"), ODD, ids=str)
def test_sizes_that_are_multiples_of_nothing(recipe, size):
    m, k, n = size
    layer, twin = pair(recipe, k, n)
    call = compiled(layer, dynamic=True)
    for i in range(2):
        assert_step((layer, twin), (call, twin), batch(i, m + 2 * i, k, n))
    assert graphs() == 1


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_a_wrong_number_of_features_is_said_with_both_numbers(dynamic):
    layer, twin = pair("fp8-block")
    call = compiled(layer, dynamic=dynamic)
    for i in range(2):  # the second time the callable has a graph, with sizes that are symbols
        assert refused(call, spiky(3 + i, 47), words=("47", "48"))
        assert_step((layer, twin), (call, twin), batch(i))  # and is as good as before


@pytest.mark.parametrize("recipe", ["nvfp4"])
def test_inputs_and_gradients_that_are_not_contiguous(recipe):
    layer, twin = pair(recipe, bias=False)
    call = compiled(layer)
    x, dy = batch(0)
    for form in (x.T.contiguous().T, torch.stack((x, x), -1)[..., 0], x.view(2, M // 2, K).transpose(0, 1)):
        given = dy if form.dim() == 2 else dy.view(2, M // 2, N).transpose(0, 1)
        logs = []
        for m, run in ((layer, call), (twin, twin)):
            m.zero_grad(set_to_none=True)
            leaf = form.detach().requires_grad_()
            assert not leaf.is_contiguous()
            y = run(leaf)
            (y * given).sum().backward()
            logs.append([y.detach(), leaf.grad, m.weight.grad])
        assert_logs(*logs)
    assert_state(layer, twin)


def test_a_gradient_that_is_one_number_expanded():
    layer, twin = pair("fp8-current")
    for m, call in ((layer, compiled(layer)), (twin, twin)):
        call(batch(0)[0]).sum().backward()
        assert m.weight.grad.any()
    assert_same(layer.weight.grad, twin.weight.grad)


# -- 18-20: guards ---------------------------------------------------------------------------------------------------

DIFFERENT = [
    ("bf16", 48, 40), ("fp8-delayed", 40, 48), ("fp8-current", 32, 16), ("fp8-rowwise", 17, 64), ("fp8-block", 64, 17),
    ("mxfp8", 96, 33), ("nvfp4", 33, 32), ("fp8-current(pow2=True)", 5, 7), ("fp8-block(scale='fp32')", 7, 5),
    ("mxfp8(square_weights=True)", 48, 48), ("nvfp4(rht=False)", 31, 16), ("fp8-delayed(margin=1)", 16, 31),
]  # fmt: skip


def test_twelve_different_layers_compiled_one_by_one():
    """All layers of a class are one function to torch, and that takes eight sets of guards: docs/compile.md."""
    assert len({*DIFFERENT}) == 12 > torch._dynamo.config.recompile_limit
    isolates = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # from torch 2.13 on
    options, kept = {"isolate_recompiles": True} if isolates else {}, []
    with torch._dynamo.config.patch({} if isolates else {"recompile_limit": 12}):
        for i, (recipe, k, n) in enumerate(DIFFERENT):
            layer, twin = pair(recipe, k, n)
            kept.append((layer, twin, compiled(layer, **options)))
            assert_step((layer, twin), (kept[-1][2], twin), batch(i, 9, k, n))
        assert graphs() == 12
        for i, (layer, twin, call) in enumerate(kept):  # and each still has its own graph
            assert_step((layer, twin), (call, twin), batch(20 + i, 9, layer.in_features, layer.out_features))
        assert graphs() == 12


def test_twelve_different_layers_in_one_compiled_model_are_one_graph():
    sizes = [48, 40, 32, 17, 64, 33, 5, 7, 16, 31, 48, 24, 40]
    model = nn.Sequential(*[make(r, k, n) for (r, _, _), k, n in zip(DIFFERENT, sizes[:-1], sizes[1:], strict=True)])
    twin = copy.deepcopy(model)
    assert_step((model, twin), (compiled(model), twin), batch(0, 9))
    assert graphs() == 1


def test_training_evaluating_and_training_with_every_recipe():
    model, twin = bank()
    call = compiled(model)
    for i, training in enumerate((True, False, True, False, True)):
        model.train(training)
        twin.train(training)
        if training:
            assert_step((model, twin), (call, twin), batches(i))
            stepped(model, twin)
        else:
            with torch.no_grad():
                assert_same(call(batches(i)[0]), twin(batches(i)[0]))
    assert_state(model, twin)
    assert 1 <= graphs() <= 3  # the same


@pytest.mark.parametrize(
    ("recipe", "other"),
    [
        ("fp8-current", "fp8-current(grad_format=E4M3)"),
        ("fp8-block", "fp8-block(scale='fp32')"),
        ("mxfp8", "fp8-current"),
        ("fp8-delayed", "fp8-block"),
    ],
)
def test_a_recipe_changed_while_training_recompiles_once_and_takes_effect(recipe, other):
    layer, twin = pair(recipe)
    call = compiled(layer)
    for i, (name, want) in enumerate([(recipe, 1), (other, 2), (other, 2), (recipe, 2), (other, 2)]):
        layer.recipe = twin.recipe = octavo.recipe(name)  # an equal value each time, a new object
        assert_step((layer, twin), (call, twin), batch(i))
        stepped(layer, twin)
        assert graphs() == want, f"step {i}, {name}"
    layers = make(recipe), make(other)
    first, second = (results(m, m, *batch(9)) for m in layers)
    assert any(not torch.equal(first[name], second[name]) for name in first), "the two recipes give the same here"


# -- 21-22: autocast -------------------------------------------------------------------------------------------------


def nested(model):
    def call(x):
        with octavo.autocast("fp8-delayed"):
            x = model[0](x)
            with octavo.autocast("nvfp4"):
                x = model[1](x)
                with octavo.autocast("fp8-block"):
                    x = model[2](x)
                x = model[3](x)
            return model[4](x)

    return call


@pytest.mark.parametrize("cold", [False, True], ids=["after an eager forward", "cold"])
def test_three_nested_recipes_of_which_two_have_state(cold):
    model = nn.ModuleList([make(None, K, K, seed=i) for i in range(5)])
    if not cold:
        nested(model)(batch(9, n=K)[0])
    twin = copy.deepcopy(model)
    call, plain = compiled(nested(model)), nested(twin)
    for i in range(3):
        x, dy = batch(i, n=K)
        if cold and i == 0:  # seeds are drawn where state is made: give the twin the same ones
            call(x)
            octavo.load_state_dict(twin, octavo.state_dict(model))
        assert_step((model, twin), (call, plain), (x, dy))
        stepped(model, twin)
    assert_state(model, twin)
    assert {key.split(".")[0] for key in octavo.state_dict(model)} >= {"0", "1", "3", "4"}


@pytest.mark.parametrize(
    ("recipe", "where"),
    [
        ("fp8-delayed", "inside"),
        ("fp8-delayed(cold_start='current')", "around"),
        ("nvfp4", "inside"),
        ("nvfp4", "around"),
    ],
)
def test_ambient_state_that_no_eager_forward_made_is_made_on_the_way(recipe, where):
    layer, twin = pair(None)
    recipe = octavo.recipe(recipe)

    def ambient(call):
        def under(x):
            with octavo.autocast(recipe):
                return call(x)

        return under

    call = compiled(ambient(layer)) if where == "inside" else ambient(compiled(layer))
    for i in range(3):
        x, dy = batch(i)
        if i == 0:
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            if str(recipe) == "nvfp4":
                octavo.load_state_dict(twin, octavo.state_dict(layer))
            y.backward(dy)
            found = {"y": y.detach(), "dx": leaf.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
            assert_results(found, results(twin, ambient(twin), x, dy))
        else:
            assert_step((layer, twin), (call, ambient(twin)), (x, dy))
        stepped(layer, twin)
    assert octavo.state_dict(layer)
    assert_state(layer, twin)


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-block(scale='fp32',wgrad='bf16')"])
def test_a_recipe_written_out_inside_the_graph(recipe):
    layer, twin = pair(None)

    def ambient(m):
        def call(x):
            with octavo.autocast(recipe):
                return m(x)

        return call

    run = compiled(ambient(layer))
    with torch.no_grad():
        assert_same(run(batch(0)[0]), ambient(twin)(batch(0)[0]))
        assert graphs() == 1


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block"])
def test_an_ambient_recipe_leaves_a_plain_linear_alone(recipe):
    model, twin = (nn.Sequential(nn.Linear(K, N), nn.Tanh(), nn.Linear(N, K)) for _ in range(2))
    twin.load_state_dict(model.state_dict())

    def ambient(x):
        with octavo.autocast(recipe):
            return model(x)

    assert_step((model, twin), (compiled(ambient), twin), batch(0, n=K))


def test_recipes_around_the_calls_each_keep_their_own_backward():
    """Three calls under three recipes, then the backwards in reverse order under none of them."""
    model, twin = (nn.ModuleList([make(None, seed=i) for i in range(3)]) for _ in range(2))
    calls = [compiled(layer) for layer in model]
    gradients = []
    for layers, run in ((model, calls), (twin, list(twin))):
        outputs, leaves = [], []
        for i, recipe in enumerate(("fp8-current", "mxfp8", "fp8-block(backward='dequantized')")):
            leaves.append(batch(i)[0].requires_grad_())
            with octavo.autocast(recipe):
                outputs.append(run[i](leaves[i]))
        for i in (2, 1, 0):
            outputs[i].backward(batch(i)[1])
        gradients.append(
            [y.detach() for y in outputs] + [x.grad for x in leaves] + [p.grad for p in layers.parameters()]
        )
    for found, want in zip(*gradients, strict=True):
        assert_same(found, want)


# -- 11-14: the weight cache -----------------------------------------------------------------------------------------


def test_a_cache_filled_without_gradients_is_completed_by_a_compiled_training_step():
    model, twin = bank()
    call = compiled(model)
    x = batches(9)[0]
    with torch.no_grad():
        for m in (model, twin):
            m(x, is_first_microbatch=True)
    for i in range(2):
        assert_step((model, twin), (call, twin), batches(i), is_first_microbatch=False)
    with torch.no_grad():  # and inference reads what training left
        assert_same(call(x, is_first_microbatch=False), twin(x, is_first_microbatch=False))
    assert_state(model, twin)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_an_attached_optimizer_refreshes_the_cache_a_graph_reads(recipe):
    layer, twin = pair(recipe)
    call = compiled(layer)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (layer, twin)]
    for m, optimizer in zip((layer, twin), optimizers, strict=True):
        octavo.attach(m, optimizer)
    outputs = []
    for i in range(4):
        found = assert_step((layer, twin), (call, twin), batch(i), is_first_microbatch=i == 0)
        outputs.append(found["y"])
        before = layer.weight.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
        assert not torch.equal(before, layer.weight)
        assert_same(layer.weight.detach(), twin.weight.detach())
    assert_state(layer, twin)
    assert graphs() == 2
    with torch.no_grad():  # the codes are those of the newest weight
        assert_same(call(batch(9)[0], is_first_microbatch=False), twin(batch(9)[0]))


def test_deferred_backwards_of_cached_codes_and_main_grad_together():
    layer, twin = pair("fp8-block", fuse_wgrad_accumulation=True)
    call = compiled(layer)
    for m in (layer, twin):
        m.weight.main_grad = torch.zeros(N, K)
    for step in range(2):
        for run in (call, twin):
            outputs = [run(batch(3 * step + i)[0], is_first_microbatch=i == 0) for i in range(3)]
            for i, y in enumerate(outputs):
                y.backward(batch(3 * step + i)[1])
        assert_same(layer.weight.main_grad, twin.weight.main_grad)
        with torch.no_grad():
            for m in (layer, twin):
                m.weight.sub_(m.weight.main_grad * 0.01)
    assert layer.weight.grad is None and layer.weight.main_grad.any()


# -- 23, 27: fuse_wgrad_accumulation ----------------------------------------------------------------------------------


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
    """Of a weight that gets no gradient in backward: eager mode does not call them then, and a graph cannot help it."""
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


# -- 23, 27: delay_wgrad_compute --------------------------------------------------------------------------------------


def flight_of(model, call, data, **flags):
    """All forwards, all backwards, then one dw after the other; everything on the way."""
    model.zero_grad(set_to_none=True)
    log, leaves = [], [x.clone().requires_grad_() for x, _ in data]
    outputs = [
        call(leaf, **(flags if i == 0 or not flags else {k: False for k in flags})) for i, leaf in enumerate(leaves)
    ]
    for y, (_, dy) in zip(outputs, data, strict=True):
        y.backward(dy)
    layers = [m for m in model.modules() if isinstance(m, octavo.Linear)]
    assert all(m.weight.grad is None for m in layers)
    log += [y.detach().clone() for y in outputs] + [leaf.grad for leaf in leaves]
    log += [m.bias.grad.clone() for m in layers]
    for _ in data:
        for m in layers:
            m.backward_dw()
            log.append(m.weight.grad.clone())
    return log


def assert_logs(found, want):
    assert len(found) == len(want)
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert_same(a, b, f"entry {i}")


def assert_nothing_pending(model):
    for layer in model.modules():
        if isinstance(layer, octavo.Linear):
            with pytest.warns(UserWarning, match="no backward to finish"):
                layer.backward_dw()


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


def test_a_delayed_dw_whose_backward_never_came_is_nan():
    """Not a number that could pass for a gradient."""
    layer = make("fp8-current", delay_wgrad_compute=True)
    compiled(layer)(batch(0)[0])
    layer.backward_dw()
    assert layer.weight.grad.isnan().all()


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


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
def test_eager_and_compiled_microbatches_in_flight_together(recipe, order):
    layer, twin = pair(recipe)
    call = compiled(layer)
    for calls in ((call, layer, call), (twin, twin, twin)):
        outputs = [run(batch(i)[0]) for i, run in enumerate(calls)]
        for i in (*order, 2):
            outputs[i].backward(batch(i)[1])
    assert_same(layer.weight.grad, twin.weight.grad)
    stepped(layer, twin)
    assert_state(layer, twin)


def test_two_backwards_in_reverse_order_give_the_same_sum():
    layer, twin = pair("fp8-current", delay_wgrad_compute=True)
    for m, call in ((layer, compiled(layer)), (twin, twin)):
        outputs = [call(batch(i)[0]) for i in range(2)]
        for i in (1, 0):
            outputs[i].backward(batch(i)[1])
        m.backward_dw()
        m.backward_dw()
    assert_same(layer.weight.grad, twin.weight.grad)


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


# -- 23, 24, 27: what a graph cannot serve ----------------------------------------------------------------------------


def recomputed(layer):
    """The recomputed forward would leave a second dw pending."""
    return functools.partial(checkpoint, layer, use_reentrant=False)


def hooked_weight(layer):
    """A graph would call these with None in every backward."""
    layer.fired = []
    layer.weight.main_grad = torch.zeros(N, K)
    layer.weight.register_hook(lambda g: layer.fired.append(g.clone()))
    layer.weight.register_post_accumulate_grad_hook(lambda p: layer.fired.append(p.grad.clone()))
    return layer


CANNOT = {
    "checkpoint": (recomputed, {"delay_wgrad_compute": True}, ("delay_wgrad_compute", "checkpoint")),
    "hooks of a delayed dw": (hooked_weight, {"delay_wgrad_compute": True}, ("delay_wgrad_compute", "hooks")),
    "hooks of main_grad": (hooked_weight, {"fuse_wgrad_accumulation": True}, ("fuse_wgrad_accumulation", "hooks")),
    "no main_grad": (lambda layer: layer, {"fuse_wgrad_accumulation": True}, ("fuse_wgrad_accumulation", "main_grad")),
}


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("what", CANNOT)
def test_strict_is_the_default_and_raises_with_a_reason(what, fullgraph):
    prepare, options, words = CANNOT[what]
    block = prepare(make("fp8-current", **options))
    call = torch.compile(lambda x: block(x), fullgraph=fullgraph, backend="aot_eager")
    sentence = refused(call, batch(0)[0], words=(*words, "Linear(48, 40)"))
    assert "strict=False" in sentence, "the way out"


def converted(options):
    model = nn.Sequential(nn.Linear(K, N))
    octavo.convert(model, "fp8-current", strict=False)
    for name in options:
        setattr(model[0], name, True)
    return model[0]


RELAXED = {"Linear": lambda options: make("fp8-current", strict=False, **options), "convert": converted}


@pytest.mark.parametrize(("what", "form"), [
    ("checkpoint", "Linear"), ("checkpoint", "convert"), ("hooks of a delayed dw", "Linear"),
    ("hooks of main_grad", "convert")])  # fmt: skip
def test_strict_false_runs_eagerly_with_one_warning_that_has_the_reason(what, form):
    prepare, options, words = CANNOT[what]
    layer = RELAXED[form](options)
    twin = copy.deepcopy(layer)
    block, eager = prepare(layer), prepare(twin)
    call = torch.compile(lambda x: block(x), backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(3):
            assert_step((layer, twin), (call, eager), batch(i))
            for m in (layer, twin):
                m.backward_dw()
            assert_same(layer.weight.grad, twin.weight.grad)
    if prepare is hooked_weight:
        assert_same(layer.weight.main_grad, twin.weight.main_grad)
        assert len(layer.fired) == (6 if "delay_wgrad_compute" in options else 0)
        assert_logs(layer.fired, twin.fired)
    relevant = [w for w in caught if issubclass(w.category, UserWarning) and words[0] in str(w.message)]
    assert len(relevant) == 1, [str(w.message) for w in caught]
    torch._dynamo.reset()
    reason = refused(compiled(lambda x: block(x)), batch(0)[0], words=words)
    assert str(relevant[0].message).partition("Linear(")[2] == reason.partition("Linear(")[2] != ""


@pytest.mark.parametrize("form", RELAXED)
def test_strict_false_changes_nothing_where_a_graph_serves(form):
    layer = RELAXED[form]({"delay_wgrad_compute": True})
    twin = copy.deepcopy(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_step((layer, twin), (compiled(layer), twin), batch(0))
    assert graphs() == 1


# -- 7-9: codes in and out -------------------------------------------------------------------------------------------


def quantizing(layer):
    return lambda x: layer(x, fp8_output=True)


def left(recipe):
    return octavo.recipe(recipe).linear().fprop.left


class Coded(nn.Module):
    """A layer of every recipe that has codes, each with an input of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([make(recipe, seed=i) for i, recipe in enumerate(QUANTIZED)])

    def forward(self, inputs, **flags):
        return [layer(x, **flags) for layer, x in zip(self.layers, inputs, strict=True)]


def coded():
    model = Coded()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("lead", [(M,), (2, 5)], ids=str)
def test_codes_leave_a_graph_without_gradients(lead):
    model, twin = coded()
    call = compiled(model)
    for i in range(2):
        inputs = [spiky(*lead, K, seed=10 * i + j) for j in range(len(QUANTIZED))]
        with torch.no_grad():
            outputs = zip(QUANTIZED, call(inputs, fp8_output=True), twin(inputs, fp8_output=True), strict=True)
        for recipe, found, want in outputs:
            assert type(found) is type(want) is octavo.QTensor
            assert found.spec == want.spec == left(recipe)
            assert (tuple(found.shape), found.dtype) == (tuple(want.shape), want.dtype) == ((*lead, N), torch.float32)
            assert_same_codes(found, want)
            assert_same(found.dequantize(), want.dequantize())
            assert found.token is None or not found.token.requires_grad
    assert graphs() == 1


def test_compiled_layers_take_codes_with_and_without_gradients():
    model, twin = coded()
    call = compiled(model)
    for i in range(2):
        inputs = [left(recipe).quantize(spiky(M, K, seed=10 * i + j)) for j, recipe in enumerate(QUANTIZED)]
        outputs = []
        for m, run in ((model, call), (twin, twin)):
            m.zero_grad()
            outputs.append(run(inputs))
            torch.autograd.backward(outputs[-1], [batch(10 * i + j)[1] for j in range(len(QUANTIZED))])
        for found, want in zip(*outputs, strict=True):
            assert_same(found.detach(), want.detach())
        for (name, found), want in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert_same(found.grad, want.grad, name)
        with torch.no_grad():
            for found, want in zip(call(inputs), twin(inputs), strict=True):
                assert_same(found, want)
    assert_state(model, twin)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_codes_pass_from_one_compiled_graph_to_another_with_gradients(recipe):
    model = nn.ModuleList([make(recipe), make(recipe, N, 24, seed=3)])
    twin = copy.deepcopy(model)
    first, second = compiled(quantizing(model[0])), compiled(model[1])
    for i in range(2):
        assert_step((model, twin), (lambda x: second(first(x)), lambda x: twin[1](twin[0](x, fp8_output=True))),
                    batch(i, n=24))  # fmt: skip
        stepped(model, twin)
    assert graphs() == graphs_of(recipe, 2)
    assert_state(model, twin)


# -- 36: checkpoints -------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_every_recipe_gives_the_same_bits():
    model, twin = bank()
    call = compiled(lambda x: checkpoint(model, x, use_reentrant=False))
    for i in range(2):
        assert_step((model, twin), (call, twin), batches(i))
        stepped(model, twin)
    assert_state(model, twin)


def saving(ops):
    """A policy that keeps what these operators give and recomputes the rest."""

    def policy(_, op, *__, **___):
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def test_sac_save_ops_are_operators_a_policy_can_name():
    ops = octavo.sac_save_ops()
    assert isinstance(ops, list | tuple) and ops
    assert all(isinstance(op, torch._ops.OpOverload) for op in ops)
    assert torch.ops.octavo.run.default in ops


@pytest.fixture
def products(monkeypatch):
    """How many GEMMs have run."""
    ran, gemm = [], gemm_reference.gemm

    def counting(*args, **options):
        ran.append(1)
        return gemm(*args, **options)

    monkeypatch.setattr(gemm_reference, "gemm", counting)
    return ran


SELECTED = [(recipe, "eager") for recipe in SHIPPED]
SELECTED += [(recipe, "compiled") for recipe in ("fp8-delayed", "nvfp4")]


@pytest.mark.parametrize(("recipe", "mode"), SELECTED)
@pytest.mark.parametrize("saved", [True, False], ids=["MUST_SAVE", "recomputed"])
def test_selective_checkpointing_saves_or_recomputes_our_node(recipe, mode, saved, products):
    layer, twin = pair(recipe)
    options = {"context_fn": saving(octavo.sac_save_ops() if saved else ())}

    def block(x):
        return checkpoint(layer, x, use_reentrant=False, **options)

    call = compiled(block) if mode == "compiled" else block
    for i in range(2):
        counter = seed_of(layer)
        data = batch(i)
        want = results(twin, twin, *data)
        products.clear()
        found = results(layer, call, *data)
        assert_results(found, want)
        if saved:
            assert len(products) == 3, "fprop, dgrad and wgrad, none of them twice"
        elif mode == "eager":
            assert len(products) == 4, "fprop once more"
        if counter is not None:
            assert_same(seed_of(layer), counter + torch.tensor([0, 1]))
        stepped(layer, twin)
    assert_state(layer, twin)


# -- saved tensors ---------------------------------------------------------------------------------------------------


class Moved:
    """Hooks that move every saved tensor away and back, as an offloader does. (On a CPU save_on_cpu moves nothing.)"""

    def __init__(self, owner):
        self.packed = self.unpacked = self.bytes = 0
        self.owned = {t.untyped_storage().data_ptr() for t in (*owner.parameters(), *owner.buffers())}

    def pack(self, tensor):
        self.packed += 1
        if tensor.untyped_storage().data_ptr() not in self.owned:
            self.bytes += tensor.numel() * tensor.element_size()
        return tensor.detach().clone()

    def unpack(self, tensor):
        self.unpacked += 1
        return tensor.clone()

    def around(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


STATELESS = [recipe for recipe in SHIPPED if recipe not in ("fp8-delayed", "nvfp4")]
HOOKED = [(recipe, mode, False) for recipe in STATELESS for mode in ("eager", "compiled")]
HOOKED += [(recipe, "eager", True) for recipe in SHIPPED]


@pytest.mark.parametrize(("recipe", "mode", "main_grad"), HOOKED)
def test_saved_tensors_pass_through_hooks(recipe, mode, main_grad):
    layer, twin = pair(recipe, fuse_wgrad_accumulation=main_grad)
    for m in (layer, twin):
        m.weight.main_grad = torch.zeros(N, K)
    call, hooks = compiled(layer) if mode == "compiled" else layer, Moved(layer)
    for i, around in enumerate((hooks.around, torch.autograd.graph.save_on_cpu) * 2):

        def hooked(x, around=around):
            with around():
                return call(x)

        assert_step((layer, twin), (hooked, twin), batch(i))
        assert_same(layer.weight.main_grad, twin.weight.main_grad)
        stepped(layer, twin)
    assert hooks.packed and hooks.packed == hooks.unpacked
    assert_state(layer, twin)


WRITES = [("fp8-delayed", {}), ("nvfp4", {}), ("fp8-current", {"fuse_wgrad_accumulation": True}),
          ("bf16", {"delay_wgrad_compute": True})]  # fmt: skip


@pytest.mark.parametrize(("recipe", "options"), WRITES, ids=str)
def test_hooks_around_a_graph_whose_backward_writes_are_exact_or_refused(recipe, options):
    """A hook would hand backward a copy to write to: main_grad, the amax of dy or the counter must not get lost."""
    layer, twin = pair(recipe, **options)
    for m in (layer, twin):
        m.weight.main_grad = torch.zeros(N, K)
    call = compiled(layer)

    def hooked(x):
        with Moved(layer).around():
            return call(x)

    for i in range(2):
        want = results(twin, twin, *batch(i))
        try:
            found = results(layer, hooked, *batch(i))
        except Exception as error:
            said(error, "hook")
            return
        assert_results(found, want)
        for m in (layer, twin):
            m.backward_dw()
        assert_same(layer.weight.grad, twin.weight.grad)
        assert_same(layer.weight.main_grad, twin.weight.main_grad)
        stepped(layer, twin)
        assert_state(layer, twin)


@pytest.mark.parametrize("recipe", STATELESS)
def test_a_graph_saves_no_more_bytes_than_eager(recipe):
    """What the module owns, its weight and its buffers, costs nothing to save."""
    layer, twin = pair(recipe)
    hooks = []
    for m, call in ((layer, compiled(layer)), (twin, twin)):
        hooks.append(Moved(m))
        with hooks[-1].around():
            call(batch(0)[0].requires_grad_())
    compiled_bytes, eager_bytes = (hook.bytes for hook in hooks)
    assert 0 < compiled_bytes <= eager_bytes


# -- nvfp4's counter, backward twice, what is released ----------------------------------------------------------------


def test_the_rounding_counter_advances_once_for_each_compiled_backward():
    layer, twin = pair("nvfp4")
    call, start = compiled(layer), seed_of(layer)
    weights = []
    for i in range(3):
        with torch.no_grad():
            call(batch(i)[0])  # inference draws nothing
        data = batch(0)  # the same every time, so that only the counter makes a difference
        weights.append(assert_step((layer, twin), (call, twin), data)["weight"])
        assert_same(seed_of(layer), start + torch.tensor([0, i + 1]))
        assert_same(seed_of(layer), seed_of(twin))
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    octavo.load_state_dict(layer, {key: value for key, value in octavo.state_dict(pair("nvfp4")[0]).items()})
    octavo.load_state_dict(twin, octavo.state_dict(layer))
    assert_step((layer, twin), (call, twin), batch(5))  # and a loaded counter is the one a graph reads


def test_a_loaded_counter_repeats_a_compiled_step():
    layer, _ = pair("nvfp4")
    call = compiled(layer)
    kept = {key: value.clone() for key, value in octavo.state_dict(layer).items()}
    first = results(layer, call, *batch(0))
    assert not torch.equal(results(layer, call, *batch(0))["weight"], first["weight"])
    octavo.load_state_dict(layer, kept)
    assert_results(results(layer, call, *batch(0)), first)


def test_a_second_backward_through_a_retained_graph():
    """Buffers a compiled backward may overwrite are torch's own setting, and it asks for this one to be off."""
    model, twin = bank()
    logs = []
    with torch._functorch.config.patch(donated_buffer=False):
        for m, call in ((model, compiled(model)), (twin, twin)):
            leaf = batches(0)[0].requires_grad_()
            y = call(leaf)
            logs.append([])
            for retain in (True, False):
                m.zero_grad(set_to_none=True)
                leaf.grad = None
                y.backward(batches(0)[1], retain_graph=retain)
                logs[-1].append([leaf.grad, *[p.grad for p in m.parameters()]])
    (first, second), want = logs
    assert_logs(first, want[0])
    assert_logs(second, want[1])
    dw = [model_grads[1::2] for model_grads in (first, second)]  # one of each recipe; nvfp4 draws anew
    assert [torch.equal(a, b) for a, b in zip(*dw, strict=True)] == [recipe != "nvfp4" for recipe in SHIPPED]
    assert_state(model, twin)


def live_tensors():
    gc.collect()
    return sum(type(o) in (torch.Tensor, nn.Parameter) for o in gc.get_objects())


def test_what_backward_needed_is_released_by_it():
    """The output lives on; what was saved for it does not, and steps leave nothing behind."""
    model, _ = bank()
    call, alive = compiled(model), []
    for i in range(5):
        x, dy = batches(i)
        kept = weakref.ref(x)
        y = call(x)
        y.backward(dy)
        del x, dy
        if i in (1, 4):
            model.zero_grad(set_to_none=True)
            alive.append(live_tensors())
            assert kept() is None, "the input is still held after backward"
    assert y is not None
    assert alive[1] <= alive[0]


# -- 51: the operators -----------------------------------------------------------------------------------------------


ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
WAYS = {
    "plain": ({}, {}),
    "cached": ({}, {"is_first_microbatch": True}),
    "main_grad": ({"fuse_wgrad_accumulation": True}, {}),
    "delayed dw": ({"delay_wgrad_compute": True}, {}),
}


CHECKED = [*[(recipe, "plain") for recipe in SHIPPED], *[(recipe, "cached") for recipe in QUANTIZED],
           ("fp8-delayed", "main_grad"), ("nvfp4", "delayed dw")]  # fmt: skip


@pytest.mark.parametrize(("recipe", "way"), CHECKED)
def test_opcheck_of_every_operator_of_a_step(recipe, way):
    options, flags = WAYS[way]
    layer = make(recipe, 17, 12, **options)
    layer.weight.main_grad = torch.zeros(12, 17)
    x, dy = batch(0, 9, 17, 12)
    calls = recorded(layer, x.requires_grad_(), dy, **flags)
    names = [str(op) for op, _ in calls]
    assert names == ["octavo.refresh.default"] * (way == "cached") + ["octavo.run.default", "octavo.run_bwd.default"]
    for op, args in calls[:1] if way == "cached" and recipe != "nvfp4" else calls:
        tests = [test for test in ALL if test != "test_schema" or op not in graph.UNDECLARED_WRITES]
        if op is torch.ops.octavo.run.default:
            assert [t.requires_grad for t in args[0][::-1]][:2] == [True, True], "x and the weight"
        else:
            args = without_gradients(args)
        assert set(torch.library.opcheck(op, args, test_utils=tests).values()) == {"SUCCESS"}


@every
def test_a_mode_sees_our_operators_in_eager_and_changes_nothing(recipe):
    layer, twin = pair(recipe)
    for i in range(2):
        calls = []
        want = results(twin, twin, *batch(i), is_first_microbatch=True)
        with Recorder(calls):
            found = results(layer, layer, *batch(i), is_first_microbatch=True)
        assert_results(found, want)
        names = [str(op).split(".")[1] for op, _ in calls]
        assert names == ["run", "run_bwd"]
        stepped(layer, twin)
    assert_state(layer, twin)


def test_only_backward_writes_what_its_schema_does_not_say():
    assert set(graph.UNDECLARED_WRITES) == {torch.ops.octavo.run_bwd.default}


def facts(tensor):
    """What a compiler relies on. The stride of a dim of size one, or of nothing at all, addresses nothing."""
    strides = tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1) if tensor.numel() else ()
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device


def assert_fakes_agree(op, args):
    args = without_gradients(args)
    with FakeTensorMode() as mode:
        fake = op(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, args))
    real = op(*args)
    fakes, reals = ([] if out is None else list(out) for out in (fake, real))
    assert all(isinstance(t, FakeTensor) for t in fakes)
    assert [facts(t) for t in fakes] == [facts(t) for t in reals], f"{op} {args[-1]}"


@settings(max_examples=50)
@given(
    recipe=st.sampled_from([*SHIPPED, *OTHERS]),
    lead=st.one_of(st.tuples(st.integers(0, 70)), st.tuples(st.integers(0, 5), st.integers(0, 14))),
    k=st.integers(1, 70),
    n=st.integers(1, 70),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    frozen=st.sampled_from(["", "weight", "input", "bias"]),
    turned=st.booleans(),
    option=st.sampled_from(["", "", "fuse_wgrad_accumulation", "delay_wgrad_compute", "return_bias"]),
    first=st.sampled_from([None, None, True]),
    output=st.booleans(),
)
def test_fakes_agree_with_what_the_operators_give(
    recipe, lead, k, n, bias, dtype, frozen, turned, option, first, output
):
    assume(not (output and (recipe == "bf16" or option == "return_bias" or "fprop='bf16'" in recipe)))
    layer = make(recipe, k, n, bias=bias, dtype=dtype, **({option: True} if option else {}))
    layer.weight.main_grad = torch.zeros(n, k)
    layer.weight.requires_grad_(frozen != "weight")
    if bias:
        layer.bias.requires_grad_(frozen != "bias")
    x = spiky(*lead, k, dtype=dtype) if 0 not in lead else torch.zeros(*lead, k, dtype=dtype)
    if turned:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    dy = torch.ones(*lead, n, dtype=dtype)
    calls = recorded(layer, x.requires_grad_(frozen != "input"), dy, is_first_microbatch=first, fp8_output=output)
    assert calls
    for op, args in calls:
        assert_fakes_agree(op, args)


# -- 31: the disk cache ----------------------------------------------------------------------------------------------


def inductor_step():
    """One step under Inductor: a digest of what it gave, and what the compiler's caches said."""
    layer = make("fp8-current")
    found = results(layer, compiled(layer, backend="inductor"), *batch(0))
    counted = {f"{group}.{key}": counters[group][key]
               for group in ("aot_autograd", "inductor") for key in counters[group] if "cache_" in key}  # fmt: skip
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in found.values())).hexdigest()
    return {"digest": digest, "counters": counted, "sources": graph.DIGEST}


ROOT = Path(octavo.__file__).parent.parent


def process(script, **environment):
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment})  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_second_process_finds_the_graphs_in_the_disk_cache(tmp_path, monkeypatch):
    """The first process is this one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first = inductor_step()
    script = f"import json; from {__name__} import inductor_step; print(json.dumps(inductor_step()))"
    second = json.loads(process(script).splitlines()[-1])
    print(first, second)
    assert first["sources"] == second["sources"], "somebody edits octavo/ while this test runs"

    def count(run, what):
        return sum(value for key, value in run["counters"].items() if what in key)

    assert count(first, "cache_miss") and not count(first, "cache_hit")
    assert count(second, "cache_hit") and not count(second, "cache_miss")
    assert not count(second, "cache_bypass")
    assert first["digest"] == second["digest"]


# -- 26: versions ----------------------------------------------------------------------------------------------------


def test_an_old_torch_is_said_in_one_sentence_at_import():
    """Before anything else of torch is touched: here it has nothing but a version."""
    script = """
        import json, sys, types
        said = {}
        for version in ("2.10.0", "2.9.1+cpu", "2.10.1a0+git1234", "1.13.1", "2.11.0", "2.100.0a0+git1234", "3.0.0"):
            sys.modules["torch"] = types.ModuleType("torch")
            sys.modules["torch"].__version__ = version
            try:
                import octavo
            except Exception as error:
                said[version] = str(error)
            for name in [name for name in sys.modules if name.partition(".")[0] == "octavo"]:
                del sys.modules[name]
        print(json.dumps(said))
    """
    messages = json.loads(process(script).splitlines()[-1])
    assert len(messages) == 7
    for version, message in messages.items():
        number = version.split("+")[0]
        old = number.startswith(("2.10.", "2.9.", "1."))
        assert (number in message and "2.11" in message and "\n" not in message) == old, f"{version}: {message}"


# -- 43-47: values ---------------------------------------------------------------------------------------------------


def quantized_all(spec, x, seed):
    given = {"seed": seed} if spec.draws else {}
    return [spec.quantize(x, axis, **given) for axis in (-1, 0)]


@pytest.mark.parametrize("recipe", [*SHIPPED, *OTHERS])
def test_a_recipe_read_back_from_its_string_is_equal_and_quantizes_the_same(recipe):
    """Derived state, such as the signs of nvfp4's turn, comes back with it."""
    recipe = octavo.recipe(recipe)
    again = octavo.recipe(str(recipe))
    assert again == recipe and hash(again) == hash(recipe) and str(again) == str(recipe)
    x, seed = spiky(21, 48), torch.tensor([7, 3])
    one, two = recipe.linear(), again.linear()
    assert one == two
    for gemm in ("fprop", "dgrad", "wgrad"):
        for side in ("left", "right"):
            a, b = (getattr(getattr(q, gemm), side) for q in (one, two))
            if a is not None:
                c = values.parse(a.key)
                assert a == b == c and hash(a) == hash(b) == hash(c)
                for found, want in zip(quantized_all(c, x, seed), quantized_all(a, x, seed), strict=True):
                    assert_same_codes(found, want)
                    assert_same(found.dequantize(), want.dequantize())


def test_a_live_process_group_in_a_value_is_refused():
    class Group:
        pass

    for make_value in (octavo.recipes.Block, Q.MX, Q.NVFP4):
        with pytest.raises((TypeError, UnsupportedConfig)):
            make_value(group=Group())
    with pytest.raises(UnsupportedConfig, match="scale"):
        octavo.recipes.Block(scale=Group())


SPECS = [Q.Tensorwise(), Q.Rowwise(), Q.Block1D(), Q.Block2D(), Q.MX(), Q.MX(square=True), Q.NVFP4()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(12, 70), (0, 16), (1, 1), (33, 128)], ids=str)
def test_a_qtensor_flattened_and_put_together_keeps_its_bytes(spec, shape):
    q = spec.quantize(spiky(*shape) if 0 not in shape else torch.zeros(*shape))
    leaves, tree = pytree.tree_flatten(q)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == len([*q.tensors()])
    again = pytree.tree_unflatten(leaves, tree)
    assert type(again) is octavo.QTensor
    assert (again.spec, tuple(again.shape), again.dtype) == (q.spec, tuple(q.shape), q.dtype)
    assert_same_codes(again, q)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("usage", ["row", "column", "both"])
def test_quantizing_fakes_gives_fakes_of_the_real_shapes(spec, usage):
    """Allocation is what is written: shape, strides and dtype of codes and scales, in either orientation."""

    def quantize(x):
        if usage == "both":
            return [*spec.quantize_both(x)]
        return [spec.quantize(x, -1 if usage == "row" else 0)]

    for shape in ((33, 129),):
        real = quantize(spiky(*shape))
        with FakeTensorMode() as mode:
            fake = quantize(mode.from_tensor(spiky(*shape)))
        for a, b in zip(fake, real, strict=True):
            assert all(isinstance(t, FakeTensor) for t in a.tensors())
            assert [facts(t) for t in a.tensors()] == [facts(t) for t in b.tensors()]
            assert tuple(a.shape) == tuple(b.shape)


@every
def test_a_layer_of_fakes_gives_fakes_and_leaves_none_behind(recipe):
    """Forward and backward on shapes alone, as a memory estimator runs them."""
    real = make(recipe, 17, 12)
    want = results(real, real, *batch(0, 9, 17, 12))
    with FakeTensorMode():
        layer = octavo.Linear(17, 12, recipe=recipe)
        found = results(layer, layer, torch.randn(9, 17), torch.randn(9, 12))
        if recipe != "bf16":
            q = layer(torch.randn(9, 17), fp8_output=True)
            assert all(isinstance(t, FakeTensor) for t in q.tensors())
    for name, value in want.items():
        assert isinstance(found[name], FakeTensor), name
        assert facts(found[name]) == facts(value), name
    again = make(recipe, 17, 12)
    assert_same(again(batch(0, 9, 17, 12)[0]).detach(), want["y"])
