"""Bytes that a layer keeps for backward: the codes that backward multiplies, not the activation they came from."""

import pytest
import torch

import octavo
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import make, spiky
from tests.support.recipe_traits import QUANTIZED, stored_bytes
from tests.support.saved_bytes import Saved

M, N, K = 256, 128, 128
# bytes of codes and scales: x for wgrad, x for fprop, w for dgrad
SHIPPED_BYTES = {
    "fp8-delayed": (32772, 32772, 16388),
    "fp8-current": (32772, 32772, 16388),
    "fp8-rowwise": (33280, 33792, 16896),
    "fp8-block": (33792, 33792, 16388),
    "mxfp8": (33792, 33792, 16896),
    "nvfp4": (18436, 18436, 8260),
}
SMALL = 64  # a seed, a scale, a flag


def x_column(recipe):
    """x kept for the weight gradient."""
    return stored_bytes(octavo.recipe(recipe).linear().wgrad.right, K, M)


def x_row(recipe):
    return stored_bytes(octavo.recipe(recipe).linear().fprop.left, M, K)


def w_column(recipe):
    return stored_bytes(octavo.recipe(recipe).linear().dgrad.right, K, N)


def saved(recipe, *, x_grad=True, w_grad=True, dtype=torch.bfloat16, first=None, lead=(M,)):
    layer = make(recipe, K, N, dtype=dtype)
    layer.weight.requires_grad_(w_grad)
    x = spiky(*lead, K, dtype=dtype).requires_grad_(x_grad)
    if first is not None:
        layer(x, is_first_microbatch=True)
    with Saved(layer) as found:
        y = layer(x, is_first_microbatch=first)
    assert y.requires_grad
    y.sum().backward()  # and they are enough
    return found.nbytes


def assert_bytes(found, *choices):
    assert any(want <= found <= want + SMALL for want in choices), f"{found} bytes, expected {choices}"


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lead", [(M,), (4, M // 4)], ids=str)
def test_codes_of_x_are_saved_and_not_x(recipe, dtype, lead):
    """With the column of w made in forward, or made again from the parameter in backward."""
    x, w = x_column(recipe), w_column(recipe)
    assert_bytes(saved(recipe, dtype=dtype, lead=lead), x, x + w)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_cached_weight_is_not_saved_again(recipe):
    assert_bytes(saved(recipe, first=False), x_column(recipe))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_frozen_weight_keeps_nothing_of_x(recipe):
    assert_bytes(saved(recipe, w_grad=False), 0, w_column(recipe))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_frozen_input_keeps_nothing_of_w(recipe):
    assert_bytes(saved(recipe, x_grad=False), x_column(recipe))


@pytest.mark.parametrize("recipe", SHIPPED)
def test_training_the_bias_alone_keeps_nothing(recipe):
    assert_bytes(saved(recipe, x_grad=False, w_grad=False), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bf16_keeps_x_itself(dtype):
    assert_bytes(saved("bf16", dtype=dtype), M * K * dtype.itemsize)


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("override", ["wgrad='bf16'", "backward='high_precision'"])
def test_a_high_precision_wgrad_keeps_x_itself_once(recipe, override):
    x = 2 * M * K
    assert_bytes(saved(f"{recipe}({override})"), x, x + w_column(recipe))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_dequantized_backward_keeps_the_forward_codes(recipe):
    spec = octavo.recipe(recipe).linear().fprop.right
    w_row = spec.quantize(torch.zeros(N, K)).nbytes()
    assert_bytes(saved(f"{recipe}(backward='dequantized')"), x_row(recipe), x_row(recipe) + w_row)


@pytest.mark.parametrize("recipe", ["fp8-block(backward='dequantized')", "nvfp4(backward='dequantized')"])
def test_a_dequantized_backward_keeps_codes_and_not_the_weight(recipe):
    layer, kept = make(recipe, 40, 40), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(spiky(24, 40).requires_grad_())
    assert all(t.untyped_storage().data_ptr() != layer.weight.untyped_storage().data_ptr() for t in kept)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_the_bytes_of_a_block_are_what_the_quantizers_make(recipe):
    quant = octavo.recipe(recipe).linear()
    seed = {"seed": torch.tensor([1, 1])}
    x, w = torch.zeros(M, K), torch.zeros(N, K)
    for want, spec, tensor, axis in (
        (x_column(recipe), quant.wgrad.right, x, 0),
        (x_row(recipe), quant.fprop.left, x, -1),
        (w_column(recipe), quant.dgrad.right, w, 0),
    ):
        assert spec.quantize(tensor, axis, **(seed if spec.is_stochastic else {})).nbytes() == want


@pytest.mark.parametrize("recipe", SHIPPED_BYTES)
def test_the_bytes_of_a_recipe(recipe):
    assert (x_column(recipe), x_row(recipe), w_column(recipe)) == SHIPPED_BYTES[recipe]


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_eight_bits_are_half_of_bfloat16_and_four_a_quarter(recipe):
    packed = octavo.recipe(recipe).linear().wgrad.right.fmt.packed
    assert x_column(recipe) / (2 * M * K) < {1: 0.54, 2: 0.33}[packed]


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_inference_keeps_nothing(recipe):
    layer = make(recipe, K, N)
    with Saved(layer) as found, torch.no_grad():
        layer(spiky(M, K))
    assert not found.storages
