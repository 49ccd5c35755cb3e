"""Parameters of a GroupedLinear: one or one for each group, frozen, copied, from the meta device."""

import copy

import pytest
import torch

import octavo
from octavo.recipes import SHIPPED
from tests.support.experts import (
    LAYOUTS,
    MIXED,
    NAN,
    ROWS,
    G,
    K,
    N,
    addresses,
    assert_steps,
    batch,
    change,
    every,
    experts,
    grid,
    mixed,
    own,
    same_seed,
    sizes,
    step,
)
from tests.support.linear_oracle import assert_same, differs, spiky
from tests.support.steps import assert_state

# -- layouts -----------------------------------------------------------------------------------------------------------


@grid(SHIPPED, layout=MIXED)
def test_every_layout_gives_the_right_gradient_to_the_right_parameter(recipe, layout):
    layer, twin = experts(recipe, scale_bias=True, **layout), experts(recipe, scale_bias=True)
    (x, dy), scales = batch((20, 9, 18)), spiky(ROWS, seed=4)
    want = step(twin, x, dy, (20, 9, 18), scales=scales)
    assert_steps(step(layer, x, dy, (20, 9, 18), scales=scales), want)
    for kind, key in (("weight", "dw"), ("bias", "db")):
        for g in range(G):
            whole = layout[f"single_grouped_{kind}"]
            found = getattr(layer, kind).grad[g] if whole else getattr(layer, f"{kind}{g}").grad
            assert_same(found, want[key][g], f"{kind} of {g}")


@mixed
def test_parameters_have_the_names_and_shapes_of_their_layout(layout):
    found = {name: tuple(p.shape) for name, p in experts("fp8-current", **layout).named_parameters()}
    weights = {"weight": (G, N, K)} if layout["single_grouped_weight"] else {f"weight{g}": (N, K) for g in range(G)}
    biases = {"bias": (G, N)} if layout["single_grouped_bias"] else {f"bias{g}": (N,) for g in range(G)}
    assert found == weights | biases
    assert set(experts("fp8-current", **layout).state_dict()) == set(found)
    assert set(dict(experts("fp8-current", bias=False, **layout).named_parameters())) == set(weights)


# -- frozen experts ----------------------------------------------------------------------------------------------------


@every
def test_frozen_experts_get_no_gradient_and_the_others_theirs(recipe):
    layer, twin = experts(recipe, **LAYOUTS["per group"]), experts(recipe)
    (x, dy), splits = batch((20, 9, 18)), (20, 9, 18)
    layer.weight1.requires_grad_(False)
    layer.bias2.requires_grad_(False)
    found, want = step(layer, x, dy, splits), step(twin, x, dy, splits)
    assert_same(found["y"], want["y"])
    assert_same(found["dx"], want["dx"])
    for g in range(G):
        assert_same(getattr(layer, f"weight{g}").grad, None if g == 1 else want["dw"][g], f"weight{g}")
        assert_same(getattr(layer, f"bias{g}").grad, None if g == 2 else want["db"][g], f"bias{g}")


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "nvfp4"])
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_frozen_experts_need_no_buffer_and_wait_for_nothing(recipe, deferred, main_grad):
    layer = experts(recipe, fuse_wgrad_accumulation=main_grad, delay_wgrad_compute=deferred, **LAYOUTS["per group"])
    twin, (x, dy), splits = experts(recipe), batch((20, 9, 18)), (20, 9, 18)
    layer.weight1.requires_grad_(False)
    for g in (0, 2) if main_grad else ():
        getattr(layer, f"weight{g}").main_grad = torch.zeros(N, K)
    step(layer, x, dy, splits)
    if deferred:
        layer.backward_dw()
    want = step(twin, x, dy, splits)["dw"]
    for g in (0, 2):
        p = getattr(layer, f"weight{g}")
        assert_same(p.main_grad if main_grad else p.grad, want[g], f"weight{g}")
    assert layer.weight1.grad is None


# -- copies and the meta device ----------------------------------------------------------------------------------------


@grid(SHIPPED, layout=LAYOUTS)
def test_a_deep_copy_is_a_layer_of_its_own(recipe, layout):
    layer = experts(recipe, **layout)
    x, dy = batch()
    step(layer, x, dy, is_first_microbatch=True)
    twin = copy.deepcopy(layer)
    assert not {p.data_ptr() for p in layer.parameters()} & {p.data_ptr() for p in twin.parameters()}
    assert not set(addresses(layer).values()) & set(addresses(twin).values())
    for i in range(2):
        x, dy = batch(seed=i)
        assert_steps(step(twin, x, dy), step(layer, x, dy))
        octavo.step(layer), octavo.step(twin)
    assert_state(twin, layer)
    change(twin)
    assert differs(twin(x, sizes()), layer(x, sizes()))


@grid(SHIPPED, layout=LAYOUTS)
def test_a_layer_from_the_meta_device_materialises(recipe, layout):
    torch.manual_seed(3)
    made = octavo.GroupedLinear(G, K, N, recipe=recipe, **layout)
    born = octavo.GroupedLinear(G, K, N, recipe=recipe, device="meta", **layout)
    assert all(p.is_meta for p in born.parameters())
    born.to_empty(device="cpu")
    for p in born.parameters():
        p.data.fill_(NAN)
    torch.manual_seed(3)
    born.reset_parameters()
    for a, b in zip(made.parameters(), born.parameters(), strict=True):
        assert_same(a.detach(), b.detach())
    for weight in own(born):
        assert 0 < weight.abs().max() <= K**-0.5 and weight.std() > 0.3 * K**-0.5
    assert differs(own(born)[0], own(born)[1])
    same_seed(made), same_seed(born)
    assert_steps(step(born, *batch()), step(made, *batch()))
