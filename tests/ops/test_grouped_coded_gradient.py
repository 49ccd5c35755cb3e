"""A GroupedLinear whose dy arrives as a GroupedTensor: `octavo.quant.GradientCodes`."""

import pytest
import torch

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.ops import linear_layer
from octavo.quant import GradientCodes, Tensorwise
from tests.support.coded_gradients import Combine
from tests.support.experts import DTYPES, ROWS, TURNED, G, N, batch, casts, experts, grid, sizes, stacked, step
from tests.support.linear_oracle import assert_same
from tests.support.recipe_traits import STATELESS, is_stochastic

__all__ = ["casts"]  # a fixture


def sent(recipe, dy, *, columns, splits=None):
    """dy as the layer would quantize it, from the seed that its first step draws."""
    gemms = octavo.recipe(recipe).linear()
    column = gemms.wgrad.left if columns else None
    draws = gemms.dgrad.left.is_stochastic or (column is not None and column.is_stochastic)
    seed = torch.tensor([7, 0]) if draws else None
    return gemms.dgrad.left.quantize_groups(dy, sizes() if splits is None else splits, seed=seed, column=column)


def coded_step(layer, x, codes, dtype=torch.float32):
    leaf, gradient_codes = x.clone().requires_grad_(), GradientCodes()
    y = layer(leaf, sizes(), dy_codes=gradient_codes)
    Combine.apply(y, gradient_codes, codes).backward(torch.zeros(y.shape, dtype=dtype))
    return {"dx": leaf.grad, "dw": stacked(layer), "db": stacked(layer, "bias")}


@grid(STATELESS, dtype=DTYPES, width=(N, 37))
def test_codes_of_both_orientations_have_the_bits_of_a_cast_in_backward(recipe, dtype, width, casts):
    layer, twin, other = (experts(recipe, n=width, dtype=dtype) for _ in range(3))
    x, dy = batch(n=width, dtype=dtype)
    codes = sent(recipe, dy, columns=True)
    found = coded_step(layer, x, codes, dtype)
    assert len(casts) == 2, casts  # x and the weight: not dy
    want = step(twin, x, dy)
    assert_same(found["dx"], want["dx"])
    assert_same(found["dw"], want["dw"])
    assert_same(found["db"], step(other, x, codes.dequantize())["db"])


@grid([recipe for recipe in STATELESS if not is_stochastic(recipe)])
def test_dw_of_row_codes_turns_them_around_or_casts_their_values(recipe):
    layer, twin, other = (experts(recipe) for _ in range(3))
    x, dy = batch()
    codes = sent(recipe, dy, columns=False)
    found, want = coded_step(layer, x, codes), step(twin, x, dy)
    assert_same(found["dx"], want["dx"])
    assert_same(found["dw"], want["dw"] if recipe in TURNED else step(other, x, codes.dequantize())["dw"])


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8-delayed", "nvfp4"])
def test_codes_of_another_quantizer_stand_for_their_values(recipe):
    layer, twin, (x, dy) = experts(recipe), experts(recipe), batch()
    codes = Tensorwise(pow2=True).quantize_groups(dy, sizes())
    found, want = coded_step(layer, x, codes), step(twin, x, codes.dequantize())
    for name, gradient in found.items():
        assert_same(gradient, want[name])


def test_dw_later_and_scaled_bias():
    layer, (x, dy) = experts("fp8-block", delay_wgrad_compute=True, scale_bias=True), batch()
    twin, gradient_codes, scales = experts("fp8-block"), GradientCodes(), torch.ones(ROWS, requires_grad=True)
    y = layer(x, sizes(), scales=scales, dy_codes=gradient_codes)
    Combine.apply(y, gradient_codes, sent("fp8-block", dy, columns=True)).sum().backward()
    assert stacked(layer) is None and scales.grad.any()
    layer.backward_dw()
    assert_same(stacked(layer), step(twin, x, dy)["dw"])


def test_x_and_dy_both_as_codes():
    layer, twin, (x, dy) = experts("fp8-block"), experts("fp8-block"), batch()
    leaf, gradient_codes = x.clone().requires_grad_(), GradientCodes()
    gemms = octavo.recipe("fp8-block").linear()
    q = gemms.fprop.left.quantize_groups(leaf, sizes(), column=gemms.wgrad.right)
    Combine.apply(
        layer(q, dy_codes=gradient_codes), gradient_codes, sent("fp8-block", dy, columns=True)
    ).sum().backward()
    want = step(twin, x, dy)
    assert_same(leaf.grad, want["dx"])
    assert_same(stacked(layer), want["dw"])


def test_an_empty_slot_casts_dy():
    layer, twin, (x, dy) = experts("fp8-block"), experts("fp8-block"), batch()
    layer(x, sizes(), dy_codes=GradientCodes()).backward(dy)
    assert_same(stacked(layer), step(twin, x, dy)["dw"])


def test_a_second_use_of_y_is_refused():
    layer, gradient_codes, (x, dy) = experts("fp8-block"), GradientCodes(), batch(poison=0.0)
    y = layer(x, sizes(), dy_codes=gradient_codes)
    loss = Combine.apply(y, gradient_codes, sent("fp8-block", dy, columns=False)).sum() + y.sum()
    with pytest.raises(UnsupportedConfig, match="y is used more than once"):
        loss.backward()


def test_codes_of_a_backward_that_failed_are_used_by_no_other():
    layer, gradient_codes, (x, dy) = experts("fp8-block"), GradientCodes(), batch(poison=0.0)
    gradient_codes.put(sent("fp8-block", dy, columns=False))
    y = layer(x, sizes(), dy_codes=gradient_codes)
    with pytest.raises(UnsupportedConfig, match=r"left from a backward that failed.*a new GradientCodes\(\)"):
        y.backward(dy)
    layer(x, sizes(), dy_codes=gradient_codes).backward(dy)
    assert_same(stacked(layer), step(experts("fp8-block"), x, dy)["dw"])


def test_the_stand_in_is_nan_for_everyone_else():
    layer, gradient_codes, (x, dy) = experts("fp8-block"), GradientCodes(), batch(poison=0.0)
    y = layer(x, sizes())
    Combine.apply(y, gradient_codes, sent("fp8-block", dy, columns=False)).sum().backward()
    assert stacked(layer)[0].isnan().all()


def test_codes_that_do_not_fit_are_refused():
    gradient_codes, (x, dy) = GradientCodes(), batch()
    with pytest.raises(UnsupportedDtype, match="got Tensor"):
        gradient_codes.put(dy)
    with pytest.raises(UnsupportedShape, match="those of columns"):
        gradient_codes.put(Tensorwise().quantize_groups(dy, sizes(), 0))
    for codes in (
        sent("fp8-block", dy, columns=False, splits=sizes((17, 0, 30))),
        sent("fp8-block", dy, columns=False, splits=sizes((30, 17))),
    ):
        with pytest.raises(UnsupportedShape, match="groups"):
            coded_step(experts("fp8-block"), x, codes)
    with pytest.raises(RuntimeError):
        coded_step(experts("fp8-block"), x, sent("fp8-block", dy[:, :24], columns=False))


def test_a_graph_refuses_codes_of_dy_or_runs_the_layer_outside(fresh_compiler):
    x, dy = batch()

    def run(x):
        return layer(x, sizes(), dy_codes=gradient_codes)

    gradient_codes, layer = GradientCodes(), experts("fp8-block")
    with pytest.raises(Exception, match="dy_codes passes codes to backward beside autograd"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    torch._dynamo.reset()
    layer, twin = experts("fp8-block", strict=False), experts("fp8-block")
    with pytest.warns(UserWarning, match="dy_codes"):
        y = torch.compile(run, backend="aot_eager")(x)
    Combine.apply(y, gradient_codes, sent("fp8-block", dy, columns=True)).sum().backward()
    assert_same(stacked(layer), step(twin, x, dy)["dw"])


def test_the_layer_makes_no_other_cast_of_dy(monkeypatch):
    layer, (x, dy) = experts("fp8-current"), batch()
    monkeypatch.setattr(linear_layer, "quantized_dy", None)
    found = coded_step(layer, x, sent("fp8-current", dy, columns=False))
    assert found["dw"].shape[0] == G and found["dx"][:30].any()


def test_the_class_in_place_of_a_slot_is_refused():
    layer = octavo.GroupedLinear(2, 32, 16, recipe="fp8-block")
    with pytest.raises(UnsupportedDtype, match=r"dy_codes is an octavo.quant.GradientCodes\(\), got GradientCodes"):
        layer(torch.ones(8, 32), torch.tensor([3, 5]), dy_codes=octavo.quant.GradientCodes)
