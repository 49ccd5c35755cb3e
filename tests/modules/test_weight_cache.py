"""The weight cache: what each is_first_microbatch means, where codes live, and every way for them to be stale."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.modules.oracle import QUANTIZED, assert_result, check, differs, expected, make, run, spiky

every = pytest.mark.parametrize("recipe", SHIPPED)
quantized = pytest.mark.parametrize("recipe", QUANTIZED)
STATELESS = [r for r in QUANTIZED if r != "fp8-delayed"]
stateless = pytest.mark.parametrize("recipe", STATELESS)


def batch(i, m=21):
    return spiky(m, 48, seed=10 + i), spiky(m, 40, seed=20 + i)


def change(layer, by=0.05):
    with torch.no_grad():
        layer.weight.add_(by)


def same_seeds(*layers):
    for other in layers[1:]:
        octavo.load_state_dict(other, octavo.state_dict(layers[0]))


def addresses(layer):
    return {name: b.data_ptr() for name, b in layer.named_buffers() if b.numel()}


# -- values --------------------------------------------------------------------------------------------------------


@every
def test_a_cached_minibatch_equals_a_separate_module_without_a_cache(recipe):
    """True, False, False, over weights that change between minibatches."""
    cached, plain = make(recipe), make(recipe)
    same_seeds(cached, plain)
    for minibatch in range(3):
        for i, first in enumerate((True, False, False)):
            x, dy = batch(3 * minibatch + i)
            assert_result(run(cached, x, dy, is_first_microbatch=first), run(plain, x, dy))
        for layer in (cached, plain):
            octavo.step(layer)
            change(layer)


@every
def test_deferred_backwards(recipe):
    """All forwards, then all backwards, first to last."""
    cached, plain = make(recipe), make(recipe)
    same_seeds(cached, plain)
    for layer, flags in ((cached, (True, False, False)), (plain, (None, None, None))):
        layer.leaves = [batch(i)[0].requires_grad_() for i in range(3)]
        outputs = [layer(x, is_first_microbatch=flag) for x, flag in zip(layer.leaves, flags, strict=True)]
        for i, y in enumerate(outputs):
            y.backward(batch(i)[1])
    assert torch.equal(cached.weight.grad, plain.weight.grad)
    assert torch.equal(cached.bias.grad, plain.bias.grad)
    for a, b in zip(cached.leaves, plain.leaves, strict=True):
        assert torch.equal(a.grad, b.grad)


@stateless
def test_a_refresh_under_a_pending_backward_is_never_silently_wrong(recipe):
    layer = make(recipe)
    (x, dy), old = batch(0), layer.weight.detach().clone()
    leaf = x.clone().requires_grad_()
    y = layer(leaf, is_first_microbatch=True)
    change(layer)
    layer(batch(1)[0], is_first_microbatch=True)
    seed = octavo.state_dict(layer).get("rounding.seed")
    try:
        y.backward(dy)
    except RuntimeError:  # as nn.Linear would: a tensor needed for backward was modified in place
        return
    assert torch.equal(leaf.grad, expected(recipe, x, old, layer.bias, dy, seed=seed).dx)


@quantized
def test_a_cold_cache_is_filled(recipe):
    check(make(recipe), recipe, *batch(0), is_first_microbatch=False)


@quantized
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_made_without_gradients_is_completed_for_training(recipe, mode):
    layer, (x, dy) = make(recipe), batch(0)
    with mode():
        layer(x, is_first_microbatch=True)
    check(layer, recipe, x, dy, is_first_microbatch=False)


@quantized
def test_a_frozen_inputs_cache_is_completed_when_dx_is_wanted(recipe):
    layer, (x, dy) = make(recipe), batch(0)
    layer(x, is_first_microbatch=True)  # x wants no gradient: no column of w was needed
    check(layer, recipe, x, dy, is_first_microbatch=False)


@quantized
def test_inference_reads_the_cache_of_training(recipe):
    layer, (x, dy) = make(recipe), batch(0)
    found = run(layer, x, dy, is_first_microbatch=True)
    with torch.no_grad():
        assert torch.equal(layer(x, is_first_microbatch=False), found.y)


@stateless
def test_none_neither_reads_nor_writes_the_cache(recipe):
    layer, (x, dy) = make(recipe), batch(0)
    run(layer, x, dy)
    layer_cached = make(recipe)
    run(layer_cached, x, dy, is_first_microbatch=True)
    held = {name: b.clone() for name, b in layer_cached.named_buffers()}
    change(layer_cached)
    check(layer_cached, recipe, x, dy, is_first_microbatch=None)  # the new weights
    for name, b in layer_cached.named_buffers():
        if "seed" not in name:
            assert torch.equal(b.view(torch.uint8), held[name].view(torch.uint8)), name
    with pytest.raises(UnsupportedConfig):  # still the old ones in there
        layer_cached(x, is_first_microbatch=False)


# -- where it lives ------------------------------------------------------------------------------------------------


@quantized
def test_codes_stay_at_their_addresses_and_out_of_the_state_dict(recipe):
    layer = make(recipe)
    run(layer, *batch(0), is_first_microbatch=True)
    first = addresses(layer)
    held = sum(b.numel() * b.element_size() for _, b in layer.named_buffers())
    assert held >= layer.weight.numel() // 2  # at least the codes of one orientation, four bits each
    before = {name: b.clone() for name, b in layer.named_buffers()}
    change(layer)
    run(layer, *batch(1), is_first_microbatch=True)
    assert addresses(layer) == first
    assert any(differs(b, before[name]) for name, b in layer.named_buffers() if b.numel() > 8)
    octavo.refresh_weights(layer)
    assert addresses(layer) == first
    assert list(layer.state_dict()) == ["weight", "bias"]


@quantized
def test_without_the_flag_there_is_no_cache(recipe):
    layer = make(recipe)
    before = addresses(layer)
    run(layer, *batch(0))
    octavo.refresh_weights(layer)
    assert addresses(layer) == before


# -- refresh -------------------------------------------------------------------------------------------------------


@stateless
def test_refresh_weights_brings_every_cache_up_to_date(recipe):
    model = nn.Sequential(make(recipe, 48, 48), nn.ReLU(), make(recipe, 48, 40))
    x, dy = batch(0)
    for layer in (model[0], model[2]):
        run(layer, x, is_first_microbatch=True)
        change(layer)
    octavo.refresh_weights(model)
    check(model[0], recipe, x, spiky(21, 48, seed=3), is_first_microbatch=False)
    check(model[2], recipe, x, dy, is_first_microbatch=False)


@stateless
def test_attach_refreshes_after_every_optimizer_step(recipe):
    layer, (x, dy) = make(recipe), batch(0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = octavo.attach(layer, optimizer)
    layer(x, is_first_microbatch=True).backward(dy)
    optimizer.step()
    optimizer.zero_grad()
    check(layer, recipe, x, dy, is_first_microbatch=False)
    handle.remove()
    layer(x, is_first_microbatch=False).backward(dy)
    optimizer.step()
    with pytest.raises(UnsupportedConfig):
        layer(x, is_first_microbatch=False)


# -- stale ---------------------------------------------------------------------------------------------------------


def by_optimizer(layer):
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    layer.weight.grad = None


def by_assignment(layer):
    layer.weight = nn.Parameter(layer.weight.detach() + 1)


def by_data(layer):
    layer.weight.data = layer.weight.data + 1


CHANGES = {
    "in place": change,
    "one element": lambda layer: layer.weight.detach()[3, 5].fill_(7.0),
    "copy_": lambda layer: layer.weight.detach().copy_(layer.weight.detach() + 1),
    "optimizer": by_optimizer,
    "load_state_dict": lambda layer: layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}),
    "another parameter": by_assignment,
    "another storage": by_data,
}


@quantized
@pytest.mark.parametrize("how", CHANGES.values(), ids=CHANGES)
def test_a_weight_that_changed_since_the_refresh_is_refused(recipe, how):
    layer, (x, dy) = make(recipe), batch(0)
    run(layer, x, dy, is_first_microbatch=True)
    how(layer)
    with pytest.raises(UnsupportedConfig, match=r"refresh_weights|is_first_microbatch"):
        layer(x, is_first_microbatch=False)
    if recipe != "fp8-delayed":  # and the way out works
        check(layer, recipe, x, dy, is_first_microbatch=True)
        check(layer, recipe, x, dy, is_first_microbatch=False)


@stateless
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_cast_of_the_module_does_not_cast_codes_or_scales(recipe, dtype):
    """nn.Module.to(dtype) casts every floating-point buffer it finds, FP8 codes and scales among them."""
    layer, (x, dy) = make(recipe), batch(0)
    run(layer, x, dy, is_first_microbatch=True)
    layer.to(dtype).to(torch.float32)
    check(layer, recipe, x, dy, is_first_microbatch=True)
    layer.to(torch.bfloat16)
    check(layer, recipe, x.bfloat16(), dy.bfloat16(), is_first_microbatch=True)


@stateless
def test_one_layer_under_two_recipes_never_mixes_their_codes(recipe):
    other = "fp8-block" if recipe != "fp8-block" else "mxfp8"
    layer, (x, dy) = make(None), batch(0)
    for name in (recipe, other, recipe):
        with octavo.autocast(name):
            run(layer, x, dy)  # a seed may be made now
            check(layer, name, x, dy, is_first_microbatch=False)


@stateless
def test_a_copy_has_a_cache_of_its_own(recipe):
    layer, (x, dy) = make(recipe), batch(0)
    first = run(layer, x, dy, is_first_microbatch=True)
    twin = copy.deepcopy(layer)
    change(twin)
    check(twin, recipe, x, dy, is_first_microbatch=True)
    with torch.no_grad():
        assert torch.equal(layer(x, is_first_microbatch=False), first.y)


def test_bf16_takes_the_flag_and_holds_nothing():
    layer, (x, dy) = make("bf16"), batch(0)
    for flag in (True, False, None):
        check(layer, "bf16", x, dy, is_first_microbatch=flag)
    assert not addresses(layer)
