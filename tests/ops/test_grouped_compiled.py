"""GroupedLinear under torch.compile gives eager mode's bits: any number of rows, buffers, main_grad, caches.

Graphs run under aot_eager unless a test is about Inductor. What only a GPU can show is in test_grouped_graphs.py."""

import pytest
import torch
from torch._dynamo.utils import counters

import octavo
from octavo.recipes import SHIPPED
from tests.support.experts import (
    GIVEN,
    LAYOUTS,
    ROWS,
    SAMPLE,
    SPLITS,
    USED,
    G,
    K,
    N,
    assert_steps,
    batch,
    change,
    delayed,
    experts,
    fused,
    give,
    grid,
    named,
    sample,
    sizes,
    stacked,
    step,
)
from tests.support.linear_oracle import assert_same, graphs_of, spiky
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@grid(SHIPPED, scaled={"plain": False, "each its own, scaled": True})
def test_compiled_is_eager_in_one_graph_of_any_number_of_rows(recipe, scaled):
    settings = {**LAYOUTS["per group"], "scale_bias": True} if scaled else {}
    layer, twin = experts(recipe, **settings), experts(recipe, **settings)
    call = compiled(layer, dynamic=True)
    for i, splits in enumerate(((30, 0, 17), (0, 40, 40), (1, 2, 3))):
        x, dy = batch(splits, 4 + i, seed=i)
        given = {"scales": spiky(len(x), seed=i)} if scaled else {}
        assert_steps(step(layer, x, dy, splits, call=call, **given), step(twin, x, dy, splits, **given), f"step {i}")
        for model in (layer, twin):
            octavo.step(model)
            change(model)
    assert_state(layer, twin)
    assert counters["stats"]["unique_graphs"] == graphs_of(recipe)


def test_few_rows_and_many_are_one_graph():
    call = compiled(experts("bf16"), dynamic=True)
    for rows in (64, 2, 5, 1000):
        call(torch.randn(rows, K), sizes((1, 0, 1)))
    assert counters["stats"]["unique_graphs"] == 1


@sample
def test_compiled_frozen_experts(recipe):
    layer, twin = experts(recipe, **LAYOUTS["per group"]), experts(recipe)
    layer.weight1.requires_grad_(False)
    (x, dy), splits = batch((20, 9, 18)), (20, 9, 18)
    found, want = step(layer, x, dy, splits, call=compiled(layer)), step(twin, x, dy, splits)
    assert_same(found["dx"], want["dx"])
    for g in range(G):
        assert_same(getattr(layer, f"weight{g}").grad, None if g == 1 else want["dw"][g], f"weight{g}")


@sample
def test_a_graph_refuses_a_list_because_it_would_never_change(recipe):
    layer = experts(recipe)
    with pytest.raises(Exception, match=r"(?i)tensor"):
        compiled(layer)(batch()[0], list(SPLITS))


# -- gradients elsewhere, and later ------------------------------------------------------------------------------------


@grid(SAMPLE, layout=["single", "per group"])
def test_compiled_main_grad(recipe, layout):
    overwrite = layout == "single"
    layer, twin = fused(recipe, LAYOUTS[layout]), experts(recipe, **LAYOUTS[layout])
    buffer, call = give(layer, torch.ones(G, N, K)), compiled(layer)
    for p in named(layer, "weight").values():
        p.overwrite_main_grad = overwrite
    want = torch.ones(G, N, K)
    for i in range(2):
        dw = step(twin, *batch(seed=i))["dw"]
        want = dw if overwrite else want + dw
        step(layer, *batch(seed=i), call=call)
        assert_same(buffer, want)
        assert not any(p.grad is not None and p.grad.any() for p in named(layer, "weight").values())


@grid(SAMPLE, layout=["single", "per group"])
def test_compiled_deferred_weight_gradients(recipe, layout):
    main_grad = layout == "single"
    layer = delayed(recipe, LAYOUTS[layout], fuse_wgrad_accumulation=main_grad)
    twin = experts(recipe, **LAYOUTS[layout])
    buffer, call = give(layer, torch.zeros(G, N, K)), compiled(layer)
    wants = [step(twin, *batch(seed=i)) for i in range(2)]
    outputs = [call(batch(seed=i)[0].requires_grad_(), sizes()) for i in range(2)]
    for i, (y, want) in enumerate(zip(outputs, wants, strict=True)):
        assert_same(y.detach(), want["y"])
        y.backward(batch(seed=i)[1])
    assert not buffer.any()
    assert not any(p.grad is not None and p.grad.any() for p in named(layer, "weight").values())
    for _ in wants:
        layer.backward_dw()
    assert_same(buffer if main_grad else stacked(layer), wants[0]["dw"] + wants[1]["dw"])
    with pytest.warns(UserWarning, match="no backward to finish"):
        layer.backward_dw()


# -- the weight cache --------------------------------------------------------------------------------------------------


@sample
def test_compiled_weight_cache(recipe):
    layer, twin = (experts(recipe, **LAYOUTS["per group"]) for _ in range(2))
    call = compiled(layer)
    for minibatch in range(2):
        for i, first in enumerate((True, False)):
            x, dy = batch(seed=2 * minibatch + i)
            found = step(layer, x, dy, call=call, is_first_microbatch=first)
            assert_steps(found, step(twin, x, dy, is_first_microbatch=first))
        for model in (layer, twin):
            octavo.step(model)
            change(model)


@sample
def test_compiled_weight_cache_by_a_flag_on_the_device(recipe):
    layer, twin, flag = experts(recipe), experts(recipe), torch.ones(1, dtype=torch.int32)
    call = compiled(layer)
    for minibatch in range(2):
        for i, first in enumerate((True, False)):
            x, dy = batch(seed=2 * minibatch + i)
            flag.fill_(first)
            found = step(layer, x, dy, call=call, is_first_microbatch=flag)
            assert_steps(found, step(twin, x, dy, is_first_microbatch=first))
        for model in (layer, twin):
            octavo.step(model)
            change(model)
    assert counters["stats"]["unique_graphs"] == graphs_of(recipe)


# -- buffers of the caller ---------------------------------------------------------------------------------------------


@grid(SAMPLE, given=GIVEN[::-1])
def test_a_graph_writes_into_the_callers_buffers(recipe, given):
    layer, twin = experts(recipe), experts(recipe)
    buffers = {n: torch.full((ROWS, N if n == "out" else K), 7.0) for n in given}
    call = compiled(layer)
    for seed in range(2):
        want = step(twin, *batch(seed=seed))
        found = step(layer, *batch(seed=seed), call=call, **buffers)
        assert_same(found["y"][:USED], want["y"][:USED])
        assert_same(found["dx"][:USED], want["dx"][:USED])
        assert_same(found["dw"], want["dw"])
        assert_same(found["db"], want["db"])
        for name, buffer in buffers.items():
            assert_same(buffer[:USED], want["y" if name == "out" else "dx"][:USED], name)
            assert (buffer[USED:] == 7).all(), name


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_inductor_returns_the_buffer_itself_with_two_microbatches_in_flight(recipe):
    layer, twin = experts(recipe), experts(recipe)
    call = compiled(layer, backend="inductor")
    rooms = torch.full((2 * ROWS, N), 7.0), torch.full((2 * ROWS, K), 7.0)
    data = [batch(seed=i) for i in range(2)]
    wants = [step(twin, x, dy) for x, dy in data]
    leaves = [x.clone().requires_grad_() for x, _ in data]
    parts = [[room[i * ROWS :][:ROWS].data for room in rooms] for i in range(2)]
    outputs = [call(leaf, sizes(), out=out, dgrad_out=dx) for leaf, (out, dx) in zip(leaves, parts, strict=True)]
    for y, leaf, (out, dx), (_, dy), want in zip(outputs, leaves, parts, data, wants, strict=True):
        assert y.data_ptr() == out.data_ptr()
        y.backward(dy)
        for found, name in ((out, "y"), (dx, "dx"), (leaf.grad, "dx")):
            assert_same(found[:USED], want[name][:USED], name)
        assert (out[USED:] == 7).all() and (dx[USED:] == 7).all()
    assert_same(stacked(layer), wants[0]["dw"] + wants[1]["dw"])


@pytest.mark.parametrize("name", ["out", "dgrad_out"])
def test_a_graph_refuses_a_buffer_that_does_not_fit(name):
    layer, (x, _) = experts("fp8-current"), batch()
    with pytest.raises(Exception, match=rf"(?s){name}.*{ROWS + 1}"):
        compiled(layer)(x.requires_grad_(), sizes(), **{name: torch.empty(ROWS + 1, N if name == "out" else K)})


def after_a_product(layer, w):
    return lambda x, dx: layer(x @ w, sizes(), dgrad_out=dx)


def after_a_permutation(layer, w):
    permutation = octavo.moe.sort(torch.arange(ROWS)[:, None] % G, G)
    return lambda x, dx: layer(octavo.moe.permute(x @ w, permutation)[0], permutation.sizes, dgrad_out=dx)


def in_memory_of_the_graph(layer, w):
    return lambda x, dx: layer(x @ w, sizes(), dgrad_out=dx.clone())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("calls", [after_a_product, after_a_permutation, in_memory_of_the_graph])
def test_an_operation_before_the_layer_reads_the_gradient_of_this_step(calls, backend):
    """A partitioner that saves memory moves the product of dgrad_out and w into the forward graph, where dgrad_out
    holds the gradient of an earlier step. It does so if the product is smaller than w."""
    wide = 2 * ROWS
    layer, x, w = experts("fp8-current", k=wide), batch(k=wide, poison=0.0)[0], spiky(wide, wide, seed=5)
    call = calls(layer, w)
    in_graph = compiled(call, backend=backend)
    for seed in range(2):
        dy, grads = batch(seed=seed, poison=0.0)[1], []
        for run, before in ((call, 0.0), (in_graph, 7.0)):
            leaf, dx = x.clone().requires_grad_(), torch.zeros(ROWS, wide)
            dx[:USED] = before
            run(leaf, dx).backward(dy)
            grads.append(leaf.grad)
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-6, atol=1e-6)
