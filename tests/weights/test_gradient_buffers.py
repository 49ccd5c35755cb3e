"""fuse_wgrad_accumulation of a Linear and a GroupedLinear: dw goes into main_grad, of one weight or of each group's."""

import gc
import math

import pytest
import torch

from octavo.errors import Unsupported, UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.recipes import SHIPPED
from tests.support.experts import (
    LAYERS,
    LAYOUTS,
    NAN,
    USED,
    G,
    K,
    N,
    backward,
    batch,
    experts,
    forward,
    fused,
    give,
    grid,
    layers,
    layouts,
    named,
    same_seed,
    shape,
    sizes,
    step,
)
from tests.support.linear_oracle import assert_same, spiky

# -- values ------------------------------------------------------------------------------------------------------------


@grid(SHIPPED, layout=LAYERS, dtype=[torch.float32, torch.bfloat16])
def test_microbatches_are_added_to_one_flat_buffer(recipe, layout, dtype):
    layer, twin = fused(recipe, layout), experts(recipe, **layout)
    flat = spiky(math.prod(shape(layer)) + 64, seed=5, dtype=dtype)
    buffer = give(layer, flat[32:-32].view(shape(layer)))
    start, want, edges = buffer.clone(), buffer.clone(), (flat[:32].clone(), flat[-32:].clone())
    for i in range(3):
        x, dy = batch(seed=i)
        want += step(twin, x, dy)["dw"].to(dtype)
        found = step(layer, x, dy)
        assert found["dw"] is None and found["dx"] is not None and found["db"] is not None
        assert_same(buffer, want, f"microbatch {i}")
    assert torch.equal(flat[:32], edges[0]) and torch.equal(flat[-32:], edges[1])
    assert buffer.dim() == 2 or buffer[1].equal(start[1])  # a group without rows


@grid(SHIPPED, layout=LAYERS, dtype=[torch.float32, torch.bfloat16])
def test_overwriting_replaces_whatever_was_there(recipe, layout, dtype):
    layer, twin = fused(recipe, layout), experts(recipe, **layout)
    buffer = give(layer, torch.full(shape(layer), NAN, dtype=dtype))
    for p in named(layer, "weight").values():
        p.overwrite_main_grad = True
    step(layer, *batch())
    assert_same(buffer, step(twin, *batch())["dw"].to(dtype))
    assert buffer.dim() == 2 or not buffer[1].any()  # a group without rows gets zeros


@grid(SHIPPED, layout=LAYOUTS)
def test_a_step_without_rows_adds_nothing_to_main_grad(recipe, layout):
    layer = fused(recipe, layout)
    buffer = give(layer, torch.full((G, N, K), 0.25))
    step(layer, *batch((0, 0, 0)), (0, 0, 0))
    assert (buffer == 0.25).all()


@grid(SHIPPED, layout=LAYERS)
def test_a_float32_buffer_is_not_reached_through_the_weights_bfloat16(recipe, layout):
    layer = fused(recipe, layout, dtype=torch.bfloat16)
    twin = experts(recipe, dtype=torch.bfloat16, **layout)
    buffer = give(layer, torch.zeros(shape(layer)))
    x, dy = batch(dtype=torch.bfloat16)
    step(layer, x, dy)
    want = step(twin, x, dy)["dw"]
    assert_same(buffer.bfloat16(), want)
    assert not torch.equal(buffer, want.float())


# -- where buffers lie -------------------------------------------------------------------------------------------------


PLACES = {
    "separate": lambda: [torch.ones(N, K) for _ in range(G)],
    "backwards in one buffer": lambda: list(torch.ones(G, N, K).flip(0).contiguous().unbind())[::-1],
    "with gaps": lambda: [part[3 : 3 + N] for part in torch.ones(G, N + 7, K)],
    "flat": lambda: list(torch.ones(G, N * K)),
    "of two dtypes": lambda: [torch.ones(N, K, dtype=d) for d in (torch.float32, torch.float32, torch.bfloat16)],
}


@grid(["bf16", "fp8-current", "fp8-block", "nvfp4"], form=PLACES)
def test_each_groups_buffer_may_lie_anywhere(recipe, form):
    layer, twin = fused(recipe, LAYOUTS["per group"]), experts(recipe)
    buffers = give(layer, form())
    step(layer, *batch())
    for found, want in zip(buffers, step(twin, *batch())["dw"], strict=True):
        assert_same(found.view(N, K), 1 + want.to(found.dtype))


WHOLES = {
    "flat": lambda: torch.ones(G * N * K),
    "a matrix": lambda: torch.ones(G * N, K),
    "one more dim": lambda: torch.ones(1, G, N, K),
    "inside a bucket": lambda: torch.ones(3 * G * N * K)[G * N * K : 2 * G * N * K],
}


@grid(["bf16", "fp8-current", "nvfp4"], form=WHOLES)
def test_any_contiguous_buffer_of_the_weights_size(recipe, form):
    layer, twin = fused(recipe), experts(recipe)
    buffer = give(layer, form())
    place = buffer.data_ptr()
    step(layer, *batch())
    assert layer.weight.main_grad is buffer and buffer.data_ptr() == place
    assert_same(buffer.view(G, N, K), 1 + step(twin, *batch())["dw"])


@layers
def test_get_main_grad_is_asked_once_for_each_backward_and_not_before(layout):
    layer, twin, calls = fused("fp8-current", layout), experts("fp8-current", **layout), []
    buffer, weights = torch.zeros(shape(layer)), named(layer, "weight")
    for i, (name, p) in enumerate(weights.items()):
        part = buffer if name == "weight" else buffer[i]
        p.main_grad = torch.full_like(part, 5.0)
        p.get_main_grad = lambda name=name, part=part: calls.append(name) or part
    x, dy = batch()
    y = forward(layer, x)
    assert not calls
    backward(y, dy)
    assert sorted(calls) == sorted(weights)
    assert_same(buffer, step(twin, x, dy)["dw"])
    assert all((p.main_grad == 5).all() for p in weights.values())


@grid(SHIPPED, layout=LAYERS)
def test_a_buffer_made_after_forward_is_found(recipe, layout):
    layer, twin, (x, dy) = fused(recipe, layout), experts(recipe, **layout), batch()
    y = forward(layer, x)
    buffer = give(layer, torch.zeros(shape(layer)))
    backward(y, dy)
    assert_same(buffer, step(twin, x, dy)["dw"])


# -- overwriting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_groups_that_disagree_about_overwriting_are_each_right_or_all_refused(recipe):
    layer, twin = fused(recipe, LAYOUTS["per group"]), experts(recipe)
    buffer = give(layer, torch.ones(G, N, K))
    layer.weight0.overwrite_main_grad = True
    layer.weight2.overwrite_main_grad = False
    want = step(twin, *batch())["dw"]
    try:
        step(layer, *batch())
    except UnsupportedConfig:
        assert (buffer == 1).all()
    else:
        assert_same(buffer, torch.stack((want[0], torch.ones(N, K), 1 + want[2])))


@layers
def test_overwriting_is_decided_at_forward(layout):
    layer, (x, dy) = fused("fp8-current", layout), batch()
    buffer, weights = give(layer, torch.full(shape(layer), NAN)), named(layer, "weight").values()
    for p in weights:
        p.overwrite_main_grad = True
    first = forward(layer, x)
    for p in weights:
        p.overwrite_main_grad = False
    second = forward(layer, x)
    backward(first, dy)
    once = buffer.clone()
    assert not once.isnan().any()
    backward(second, dy)
    assert_same(buffer, 2 * once)


@grid(SHIPPED, layout=LAYERS, first=[True, False, None])
def test_the_cache_flag_does_not_decide_about_overwriting(recipe, layout, first):
    layer, twin = fused(recipe, layout), experts(recipe, **layout)
    buffer = give(layer, torch.ones(shape(layer)))
    step(layer, *batch(), is_first_microbatch=first)
    assert_same(buffer, 1 + step(twin, *batch())["dw"])


# -- hooks and weights without a buffer --------------------------------------------------------------------------------


@layers
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_fire_where_the_flag_asks_for_a_dummy_gradient(layout, hook):
    layer, fired = fused("fp8-current", layout), []
    buffer = give(layer, torch.zeros(shape(layer)))
    for name, p in named(layer, "weight").items():
        getattr(p, hook)(lambda _, name=name: fired.append(name))
        p.grad_added_to_main_grad = False
    x, dy = batch()
    backward(forward(layer, x), dy)
    assert sorted(fired) == sorted(named(layer, "weight"))
    for p in named(layer, "weight").values():
        assert p.grad_added_to_main_grad is True
        assert_same(p.grad, torch.zeros_like(p))
    assert buffer.any()


@layouts
def test_without_the_flag_no_hook_fires_and_no_gradient_comes(layout):
    layer, fired = fused("fp8-current", layout), []
    give(layer, torch.zeros(G, N, K))
    for p in named(layer, "weight").values():
        p.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    layer(batch()[0], sizes()).backward(batch()[1])
    assert not fired
    for p in named(layer, "weight").values():
        assert p.grad is None and not hasattr(p, "grad_added_to_main_grad")


@layers
def test_weights_whose_gradients_go_elsewhere_may_be_all_that_wants_one(layout):
    layer, twin = fused("fp8-current", layout, bias=False), experts("fp8-current", bias=False, **layout)
    buffer, (x, dy) = give(layer, torch.zeros(shape(layer))), batch()
    backward(forward(layer, x), dy)
    assert_same(buffer, step(twin, x, dy)["dw"])


@layers
def test_frozen_weights_and_inference_need_no_buffer(layout):
    layer, twin, (x, dy) = fused("fp8-current", layout), experts("fp8-current", **layout), batch()
    with torch.no_grad():
        y = forward(layer, x)
    for p in named(layer, "weight").values():
        p.requires_grad_(False)
    want = step(twin, x, dy)
    assert_same(y[:USED], want["y"][:USED])
    assert_same(step(layer, x, dy)["dx"], want["dx"])
    buffer = give(layer, torch.zeros(shape(layer)))
    assert_same(step(layer, x, dy)["dx"], want["dx"])
    assert not buffer.any()


@layers
def test_a_layer_that_does_not_fuse_leaves_main_grad_alone(layout):
    layer = experts("fp8-current", **layout)
    buffer = give(layer, torch.ones(shape(layer)))
    assert_same(step(layer, *batch())["dw"], step(experts("fp8-current", **layout), *batch())["dw"])
    assert (buffer == 1).all()


# -- buffers that are refused ------------------------------------------------------------------------------------------


BAD_WHOLES = {
    "missing": (None, UnsupportedConfig, r"main_grad"),
    "too small": (lambda: torch.zeros(G, N, K - 1), UnsupportedShape, rf"\({G}, {N}, {K - 1}\)"),
    "too large": (lambda: torch.zeros(G + 1, N, K), UnsupportedShape, rf"\({G + 1}, {N}, {K}\)"),
    "turned": (lambda: torch.zeros(G, N, K).mT, UnsupportedShape, rf"(?s)(?=.*\({G}, {K}, {N}\)).*\({N * K}, 1, {K}\)"),
    "strided": (
        lambda: torch.zeros(G, K, N).mT,
        UnsupportedShape,
        rf"\({N * K}, 1, {N}\)",
    ),
    "gaps": (lambda: torch.zeros(G, N + 1, K)[:, :N], UnsupportedShape, rf"\({(N + 1) * K}, {K}, 1\)"),
    "expanded": (lambda: torch.zeros(1).expand(G, N, K), UnsupportedShape, r"\(0, 0, 0\)"),
    "float16": (lambda: torch.zeros(G, N, K, dtype=torch.float16), UnsupportedDtype, r"float16"),
    "float64": (lambda: torch.zeros(G, N, K, dtype=torch.float64), UnsupportedDtype, r"float64"),
}


@grid(["bf16", "fp8-current", "nvfp4"], bad=BAD_WHOLES)
def test_a_wrong_buffer_is_refused_in_backward_and_the_next_step_is_right(recipe, bad):
    """Strides that a [G, N, K] buffer should not have are refused too: never a copy that is thrown away."""
    form, error, message = bad
    layer, twin, (x, dy) = fused(recipe), experts(recipe), batch()
    if form is not None:
        give(layer, form())
    y = layer(x, sizes())  # forward has no opinion
    with pytest.raises(error, match=message) as refused:
        y.backward(dy)
    if error is UnsupportedShape:
        assert str(tuple(layer.weight.main_grad.stride())) in str(refused.value)
        assert not layer.weight.main_grad.any()
    assert layer.weight.grad is None
    same_seed(layer)
    buffer = give(layer, torch.zeros(G, N, K))
    step(layer, x, dy)
    assert_same(buffer, step(twin, x, dy)["dw"])


BAD_PARTS = {
    "missing": (None, UnsupportedConfig, r"main_grad"),
    "too small": (lambda: torch.zeros(N, K - 1), UnsupportedShape, rf"\({N}, {K - 1}\)"),
    "turned": (lambda: torch.zeros(N, K).T, UnsupportedShape, rf"(?s)(?=.*\({K}, {N}\)).*\(1, {K}\)"),
    "float16": (lambda: torch.zeros(N, K, dtype=torch.float16), UnsupportedDtype, r"float16"),
}


@grid(["bf16", "fp8-current", "nvfp4"], bad=BAD_PARTS)
def test_one_wrong_buffer_of_many_leaves_the_others_alone(recipe, bad):
    form, error, message = bad
    layer, twin, (x, dy) = fused(recipe, LAYOUTS["per group"]), experts(recipe), batch()
    buffer = give(layer, torch.zeros(G, N, K))
    layer.weight2.main_grad = None if form is None else form()
    y = layer(x, sizes())
    with pytest.raises(error, match=message):
        y.backward(dy)
    assert not buffer.any(), "half a step was added"
    same_seed(layer)
    give(layer, buffer)
    step(layer, x, dy)
    assert_same(buffer, step(twin, x, dy)["dw"])


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
@layouts
def test_a_weight_deleted_before_backward_is_an_error_or_does_not_matter(recipe, layout):
    layer, twin, (x, dy) = fused(recipe, layout), experts(recipe), batch()
    buffer = give(layer, torch.zeros(G, N, K))
    y = layer(x, sizes())
    for name in named(layer, "weight"):
        delattr(layer, name)
    gc.collect()
    try:
        y.backward(dy)
    except Unsupported:
        assert not buffer.any()
    else:
        assert_same(buffer, step(twin, x, dy)["dw"])


def test_an_empty_buffer_of_a_trained_weight_is_refused():
    layer = fused("bf16", LAYOUTS["per group"])
    give(layer, [torch.zeros(N, K), torch.zeros(0), torch.zeros(N, K)])
    with pytest.raises(UnsupportedShape, match="must hold"):
        step(layer, *batch())


@layouts
def test_a_buffer_on_another_device_is_refused(layout):
    layer = fused("fp8-current", layout)
    give(layer, torch.zeros(G, N, K, device="meta"))
    with pytest.raises(UnsupportedConfig, match="on meta, where its weight is on cpu"):
        step(layer, *batch())


def test_one_buffer_for_two_groups_is_refused():
    layer, one = fused("fp8-current", LAYOUTS["per group"]), torch.zeros(N, K)
    give(layer, [one, torch.zeros(N, K), one])
    with pytest.raises(UnsupportedConfig, match=r"weight.main_grad of two groups overlap"):
        step(layer, *batch())
    assert not one.any()


@pytest.mark.parametrize("buffer", [torch.zeros(K, N).t(), torch.zeros(N, 2 * K)[:, :K]], ids=["turned", "apart"])
def test_a_buffer_that_takes_a_copy_is_refused(buffer):
    layer = fused("bf16", LAYOUTS["per group"])
    give(layer, [torch.zeros(N, K), buffer, torch.zeros(N, K)])
    with pytest.raises(UnsupportedShape, match="contiguous"):
        step(layer, *batch())


def test_a_wide_buffer_beside_a_narrow_one_keeps_its_bits():
    layer, twin, splits = fused("bf16", LAYOUTS["per group"]), experts("bf16"), (20, 9, 18)
    give(layer, [torch.zeros(N, K, dtype=d) for d in (torch.bfloat16, torch.float32, torch.float32)])
    step(layer, *batch(splits), splits)
    want = step(twin, *batch(splits), splits)["dw"][1]
    assert want.any() and torch.equal(layer.weight1.main_grad, want)
