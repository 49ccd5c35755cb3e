"""Bytes that a layer keeps for backward: the codes that backward multiplies, not the activation they came from."""

import pytest
import torch

import octavo
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import QUANTIZED, make, spiky
from tests.support.saved_bytes import Saved

M, N, K = 256, 128, 128
# x held for the weight gradient, in bytes: codes, then scales
X_COLUMN = {
    "fp8-delayed": M * K + 4,
    "fp8-current": M * K + 4,
    "fp8-rowwise": M * K + 4 * K,
    "fp8-block": M * K + 4 * (M // 128) * K,
    "mxfp8": M * K + (M // 32) * K,
    "nvfp4": M * K // 2 + (M // 16) * K + 4,
}
X_ROW = {
    "fp8-delayed": M * K + 4,
    "fp8-current": M * K + 4,
    "fp8-rowwise": M * K + 4 * M,
    "fp8-block": M * K + 4 * (K // 128) * M,
    "mxfp8": M * K + (K // 32) * M,
    "nvfp4": M * K // 2 + (K // 16) * M + 4,
}
W_COLUMN = {
    "fp8-delayed": N * K + 4,
    "fp8-current": N * K + 4,
    "fp8-rowwise": N * K + 4 * K,
    "fp8-block": N * K + 4 * (N // 128) * (K // 128),
    "mxfp8": N * K + (N // 32) * K,
    "nvfp4": N * K // 2 + (N // 16) * (K // 16) + 4,
}
SMALL = 64  # a seed, a scale, a flag


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
    x, w = X_COLUMN[recipe], W_COLUMN[recipe]
    assert_bytes(saved(recipe, dtype=dtype, lead=lead), x, x + w)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_cached_weight_is_not_saved_again(recipe):
    assert_bytes(saved(recipe, first=False), X_COLUMN[recipe])


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_frozen_weight_keeps_nothing_of_x(recipe):
    assert_bytes(saved(recipe, w_grad=False), 0, W_COLUMN[recipe])


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_frozen_input_keeps_nothing_of_w(recipe):
    assert_bytes(saved(recipe, x_grad=False), X_COLUMN[recipe])


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
    assert_bytes(saved(f"{recipe}({override})"), x, x + W_COLUMN[recipe])


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_dequantized_backward_keeps_the_forward_codes(recipe):
    spec = octavo.recipe(recipe).linear().fprop.right
    w_row = spec.quantize(torch.zeros(N, K)).nbytes()
    assert_bytes(saved(f"{recipe}(backward='dequantized')"), X_ROW[recipe], X_ROW[recipe] + w_row)


@pytest.mark.parametrize("recipe", ["fp8-block(backward='dequantized')", "nvfp4(backward='dequantized')"])
def test_a_dequantized_backward_keeps_codes_and_not_the_weight(recipe):
    layer, kept = make(recipe, 40, 40), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(spiky(24, 40).requires_grad_())
    assert all(t.untyped_storage().data_ptr() != layer.weight.untyped_storage().data_ptr() for t in kept)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_the_table_is_what_the_quantizers_make(recipe):
    """The sums above, against the real thing."""
    quant = octavo.recipe(recipe).linear()
    seed = {"seed": torch.tensor([1, 1])}
    x, w = torch.zeros(M, K), torch.zeros(N, K)
    for want, spec, tensor, axis in (
        (X_COLUMN, quant.wgrad.right, x, 0),
        (X_ROW, quant.fprop.left, x, -1),
        (W_COLUMN, quant.dgrad.right, w, 0),
    ):
        assert spec.quantize(tensor, axis, **(seed if spec.is_stochastic else {})).nbytes() == want[recipe]


def test_eight_bits_are_half_of_bfloat16_and_four_a_quarter():
    whole = 2 * M * K
    for recipe in QUANTIZED:
        assert X_COLUMN[recipe] / whole < (0.33 if recipe == "nvfp4" else 0.54)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_inference_keeps_nothing(recipe):
    layer = make(recipe, K, N)
    with Saved(layer) as found, torch.no_grad():
        layer(spiky(M, K))
    assert not found.storages
