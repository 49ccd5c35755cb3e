"""delay_wgrad_compute of a Linear and a GroupedLinear: backward_dw() gives dw later, oldest microbatch first."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from octavo.recipes import SHIPPED
from tests.support.experts import (
    LAYERS,
    SAMPLE,
    backward,
    batch,
    change,
    delayed,
    experts,
    forward,
    give,
    grid,
    layers,
    named,
    quantized,
    sample,
    shape,
    sizes,
    stacked,
    step,
)
from tests.support.linear_oracle import assert_same, differs


@grid(SHIPPED, layout=LAYERS, dtype=[torch.float32, torch.bfloat16])
def test_backward_gives_everything_but_dw_and_backward_dw_gives_that(recipe, layout, dtype):
    layer, twin = delayed(recipe, layout, dtype=dtype), experts(recipe, dtype=dtype, **layout)
    found, want = step(layer, *batch(dtype=dtype)), step(twin, *batch(dtype=dtype))
    assert all(p.grad is None for p in named(layer, "weight").values())
    for name in ("y", "dx", "db"):
        assert_same(found[name], want[name], name)
    layer.backward_dw()
    for name, gradient in {"dx": found["dx"], "dw": stacked(layer), "db": stacked(layer, "bias")}.items():
        assert_same(gradient, want[name], name)


@grid(SHIPPED, layout=LAYERS)
def test_the_oldest_microbatch_comes_first_and_gradients_accumulate(recipe, layout):
    """Backwards and their weight gradients take turns, with two or three pending and sizes that differ."""
    layer, twin = delayed(recipe, layout), experts(recipe, **layout)
    data = [(splits, batch(splits, seed=i)) for i, splits in enumerate(((9, 0, 4), (0, 30, 1), (2, 2, 2), (0, 0, 50)))]
    wants = [step(twin, x, dy, splits)["dw"] for splits, (x, dy) in data]
    layer.zero_grad()
    total, done = torch.zeros(shape(layer)), 0
    for i, (splits, (x, dy)) in enumerate(data):
        backward(forward(layer, x, splits), dy)
        while i - done >= 2 or (i == 3 and done < 4):
            layer.backward_dw()
            total, done = total + wants[done], done + 1
            assert_same(stacked(layer), total, f"after {done}")
    with pytest.warns(UserWarning, match="no backward to finish"):
        layer.backward_dw()


@grid(SAMPLE, layout=LAYERS)
def test_forwards_first_then_backwards_then_weight_gradients(recipe, layout):
    layer, twin = delayed(recipe, layout), experts(recipe, **layout)
    data = [batch(seed=i) for i in range(3)]
    for model in (layer, twin):
        for y, dy in [(forward(model, x), dy) for x, dy in data]:
            backward(y, dy)
    for _ in data:
        layer.backward_dw()
    assert_same(stacked(layer), stacked(twin))


@grid(SHIPPED, layout=LAYERS, overwrite=[False, True])
def test_deferred_and_added_to_main_grad(recipe, layout, overwrite):
    layer, twin = delayed(recipe, layout, fuse_wgrad_accumulation=True), experts(recipe, **layout)
    buffer = give(layer, torch.ones(shape(layer)))
    for p in named(layer, "weight").values():
        p.overwrite_main_grad = overwrite
    step(layer, *batch())
    assert (buffer == 1).all()
    layer.backward_dw()
    want = step(twin, *batch())["dw"]
    assert_same(buffer, want if overwrite else 1 + want)
    assert all(p.grad is None for p in named(layer, "weight").values())


@grid(SAMPLE, layout=LAYERS)
def test_hooks_fire_once_for_each_backward_dw_and_see_the_gradient(recipe, layout):
    layer, twin, seen, after = delayed(recipe, layout), experts(recipe, **layout), [], []
    for name, p in named(layer, "weight").items():
        p.register_hook(lambda g, name=name: seen.append((name, g.clone())))
        p.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    wants = [step(twin, *batch(seed=i))["dw"] for i in range(2)]
    for i in range(2):
        backward(forward(layer, batch(seed=i)[0]), batch(seed=i)[1])
    assert not seen and not after
    for i, want in enumerate(wants):
        layer.backward_dw()
        assert sorted(name for name, _ in seen) == sorted(named(layer, "weight"))
        found = dict(seen)
        assert_same(found["weight"] if "weight" in found else torch.stack(list(found.values())), want)
        assert_same(after[0] if len(after) == 1 else torch.stack(after), sum(wants[: i + 1]))
        seen.clear(), after.clear()


@layers
def test_a_backward_dw_with_nothing_pending_warns(layout):
    layer, (x, dy) = delayed("fp8-current", layout), batch()
    for run in (lambda: None, lambda: forward(layer, x)):  # a forward whose backward never comes is not waited for
        run()
        with pytest.warns(UserWarning, match="no backward to finish"):
            layer.backward_dw()
    with torch.no_grad():
        forward(layer, x)
    with pytest.warns(UserWarning, match="no backward to finish"):
        layer.backward_dw()
    backward(forward(layer, x), dy)
    layer.backward_dw()
    assert stacked(layer) is not None


@layers
def test_backward_dw_is_nothing_without_the_setting_and_with_frozen_weights(layout):
    plain = experts("fp8-current", **layout)
    plain.backward_dw()
    want = step(plain, *batch())["dw"].clone()
    plain.backward_dw()
    assert_same(stacked(plain), want)
    frozen = delayed("fp8-current", layout)
    for p in named(frozen, "weight").values():
        p.requires_grad_(False)
    step(frozen, *batch())
    frozen.backward_dw()
    assert all(p.grad is None for p in named(frozen, "weight").values())


@layers
def test_putting_off_may_begin_and_end_after_construction(layout):
    layer, twin = experts("fp8-current", **layout), experts("fp8-current", **layout)
    want = step(twin, *batch())["dw"]
    layer.delay_wgrad_compute = True
    assert step(layer, *batch())["dw"] is None
    layer.backward_dw()
    assert_same(stacked(layer), want)
    layer.delay_wgrad_compute = False
    assert_same(step(layer, *batch())["dw"], want)


@sample
def test_a_second_backward_is_pending_a_second_time(recipe):
    layer, twin, (x, dy) = delayed(recipe), experts(recipe), batch()
    for model in (layer, twin):
        y = model(x, sizes())
        y.backward(dy, retain_graph=True)
        y.backward(dy)
    layer.backward_dw()
    assert differs(stacked(layer), stacked(twin))
    layer.backward_dw()
    assert_same(stacked(layer), stacked(twin))


@layers
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_microbatch_is_pending_once(layout, reentrant):
    layer, twin, (x, dy) = delayed("fp8-current", layout), experts("fp8-current", **layout), batch()
    backward(checkpoint(partial(forward, layer), x.clone().requires_grad_(), use_reentrant=reentrant), dy)
    layer.backward_dw()
    assert_same(stacked(layer), step(twin, x, dy)["dw"])
    with pytest.warns(UserWarning, match="no backward to finish"):
        layer.backward_dw()


@grid(SHIPPED, layout={name: LAYERS[name] for name in ("single", "linear")})
def test_a_weight_updated_before_backward_dw_does_not_matter(recipe, layout):
    layer, twin, (x, dy) = delayed(recipe, layout), experts(recipe, **layout), batch()
    step(layer, x, dy)
    change(layer)
    layer.backward_dw()
    assert_same(stacked(layer), step(twin, x, dy)["dw"])


@quantized
def test_sizes_and_rows_overwritten_before_backward_dw_do_not_matter(recipe):
    """The next microbatch may lie in the same static tensors: codes are copies, and so are the sizes they go by."""
    layer, twin, (x, dy) = delayed(recipe), experts(recipe), batch()
    want, static = step(twin, x, dy)["dw"], sizes()
    layer(x, static).backward(dy)
    x.zero_(), dy.zero_(), static.copy_(sizes((1, 2, 3)))
    layer.backward_dw()
    assert_same(stacked(layer), want)
