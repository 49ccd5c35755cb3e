"""Weights made of codes and scales that a program brings: their values, their memory, and what is refused."""

import copy
import pickle

import pytest
import torch

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from tests.support.linear_oracle import OTHERS, assert_same
from tests.support.recipe_traits import QUANTIZED

SHAPES = [(256, 384), (200, 272), (3, 256, 384), (2, 130, 48)]  # aligned and padded, dense and in groups
FP8 = torch.float8_e4m3fn


def quantized(shape, recipe):
    """Values, and their codes and scales as a quantizer of the recipe makes them, matrix by matrix."""
    spec = octavo.recipe(recipe).linear().fprop.right
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = [spec.quantize(m) for m in values.view(-1, *shape[-2:])]
    codes, scale = (
        torch.stack([getattr(q, name) for q in found]).reshape(*shape[:-2], *getattr(found[0], name).shape)
        for name in ("codes", "scale")
    )
    level2 = None if found[0].global_scale is None else torch.cat([q.global_scale for q in found])
    want = torch.stack([q.dequantize() for q in found]).view(shape)
    return values, codes, scale, level2, want


def layer_of(shape, recipe, **settings):
    *groups, n, k = shape
    settings |= {"bias": False, "recipe": recipe, "dtype": torch.bfloat16}
    if groups:
        return octavo.GroupedLinear(*groups, k, n, single_grouped_weight=True, **settings)
    return octavo.Linear(k, n, **settings)


def step(layer, x, *sizes):
    x = x.clone().requires_grad_()
    y = layer(x, *sizes)
    y.float().square().sum().backward()
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", [*QUANTIZED, *OTHERS[-5:]])
def test_a_layer_computes_with_given_codes_what_it_computes_with_its_own(recipe, shape):
    values, codes, scale, level2, want = quantized(shape, recipe)
    weight = octavo.weight_from_codes(codes, scale, recipe, global_scale=level2, trainable=True)
    assert_same(weight.dequantize().detach(), want)
    own, given = layer_of(shape, recipe), layer_of(shape, recipe, device="meta")
    with torch.no_grad():
        own.weight.copy_(values)
    octavo.quantize_weights(own, trainable=True)
    given.weight = weight
    assert "weight that is codes" in repr(given)
    sizes = (torch.tensor([7] + [4] * (shape[0] - 1)),) if len(shape) == 3 else ()
    x = torch.randn(16, shape[-1], generator=torch.Generator().manual_seed(1)).bfloat16()
    for name in ("row_codes", "row_scale"):
        assert torch.equal(getattr(own.weight, name), getattr(weight, name)), name
    if not octavo.recipe(recipe).linear().is_stochastic:  # layers have seeds of their own
        for a, b in zip(step(own, x, *sizes), step(given, x, *sizes), strict=True):
            assert_same(a, b)


def test_codes_keep_their_memory_where_the_layer_can_read_it():
    for shape in (SHAPES[0], SHAPES[2]):
        codes = torch.zeros(shape, dtype=torch.uint8)
        weight = octavo.weight_from_codes(codes, torch.ones(*shape[:-2], 2, 3), "fp8-block")
        assert weight.row_codes.data_ptr() == codes.data_ptr()
    codes = torch.zeros(384, 256, dtype=torch.uint8).T
    assert octavo.weight_from_codes(codes, torch.ones(2, 3), "fp8-block").row_codes.is_contiguous()


def test_scales_that_no_cast_would_make_are_used_as_they_are():
    """Published scales are no powers of two, and an amax need not reach the end of the format's range."""
    codes, scale = torch.full((128, 256), 2.0).to(FP8), torch.tensor([[0.3, 0.07]])
    layer = octavo.Linear(256, 128, bias=False, recipe="fp8-block", dtype=torch.float32)
    layer.weight = octavo.weight_from_codes(codes, scale.bfloat16(), "fp8-block", dtype=torch.float32, trainable=True)
    x = torch.ones(4, 256, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, torch.full((4, 128), 256.0 * scale.bfloat16().float().sum().item()))
    y.sum().backward()
    torch.testing.assert_close(x.grad[0, ::128], 256 * scale.bfloat16().float()[0])


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "nvfp4"])
def test_columns_are_made_of_the_rows(recipe):
    for shape in (SHAPES[0], SHAPES[2]):
        values, codes, scale, level2, _ = quantized(shape, recipe)
        weight = octavo.weight_from_codes(codes, scale, recipe, global_scale=level2, keep_columns=True)
        layer = layer_of(shape, recipe)
        with torch.no_grad():
            layer.weight.copy_(values)
        octavo.quantize_weights(layer, keep_columns=True)
        for name, tensor in layer.weight.tensors().items():
            assert torch.equal(tensor, weight.tensors()[name]), name
    with pytest.raises(UnsupportedConfig, match="keep_columns"):
        octavo.weight_from_codes(torch.zeros(8, 8, dtype=FP8), torch.ones(8, 1), "fp8-rowwise", keep_columns=True)


def test_a_weight_of_given_codes_is_trained_copied_saved_and_loaded():
    _, codes, scale, _, want = quantized((256, 384), "fp8-block")
    layer = octavo.Linear(384, 256, bias=False, recipe="fp8-block", dtype=torch.bfloat16)
    layer.weight = octavo.weight_from_codes(codes, scale, "fp8-block", trainable=True)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same(other.weight.dequantize().detach(), want)
    target = octavo.Linear(384, 256, bias=False, recipe="fp8-block", device="meta", dtype=torch.bfloat16)
    target.load_state_dict({"weight": layer.weight}, assign=True)
    assert target.weight.row_codes.data_ptr() == codes.data_ptr()
    assert_same(layer.state_dict()["weight"], want)
    optimizer = octavo.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(3, 384, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight.dequantize(), want)


WRONG = {
    "a recipe that quantizes nothing": (UnsupportedConfig, "bf16", {"recipe": "bf16"}),
    "values instead of codes": (UnsupportedDtype, "bfloat16", {"codes": torch.zeros(256, 384).bfloat16()}),
    "another format": (UnsupportedDtype, "e5m2", {"codes": torch.zeros(256, 384).to(torch.float8_e5m2)}),
    "a vector": (UnsupportedShape, r"\[N, K\]", {"codes": torch.zeros(256).to(FP8)}),
    "scales of other blocks": (UnsupportedShape, r"\(2, 3\)", {"scale": torch.ones(256, 1)}),
    "transposed scales": (UnsupportedShape, r"\(3, 2\)", {"scale": torch.ones(3, 2)}),
    "scales as bytes": (UnsupportedDtype, "uint8", {"scale": torch.ones(2, 3, dtype=torch.uint8)}),
    "a second level": (UnsupportedConfig, "global_scale", {"global_scale": torch.ones(1)}),
    "a dtype": (UnsupportedConfig, "dtype", {"dtype": torch.int8}),
}


@pytest.mark.parametrize(("error", "text", "wrong"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(error, text, wrong):
    given = {"codes": torch.zeros(256, 384).to(FP8), "scale": torch.ones(2, 3), "recipe": "fp8-block"} | wrong
    with pytest.raises(error, match=text):
        octavo.weight_from_codes(**given)


def test_a_layer_of_another_recipe_refuses_it():
    layer = octavo.Linear(384, 256, recipe="fp8-current", dtype=torch.bfloat16)
    layer.weight = octavo.weight_from_codes(torch.zeros(256, 384).to(FP8), torch.ones(2, 3), "fp8-block")
    with pytest.raises(UnsupportedConfig, match="codes of fp8-block"):
        layer(torch.ones(2, 384, dtype=torch.bfloat16))
