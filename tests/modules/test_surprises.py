"""What must not happen silently: gradients that stop, state that is half changed, weights that nobody reads."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from tests.modules.oracle import QUANTIZED, assert_same, make, run, spiky

X, DY = spiky(24, 48, seed=3), spiky(24, 40, seed=4)
quantized = pytest.mark.parametrize("recipe", QUANTIZED)


# -- gradients of quantized outputs ----------------------------------------------------------------------------------


@quantized
def test_values_of_a_quantized_output_pass_their_gradient_on(recipe):
    layer, x = make(recipe), X.clone().requires_grad_()
    other, leaf = copy.deepcopy(layer), X.clone().requires_grad_()
    layer(x, fp8_output=True).dequantize().backward(DY)
    other(leaf).backward(DY)
    assert_same(x.grad, leaf.grad)
    assert_same(layer.weight.grad, other.weight.grad)


def test_a_slice_of_a_quantized_output_passes_its_gradient_on():
    layer, x = make("fp8-rowwise"), X.clone().requires_grad_()
    layer(x, fp8_output=True)[8:16].dequantize().sum().backward()
    assert x.grad[8:16].abs().sum() > 0
    assert x.grad[:8].abs().sum() == x.grad[16:].abs().sum() == 0


# -- delayed scaling -------------------------------------------------------------------------------------------------


def test_a_frozen_layer_in_training_learns_its_scales_too():
    layer = make("fp8-delayed", bias=False).requires_grad_(False)
    x = X * 1e-4
    for _ in range(2):
        layer(x)
        octavo.step(layer)
    y, want = layer(x), nn.functional.linear(x, layer.weight)
    assert (y - want).norm() / want.norm() < 0.1


def test_held_codes_are_scaled_by_the_weight_itself_whatever_was_seen_before():
    layer = make("fp8-delayed")
    weight = layer.weight.detach().clone() * 1e-5
    with torch.no_grad():
        layer.weight.copy_(weight)
    octavo.quantize_weights(layer)
    found = layer.state_dict()["weight"]
    assert (found - weight).norm() / weight.norm() < 0.06


def test_a_cold_cache_keeps_the_recipes_margin():
    recipe = "fp8-delayed(cold_start='current',margin=3)"
    a, b = run(make(recipe), X, DY, is_first_microbatch=True), run(make(recipe), X, DY)
    assert_same(a.y, b.y)


def test_leaving_a_delayed_recipe_leaves_its_memory_behind():
    layer = make("fp8-delayed")
    octavo.convert(layer, "fp8-current", overwrite=True)
    assert octavo.state_dict(layer) == {}
    octavo.convert(layer, "fp8-delayed(history=4)", overwrite=True)
    assert octavo.state_dict(layer)["scaling.forward.history"].shape == (2, 4)


# -- half-done changes -----------------------------------------------------------------------------------------------


def test_a_recipe_that_is_refused_is_not_set():
    layer = make("fp8-delayed")
    with pytest.raises(UnsupportedConfig, match="remembers amaxes"):
        layer.recipe = "fp8-delayed(history=4)"
    assert str(layer.recipe) == "fp8-delayed"


def test_a_conversion_that_is_refused_changes_nothing():
    model = nn.Sequential(nn.Linear(48, 48), make("fp8-delayed", 48, 40))
    with pytest.raises(UnsupportedConfig, match="remembers amaxes"):
        octavo.convert(model, "fp8-delayed(history=4)", overwrite=True)
    assert type(model[0]) is nn.Linear
    assert str(model[1].recipe) == "fp8-delayed"
    rows = list(octavo.convert(model, "fp8-delayed(history=4)", strict=False, overwrite=True))
    assert [row.route for row in rows] == ["reference", "skipped"]


def test_a_state_with_one_bad_tensor_changes_nothing():
    model = nn.Sequential(make("fp8-delayed"), make("fp8-delayed", 40, 8))
    source = copy.deepcopy(model)
    for layer in source:
        layer.scaling_forward_encode.fill_(2.0)
    bad = octavo.state_dict(source) | {"1.scaling.backward.encode": torch.zeros(3, 3)}
    with pytest.raises(UnsupportedShape, match="encode"):
        octavo.load_state_dict(model, bad)
    assert all(layer.scaling_forward_encode.tolist() == [1.0, 1.0] for layer in model)


def test_weights_are_quantized_all_or_none():
    model = nn.Sequential(make("fp8-current"), make("bf16", 40, 40), make("fp8-current", 40, 48))
    model[2].weight = model[0].weight
    with pytest.raises(UnsupportedConfig, match=r"0.weight is also 2.weight"):
        octavo.quantize_weights(model)
    assert not any(name.endswith("codes") for name, _ in model.named_buffers())


def test_a_layer_without_codes_is_left_as_it_is():
    model = nn.Sequential(make("fp8-current"), make("bf16", 40, 40))
    octavo.quantize_weights(model)
    assert model[0].weight.untyped_storage().nbytes() == 4
    assert model[1].weight.untyped_storage().nbytes() == 40 * 40 * 4


def test_gradients_that_wait_are_not_reverted_away():
    layer = make("fp8-current", delay_wgrad_compute=True)
    layer(X).backward(DY)
    with pytest.raises(UnsupportedConfig, match="1 weight gradients pending"):
        octavo.revert(layer)
    layer.backward_dw()
    octavo.revert(layer)
    assert type(layer) is nn.Linear
    assert layer.weight.grad is not None


def test_a_shared_layer_cannot_be_two_things():
    shared = nn.Linear(48, 48)
    model = nn.ModuleDict({"body": shared, "head": shared})
    with pytest.raises(UnsupportedConfig, match="same layer as body"):
        octavo.convert(model, "fp8-current", policy=lambda path, module: path != "head")
    assert type(shared) is nn.Linear
    assert len(octavo.convert(model, "fp8-current")) == 2


# -- weights that nobody reads ---------------------------------------------------------------------------------------


def test_a_copy_of_held_codes_is_held_too():
    layer = make("fp8-current")
    octavo.quantize_weights(layer)
    layer.weight.main_grad = torch.zeros(40, 48)
    twin = copy.deepcopy(layer)
    assert twin.weight.untyped_storage().nbytes() == 4
    assert_same(twin(X), layer(X))


def test_another_weight_in_the_place_of_held_codes_is_refused():
    layer = make("fp8-current")
    layer.weight.main_grad = "kept"
    octavo.quantize_weights(layer)
    assert layer.weight.main_grad == "kept"
    with pytest.raises(UnsupportedConfig, match="would not read"):
        functional_call(layer, {"weight": torch.zeros(40, 48)}, (X,))
    layer.weight = nn.Parameter(torch.zeros(40, 48))
    with pytest.raises(UnsupportedConfig, match="would not read"):
        layer(X)


@quantized
def test_a_cache_filled_for_another_tensor_is_not_used(recipe):
    layer = make(recipe)
    for scale in (1.0, 2.0):
        weights = {"weight": layer.weight.detach() * scale}
        y = functional_call(layer, weights, (X,), {"is_first_microbatch": True})
        want = make(recipe)
        with torch.no_grad():
            want.weight.mul_(scale)
        assert_same(y.detach(), want(X).detach())
    with pytest.raises(UnsupportedConfig, match="another tensor"):
        layer(X, is_first_microbatch=False)


def test_a_stale_cache_is_refused_even_where_a_column_is_missing():
    layer = make("fp8-current")
    with torch.no_grad():
        layer(X, is_first_microbatch=True)
        layer.weight.mul_(2)
    with pytest.raises(UnsupportedConfig, match="changed since"):
        layer(X.clone().requires_grad_(), is_first_microbatch=False)


@pytest.mark.parametrize("written", ["x", "dy"])
def test_operands_written_to_before_backward_dw_are_noticed(written):
    layer, x, dy = make("bf16", delay_wgrad_compute=True), X.clone(), DY.clone()
    layer(x).backward(dy)
    (x if written == "x" else dy).zero_()
    with pytest.raises(UnsupportedConfig, match="written to since"):
        layer.backward_dw()


@pytest.mark.parametrize("recipe", ["fp8-block(backward='dequantized')", "nvfp4(backward='dequantized')"])
def test_a_dequantized_backward_keeps_codes_and_not_the_weight(recipe):
    layer, kept = make(recipe, 40, 40), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(spiky(24, 40).requires_grad_())
    assert all(t.untyped_storage().data_ptr() != layer.weight.untyped_storage().data_ptr() for t in kept)


# -- where it runs ---------------------------------------------------------------------------------------------------


def test_a_recompute_after_another_forward_outside_the_recipe_is_refused():
    layer, leaf = make(None), X.clone().requires_grad_()
    with octavo.autocast("fp8-current"):
        y = checkpoint(layer, leaf, use_reentrant=True)
    layer(X)
    with pytest.raises(UnsupportedConfig, match="inside the checkpointed function"):
        y.backward(DY)


def test_tensors_on_two_devices_and_wide_weights_are_said():
    with pytest.raises(UnsupportedDevice, match="x is on meta and the weight on cpu"):
        make("fp8-current")(X.to("meta"))
    with pytest.raises(UnsupportedDtype, match=r"torch\.float64"):
        make("bf16").double()(X)
    with pytest.raises(UnsupportedConfig, match=r"torch\.float64"):
        octavo.convert(nn.Linear(4, 4, dtype=torch.float64), "fp8-current")


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED])
def test_the_meta_device_tells_shapes(recipe):
    layer = octavo.Linear(48, 40, device="meta", recipe=recipe)
    x = torch.empty(2, 3, 48, device="meta", requires_grad=True)
    y = layer(x)
    assert y.shape == (2, 3, 40)
    y.sum().backward()
    assert (x.grad.shape, layer.weight.grad.shape) == (x.shape, (40, 48))


def test_a_buffer_that_overlaps_itself_is_refused():
    layer = make("fp8-current", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(1).expand(40, 48)
    with pytest.raises(UnsupportedShape, match=r"strides \(0, 0\)"):
        layer(X).backward(DY)
