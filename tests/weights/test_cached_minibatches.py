"""The weight cache of Linear and GroupedLinear: is_first_microbatch on host and device, refreshes, stale codes."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.recipes import SHIPPED
from tests.support.experts import (
    LAYERS,
    LAYOUTS,
    Alone,
    G,
    K,
    N,
    addresses,
    assert_steps,
    batch,
    cached_codes,
    change,
    experts,
    grid,
    layers,
    own,
    same_seed,
    sizes,
    stateless,
    step,
)
from tests.support.linear_oracle import assert_same
from tests.support.recipe_traits import QUANTIZED, STATELESS, is_stochastic
from tests.support.steps import assert_state

# -- values ------------------------------------------------------------------------------------------------------------


@grid(SHIPPED, layout=LAYERS)
def test_a_cached_minibatch_equals_one_without_a_cache(recipe, layout):
    cached, plain = experts(recipe, **layout), experts(recipe, **layout)
    for minibatch in range(3):
        for i, first in enumerate((True, False, False)):
            x, dy = batch(seed=3 * minibatch + i)
            assert_steps(step(cached, x, dy, is_first_microbatch=first), step(plain, x, dy))
        for layer in (cached, plain):
            octavo.step(layer)
            change(layer)


@grid(SHIPPED, layout=LAYOUTS)
def test_a_flag_on_the_device_is_the_flag_on_the_host(recipe, layout):
    by_device, by_host = experts(recipe, **layout), experts(recipe, **layout)
    flag, places = torch.ones(1, dtype=torch.int32), None
    for minibatch in range(3):
        for i, first in enumerate((True, False, False)):
            x, dy = batch(seed=3 * minibatch + i)
            flag.fill_(first)
            found = step(by_device, x, dy, is_first_microbatch=flag)
            assert_steps(found, step(by_host, x, dy, is_first_microbatch=first))
            assert places in (None, addresses(by_device))
            places = addresses(by_device)
        for layer in (by_device, by_host):
            octavo.step(layer)
            change(layer)
    assert_state(by_device, by_host)


@grid(QUANTIZED, layout=LAYOUTS, dtype=[torch.int32, torch.bool, torch.float32])
def test_a_zero_on_the_device_leaves_every_byte_of_the_cache(recipe, layout, dtype):
    layer, (x, dy) = experts(recipe, **layout), batch()
    flag = torch.ones(1, dtype=dtype)
    first = step(layer, x, dy, is_first_microbatch=flag)
    codes, places = cached_codes(layer), addresses(layer)
    assert sum(t.numel() for t in codes.values()) >= G * N * K // 2
    change(layer, 0.5)
    flag.zero_()
    second = step(layer, x, dy, is_first_microbatch=flag)
    change(layer, -0.5)
    for name, then in codes.items():
        assert torch.equal(cached_codes(layer)[name], then), name
    if not is_stochastic(recipe):  # which draws for dy
        assert_same(second["dx"], first["dx"])
    flag.fill_(1)
    change(layer, 0.5)
    step(layer, x, dy, is_first_microbatch=flag)
    assert any(not torch.equal(cached_codes(layer)[name], then) for name, then in codes.items())
    assert addresses(layer) == places


@grid(QUANTIZED, layout={name: LAYERS[name] for name in ("single", "linear")})
def test_a_cold_cache_is_filled_whatever_the_flag(recipe, layout):
    for flag in (False, torch.zeros(1, dtype=torch.int32), torch.zeros((), dtype=torch.int32)):
        layer, twin = experts(recipe, **layout), experts(recipe, **layout)
        found = step(layer, *batch(), is_first_microbatch=flag)
        assert_steps(found, step(twin, *batch()))


@grid(STATELESS, mode={"no_grad": torch.no_grad, "inference": torch.inference_mode})
def test_a_cache_made_without_gradients_is_completed_for_training(recipe, mode):
    layer, (x, dy) = experts(recipe), batch()
    with mode():
        layer(x, sizes(), is_first_microbatch=True)
    same_seed(layer)
    assert_steps(step(layer, x, dy, is_first_microbatch=False), Alone(layer, recipe).step(x, dy))


@layers
def test_bf16_takes_every_flag_and_holds_nothing(layout):
    layer = experts("bf16", **layout)
    want = step(layer, *batch())
    for flag in (True, False, None, torch.ones(1), torch.zeros(1)):
        assert_steps(step(layer, *batch(), is_first_microbatch=flag), want)
    assert not addresses(layer)


# -- where it lives ----------------------------------------------------------------------------------------------------


@grid(QUANTIZED, layout=LAYERS)
def test_codes_stay_at_their_addresses_and_out_of_the_state_dict(recipe, layout):
    layer = experts(recipe, **layout)
    names = list(layer.state_dict())
    step(layer, *batch(), is_first_microbatch=True)
    places, before = addresses(layer), cached_codes(layer)
    assert sum(t.numel() for t in before.values()) >= sum(w.numel() for w in own(layer)) // 2  # of one orientation
    change(layer)
    step(layer, *batch(seed=2), is_first_microbatch=True)
    assert addresses(layer) == places
    assert any(not torch.equal(cached_codes(layer)[name], then) for name, then in before.items())
    octavo.refresh_weights(layer)
    assert addresses(layer) == places
    assert list(layer.state_dict()) == names


# -- refreshed and stale -----------------------------------------------------------------------------------------------


@grid(STATELESS, layout=LAYOUTS)
def test_refresh_weights_brings_the_cache_up_to_date(recipe, layout):
    layer, (x, dy) = experts(recipe, **layout), batch()
    step(layer, x, dy, is_first_microbatch=True)
    change(layer)
    octavo.refresh_weights(nn.Sequential(layer))
    same_seed(layer)
    assert_steps(step(layer, x, dy, is_first_microbatch=False), Alone(layer, recipe).step(x, dy))


@stateless
def test_attach_refreshes_after_every_optimizer_step(recipe):
    layer, (x, dy) = experts(recipe), batch()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = octavo.attach(layer, optimizer)
    step(layer, x, dy, is_first_microbatch=True)
    optimizer.step()
    same_seed(layer)
    assert_steps(step(layer, x, dy, is_first_microbatch=False), Alone(layer, recipe).step(x, dy))
    handle.remove()


CHANGES = {
    "all of them": change,
    "one element of the last group": lambda layer: own(layer)[-1][3, 5].fill_(7.0),
    "one group": lambda layer: own(layer)[0].mul_(2),
    "load_state_dict": lambda layer: layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}),
}


@grid(QUANTIZED, layout=LAYOUTS, how=CHANGES)
def test_a_weight_that_changed_since_the_refresh_is_refused(recipe, layout, how):
    layer, (x, dy) = experts(recipe, **layout), batch()
    step(layer, x, dy, is_first_microbatch=True)
    how(layer)
    with pytest.raises(UnsupportedConfig, match=r"refresh_weights|is_first_microbatch"):
        layer(x, sizes(), is_first_microbatch=False)
    if recipe != "fp8-delayed":  # and the way out works
        for first in (True, False):
            same_seed(layer)
            assert_steps(step(layer, x, dy, is_first_microbatch=first), Alone(layer, recipe).step(x, dy))


@grid(STATELESS, layout=LAYOUTS)
def test_a_refresh_under_a_pending_backward_is_never_silently_wrong(recipe, layout):
    layer, (x, dy) = experts(recipe, **layout), batch()
    want = Alone(layer, recipe).step(x, dy)["dx"]
    leaf = x.clone().requires_grad_()
    y = layer(leaf, sizes(), is_first_microbatch=True)
    change(layer)
    layer(x, sizes(), is_first_microbatch=True)
    try:
        y.backward(dy)
    except RuntimeError:
        return
    assert_same(leaf.grad, want)


@pytest.mark.parametrize("flag", [torch.ones(2), torch.ones(0), "yes"], ids=str)
def test_a_flag_that_says_nothing_is_refused(flag):
    with pytest.raises((UnsupportedShape, UnsupportedConfig), match="is_first_microbatch"):
        experts("fp8-current")(batch()[0], sizes(), flag)
