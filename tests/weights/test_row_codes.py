"""Weights that are row codes alone: their memory, and the dx that layers make of them."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo.quant.scale_blocks import are_transposed
from tests.support.linear_oracle import assert_same
from tests.support.recipe_traits import QUANTIZED

# bytes a weight; the scales of 1x32 blocks alone are 1/32, those of 1x16 blocks of 4-bit codes 1/16 of a code's byte
BYTES = {"mxfp8": 1.032, "nvfp4": 0.52}
SIZES = torch.tensor([20, 0, 28])


def linear(recipe, dtype=torch.bfloat16, **settings):
    torch.manual_seed(0)
    return octavo.Linear(256, 384, recipe=recipe, dtype=dtype, **settings)


def experts(recipe, dtype=torch.bfloat16, single=True):
    torch.manual_seed(0)
    return octavo.GroupedLinear(3, 256, 384, recipe=recipe, dtype=dtype, single_grouped_weight=single)


def weights(layer):
    return [p for name, p in layer.named_parameters() if "weight" in name]


def step(layer, x, *sizes):
    x = x.clone().requires_grad_()
    y = layer(x, *sizes)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    y.backward(dy)
    return y.detach(), x.grad, [p.grad for p in weights(layer)], dy


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("build", [linear, experts, lambda r: experts(r, single=False)], ids=["linear", "one", "each"])
def test_the_storage_is_one_byte_a_weight_and_two_with_columns(recipe, build):
    for keep_columns, copies in ((False, 1), (True, 2)):
        layer = build(recipe)
        octavo.quantize_weights(layer, trainable=True, keep_columns=keep_columns)
        found = sum(p.untyped_storage().nbytes() for p in weights(layer)) / sum(p.numel() for p in weights(layer))
        assert found <= copies * BYTES.get(recipe, 1.02)
        assert (weights(layer)[0].column_codes is None) == (not keep_columns)


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("build", [linear, experts])
def test_dx_is_that_of_a_cast_weight_or_of_the_values_of_its_codes(recipe, build):
    """Where columns are the transposed rows, nothing differs from a bf16 weight that is cast. Elsewhere dx is dy times
    the values: the weight was rounded once."""
    layer, cast = build(recipe), build(recipe)
    octavo.quantize_weights(layer, trainable=True)
    x = torch.randn(48, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    sizes = (SIZES,) if build is experts else ()
    y, dx, dw, dy = step(layer, x, *sizes)
    want = step(cast, x, *sizes)
    assert_same(y, want[0])
    for a, b in zip(dw, want[2], strict=True):
        assert_same(a, b)
    quant = octavo.recipe(recipe).linear()
    if are_transposed(quant.fprop.right, quant.dgrad.right):
        assert_same(dx, want[1])
        return
    values = weights(layer)[0].dequantize().detach()
    rows = dy.split(SIZES.tolist()) if sizes else [dy]
    exact = torch.cat([r.double() @ w.double() for r, w in zip(rows, values if sizes else [values], strict=True)])
    assert (dx.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-block", "mxfp8"])
def test_a_fused_mlp_and_experts_run_with_row_codes(recipe):
    torch.manual_seed(0)
    mlp = octavo.LayerNormMLP(64, 128, recipe=recipe, dtype=torch.bfloat16)
    moe = octavo.MoE(64, 96, 4, 2, recipe=recipe, dtype=torch.bfloat16)
    for model in (mlp, moe):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        want = copy.deepcopy(model)
        octavo.quantize_weights(model, trainable=True)
        z = x.detach().clone().requires_grad_()
        for call, leaf in ((model, x), (want, z)):
            call(leaf).float().square().sum().backward()
        error = (x.grad.float() - z.grad.float()).norm() / z.grad.float().norm()
        assert error <= (0.0 if recipe in ("fp8-current", "fp8-block") else 0.05)


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-rowwise", "nvfp4"])
def test_checkpointed_and_microbatched_steps_are_those_of_a_plain_call(recipe):
    found = []
    for how in ("plain", "checkpointed", "microbatches"):
        layer = linear(recipe)
        octavo.quantize_weights(layer, trainable=True)
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        if how == "checkpointed":
            y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        elif how == "microbatches":
            with octavo.microbatch(first=True):
                y = layer(x)
        else:
            y = layer(x)
        y.float().square().mean().backward()
        found.append((y.detach(), x.grad, layer.weight.grad))
    for others in found[1:]:
        for a, b in zip(found[0], others, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("build", [linear, experts])
def test_codes_are_copied_from_and_to_weights_with_columns(build):
    source, target = build("fp8-block"), build("fp8-block")
    octavo.quantize_weights(source)
    octavo.quantize_weights(target, keep_columns=True)
    want = build("fp8-block")
    octavo.quantize_weights(want, keep_columns=True)
    with torch.no_grad():
        weights(target)[0].zero_()
        weights(target)[0].copy_(weights(source)[0])
    for name, tensor in weights(want)[0].tensors().items():
        assert torch.equal(tensor, weights(target)[0].tensors()[name]), name
    with torch.no_grad():
        weights(source)[0].zero_()
        weights(source)[0].copy_(weights(target)[0])
    assert_same(weights(source)[0].dequantize(), weights(want)[0].dequantize())


def test_a_recipe_whose_dgrad_is_plain_needs_no_columns():
    layer = linear("fp8-block(dgrad='bf16')")
    octavo.quantize_weights(layer, trainable=True, keep_columns=True)
    assert layer.weight.column_codes is None
    assert step(layer, torch.randn(4, 256).bfloat16())[1].isfinite().all()


def test_layers_built_as_codes_keep_columns_where_they_are_asked_to():
    with octavo.quantized_init("fp8-block", keep_columns=True):
        both = octavo.Linear(64, 64)
    with octavo.quantized_init("fp8-block"):
        rows = octavo.Linear(64, 64)
    assert both.weight.column_codes is not None
    assert rows.weight.column_codes is None
    assert isinstance(rows.weight, nn.Parameter)


def test_explain_says_how_dx_is_made():
    notes = {}
    for recipe, keep_columns in (("fp8-block", False), ("mxfp8", False), ("mxfp8", True)):
        layer = linear(recipe)
        octavo.quantize_weights(layer, trainable=True, keep_columns=keep_columns)
        report = octavo.explain(layer, torch.randn(4, 256).bfloat16())
        notes[recipe, keep_columns] = report.layers[0].codes
        assert report.layers[0].codes in str(report)
    assert "transposes" in notes["fp8-block", False]
    assert "values" in notes["mxfp8", False]
    assert "by column" in notes["mxfp8", True]
