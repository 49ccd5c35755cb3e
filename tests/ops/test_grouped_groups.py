"""GroupedLinear gives each group the bits that an octavo.Linear of its own gives, and nothing to the tail.

Tails hold NaN unless a test says otherwise."""

from contextlib import contextmanager

import pytest
import torch

import octavo
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.support.experts import (
    DTYPES,
    LAYOUTS,
    NAN,
    ROWS,
    SAMPLE,
    SPLITS,
    USED,
    Alone,
    K,
    N,
    assert_steps,
    batch,
    change,
    close,
    dtypes,
    every,
    experts,
    grid,
    layouts,
    named,
    own,
    same_seed,
    sizes,
    slices,
    stacked,
    step,
)
from tests.support.linear_oracle import OVERRIDES, assert_same, differs, spiky
from tests.support.steps import assert_state

# -- each group by itself ----------------------------------------------------------------------------------------------


@grid(SHIPPED, layout=LAYOUTS, dtype=DTYPES)
def test_three_steps_of_changing_sizes_equal_those_of_separate_linears(recipe, layout, dtype):
    """With what the recipe remembers of each group: an expert without rows keeps its scales, the others move on."""
    layer = experts(recipe, dtype=dtype, **layout)
    alone = Alone(layer, recipe)
    # fp8-delayed has all experts begin with rows: one that has had none takes the scales of the others
    first = (30, 6, 17) if recipe == "fp8-delayed" else (30, 0, 17)
    for i, splits in enumerate((first, (0, 41, 3), (17, 30, 0))):
        x, dy = batch(splits, seed=i, dtype=dtype)
        assert_steps(step(layer, x, dy, splits), alone.step(x, dy, splits), f"step {i}")
        for model in (layer, alone):
            octavo.step(model)
            change(model)


EMPTY = {"first": (0, 20, 11), "middle": (20, 0, 11), "last": (20, 11, 0), "all but one": (0, 31, 0), "all": (0, 0, 0)}


@grid(SHIPPED, splits=EMPTY)
def test_groups_without_rows_get_zeros(recipe, splits):
    layer = experts(recipe)
    x, dy = batch(splits)
    found = step(layer, x, dy, splits)
    assert_steps(found, Alone(layer, recipe).step(x, dy, splits))
    for g, size in enumerate(splits):
        assert found["dw"][g].any() == found["db"][g].any() == (size > 0)
    assert all(t.isfinite().all() for t in found.values())


@grid(SHIPPED, layout=LAYOUTS, spare={"no rows at all": 0, "a tail alone": 5})
def test_no_token_for_anyone(recipe, layout, spare):
    layer = experts(recipe, scale_bias=True, **layout)
    x, dy = batch((0, 0, 0), spare)
    found = step(layer, x, dy, (0, 0, 0), scales=torch.full((spare,), NAN))
    assert (found["y"].shape, found["dx"].shape, found["ds"].shape) == ((spare, N), (spare, K), (spare,))
    for name, value in found.items():
        assert not value.any(), name
    octavo.step(layer)  # and nothing was learnt from nothing
    splits = (9, 4, 0)
    x, dy = batch(splits)
    fresh = experts(recipe, scale_bias=True, **layout)
    if recipe == "fp8-delayed":
        octavo.load_state_dict(fresh, octavo.state_dict(layer))  # the weights' scales did move
    same_seed(layer), same_seed(fresh)
    scales = torch.ones(len(x))
    assert_steps(step(layer, x, dy, splits, scales=scales), step(fresh, x, dy, splits, scales=scales))


@grid(SHIPPED, splits=[(65, 128, 97), (15, 1, 0, 1011)])
def test_sizes_that_are_multiples_of_nothing(recipe, splits):
    layer = experts(recipe, len(splits), 33, 17)
    x, dy = batch(splits, k=33, n=17)
    assert_steps(step(layer, x, dy, splits), Alone(layer, recipe).step(x, dy, splits))


@grid(SHIPPED, groups=[2, 1, 65, 256])
def test_any_number_of_groups(recipe, groups):
    splits = tuple((3 * g + 1) % 4 for g in range(groups))
    layer = experts(recipe, groups, 16, 8)
    x, dy = batch(splits, k=16, n=8)
    found = step(layer, x, dy, splits)
    assert_steps(found, Alone(layer, recipe).step(x, dy, splits))


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-block"])
def test_ten_thousand_rows_over_sixteen_groups(recipe):
    splits = tuple(torch.randint(0, 1200, (15,), generator=torch.Generator().manual_seed(3)).tolist())
    splits = (*splits, 10027 - sum(splits)) if sum(splits) <= 10027 else (*(n // 2 for n in splits), 5)
    layer = experts(recipe, 16, 16, 8)
    x, dy = batch(splits, k=16, n=8)
    assert_steps(step(layer, x, dy, splits), Alone(layer, recipe).step(x, dy, splits))


WANTED = [(x, w, b) for x in (True, False) for w in (True, False) for b in (True, False)]


@dtypes
@layouts
@pytest.mark.parametrize(("x_grad", "w_grad", "b_grad"), WANTED, ids=str)
def test_unquantized_groups_against_float64_for_whatever_wants_a_gradient(dtype, layout, x_grad, w_grad, b_grad):
    layer = experts("bf16", dtype=dtype, **layout)
    x, dy = batch(dtype=dtype)
    for p in named(layer, "weight").values():
        p.requires_grad_(w_grad)
    for p in named(layer, "bias").values():
        p.requires_grad_(b_grad)
    leaf = x.clone().requires_grad_(x_grad)
    y = layer(leaf, sizes())
    assert y.requires_grad == (x_grad or w_grad or b_grad)
    if y.requires_grad:
        y.backward(dy)
    unit = torch.finfo(dtype).eps
    for g, rows in enumerate(slices(SPLITS)):
        a, w, d = (t.double() for t in (x[rows], own(layer)[g], dy[rows]))
        b = own(layer, "bias")[g].double()
        close(y[rows], a @ w.T + b, a.abs() @ w.T.abs() + b.abs(), unit)
        if x_grad:
            close(leaf.grad[rows], d @ w, d.abs() @ w.abs(), unit)
        if w_grad:
            close(stacked(layer)[g], d.T @ a, d.T.abs() @ a.abs(), unit)
        if b_grad:
            close(stacked(layer, "bias")[g], d.sum(0), d.abs().sum(0), unit)
    assert (leaf.grad is None, stacked(layer) is None) == (not x_grad, not w_grad)
    assert (stacked(layer, "bias") is None) == (not b_grad)


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8"])
def test_a_recipe_with_an_override_is_a_linears_or_is_refused(recipe, override):
    """A wgrad of the original x is such an override."""
    recipe = f"{recipe}({override})"
    try:
        layer = experts(recipe)
    except UnsupportedConfig:
        return
    assert_steps(step(layer, *batch()), Alone(layer, recipe).step(*batch()))


@grid(SAMPLE, layout=LAYOUTS)
def test_an_ambient_recipe_is_followed(recipe, layout):
    layer, twin = experts(None, **layout), experts(recipe, **layout)
    with octavo.autocast(recipe):
        layer(batch()[0], sizes())
        same_seed(layer)
        assert_steps(step(layer, *batch()), step(twin, *batch()))


@grid(SAMPLE, layout=LAYOUTS)
def test_an_optimizer_trains_every_group(recipe, layout):
    layer = experts(recipe, **layout)
    alone, rates = Alone(layer, recipe), {"lr": 0.01}
    pair = [(m, torch.optim.AdamW(m.parameters(), **rates)) for m in (layer, alone)]
    for i in range(3):
        x, dy = batch(seed=i)
        step(layer, x, dy), alone.step(x, dy)
        for model, optimizer in pair:
            optimizer.step()
            octavo.step(model)
    for g, linear in enumerate(alone.linears):
        assert_same(own(layer)[g], linear.weight.detach(), f"weight of {g}")
        assert_same(own(layer, "bias")[g], linear.bias.detach(), f"bias of {g}")


# -- the tail ----------------------------------------------------------------------------------------------------------


@grid(SHIPPED, layout=LAYOUTS, poison=[NAN, float("inf"), 1e4])
def test_a_tail_as_long_as_the_rows_is_seen_by_no_amax(recipe, layout, poison):
    """Results and what the recipe remembers are those of a clean tail."""
    layer, clean = experts(recipe, **layout), experts(recipe, **layout)
    for i in range(2):
        found = step(layer, *batch(spare=USED, seed=i, poison=poison))
        want = step(clean, *batch(spare=USED, seed=i, poison=0.0))
        assert_steps(found, want, f"step {i}")
        assert not found["y"][USED:].any() and not found["dx"][USED:].any()
        for model in (layer, clean):
            octavo.step(model)
        assert_state(layer, clean)


@contextmanager
def uninitialised_memory_full_of_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@grid(SHIPPED, layout=LAYOUTS, tail=["zero", "untouched"])
def test_nothing_uninitialised_is_read(recipe, layout, tail):
    layer, twin = (experts(recipe, tail=tail, scale_bias=True, **layout) for _ in range(2))
    (x, dy), scales = batch(), spiky(ROWS, seed=4)
    want = step(twin, x, dy, scales=scales)
    with uninitialised_memory_full_of_nan():
        found = step(layer, x, dy, scales=scales)
    rows = slice(None) if tail == "zero" else slice(USED)
    for name in ("y", "dx"):
        assert_same(found[name][rows], want[name][rows], name)
    assert_steps({n: found[n] for n in ("dw", "db")}, {n: want[n] for n in ("dw", "db")})
    assert_same(found["ds"], want["ds"])


@every
def test_an_untouched_tail_changes_nothing_else(recipe):
    layer, twin = experts(recipe, tail="untouched"), experts(recipe)
    found, want = step(layer, *batch()), step(twin, *batch())
    for name in ("y", "dx"):
        assert_same(found[name][:USED], want[name][:USED], name)
    assert_same(found["dw"], want["dw"])
    assert_same(found["db"], want["db"])
    with pytest.raises(UnsupportedConfig, match="tail"):
        experts(recipe, tail="ones")


# -- the same every time -----------------------------------------------------------------------------------------------


@every
def test_a_second_run_gives_the_same_bits(recipe):
    layer, (x, dy), scales = experts(recipe, scale_bias=True), batch(), spiky(ROWS, seed=4)
    first = step(layer, x, dy, scales=scales)
    for _ in range(3):
        same_seed(layer)
        assert_steps(step(layer, x, dy, scales=scales), first)


def test_a_seed_that_moves_on_draws_anew():
    layer, (x, dy) = experts("nvfp4"), batch()
    first, second = step(layer, x, dy), step(layer, x, dy)
    assert_same(first["y"], second["y"])
    assert differs(first["dw"], second["dw"])
