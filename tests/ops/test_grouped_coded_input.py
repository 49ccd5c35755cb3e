"""A GroupedLinear whose x is a GroupedTensor: multiplied as it is, in forward and in backward, eager and compiled."""

import pytest
import torch

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from tests.support.experts import (
    DTYPES,
    ROWS,
    SPLITS,
    TURNED,
    USED,
    G,
    K,
    N,
    batch,
    casts,
    experts,
    grid,
    sizes,
    stacked,
    stateless,
    step,
)
from tests.support.linear_oracle import assert_same
from tests.support.recipe_traits import STATELESS

__all__ = ["casts"]  # a fixture


def coded(recipe, x, *, columns):
    gemms = octavo.recipe(recipe).linear()
    column = gemms.wgrad.right if columns else None
    return gemms.fprop.left.quantize_groups(x, sizes(), column=column)


def coded_step(layer, recipe, x, dy, *, columns, splits=None, **flags):
    """As `step` gives it, of a call with codes of x."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(coded(recipe, leaf, columns=columns), splits, **flags)
    y.backward(dy)
    return {"y": y.detach(), "dx": leaf.grad, "dw": stacked(layer), "db": stacked(layer, "bias")}


def assert_equal_steps(found, want, *names):
    for name in names:
        assert_same(found[name], want[name])


# -- the bits ----------------------------------------------------------------------------------------------------------


@grid(STATELESS, dtype=DTYPES, width=(K, 37))
def test_codes_of_both_orientations_have_the_bits_of_the_rows_that_were_quantized(recipe, dtype, width, casts):
    layer, twin = experts(recipe, k=width, dtype=dtype), experts(recipe, k=width, dtype=dtype)
    x, dy = batch(k=width, dtype=dtype)
    found = coded_step(layer, recipe, x, dy, columns=True)
    assert all(shape[-1] == N + -N % 16 or shape[0] == G * N for shape in casts), casts  # dy and the weight: not x
    assert_equal_steps(found, step(twin, x, dy), "y", "dx", "dw", "db")


@grid(STATELESS, dtype=DTYPES, width=(K, 37))
def test_codes_of_rows_have_the_bits_of_the_rows_but_for_dw_which_takes_their_values(recipe, dtype, width):
    """In eight bits dw casts the values, in four it multiplies them as they are."""
    layer, twin = (experts(recipe, k=width, dtype=dtype) for _ in range(2))
    other = experts("nvfp4(wgrad='bf16')" if recipe == "nvfp4" else recipe, k=width, dtype=dtype)
    x, dy = batch(k=width, dtype=dtype)
    found = coded_step(layer, recipe, x, dy, columns=False)
    want = step(twin, x, dy)
    assert_equal_steps(found, want, "y", "dx", "db")
    values = coded(recipe, x, columns=False).dequantize()
    assert_same(found["dw"], want["dw"] if recipe in TURNED else step(other, values, dy)["dw"])


def test_four_bits_are_not_rounded_twice():
    """dw's error against that of x in high precision: a second cast to four bits would be half as large again."""
    layer, (x, dy) = experts("nvfp4"), batch()
    x = torch.randn_like(x)
    exact = step(experts("nvfp4(wgrad='bf16')"), x, dy)["dw"].double()
    found, cast = coded_step(layer, "nvfp4", x, dy, columns=False)["dw"], step(experts("nvfp4"), x, dy)["dw"]
    assert (found - exact).norm() < 0.8 * (cast - exact).norm()


@pytest.mark.parametrize("recipe", ["fp8-current(wgrad='bf16')", "fp8-block(wgrad='bf16')"])
def test_a_weight_gradient_in_high_precision_takes_the_values(recipe):
    layer, twin, (x, dy) = experts(recipe), experts(recipe), batch()
    for columns in (False, True):
        found = coded_step(layer, recipe.partition("(")[0], x, dy, columns=columns)
        values = coded(recipe, x, columns=False).dequantize()
        assert_equal_steps(found, step(twin, values, dy), "dw", "db")


def test_fp8_delayed_takes_codes_by_their_own_scale():
    layer, current, (x, dy) = experts("fp8-delayed"), experts("fp8-current"), batch()
    spec = octavo.recipe("fp8-delayed").linear().fprop.left
    assert spec == octavo.recipe("fp8-current").linear().fprop.left
    found = coded_step(layer, "fp8-delayed", x, dy, columns=False)
    want = coded_step(current, "fp8-current", x, dy, columns=False)
    assert_same(found["y"], want["y"])  # the first step measures the weight
    assert found["dw"].isfinite().all() and found["dx"][:USED].any()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_codes_of_another_quantizer_are_dequantized_and_keep_their_gradient(recipe):
    layer, twin, (x, dy) = experts(recipe), experts(recipe), batch()
    q = octavo.quant.Tensorwise().quantize_groups(x.requires_grad_(), sizes())
    layer(q).backward(dy)
    want = step(twin, q.detach().dequantize(), dy)
    assert_same(x.grad, want["dx"])
    assert_same(stacked(layer), want["dw"])


def test_two_layers_share_one_cast():
    first, second, (x, dy) = experts("fp8-block"), experts("fp8-block", seed=5), batch()
    q = coded("fp8-block", x.requires_grad_(), columns=True)
    (first(q) + second(q)).backward(dy)
    found, x.grad = x.grad, None
    (first(x, sizes()) + second(x, sizes())).backward(dy)
    assert_same(found, x.grad)


# -- in a graph --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "columns"), [("fp8-current", False), ("fp8-block", False), ("nvfp4", True), ("fp8-delayed", False)]
)
def test_a_graph_has_the_bits_of_eager_mode(recipe, columns, fresh_compiler):
    layer, twin, (x, dy) = experts(recipe), experts(recipe), batch()
    gemms = octavo.recipe(recipe).linear()
    rows, column = gemms.fprop.left, gemms.wgrad.right if columns else None

    def run(x, splits):
        return layer(rows.quantize_groups(x, splits, column=column))

    leaf = x.clone().requires_grad_()
    y = torch.compile(run, fullgraph=True, backend="aot_eager")(leaf, sizes())
    y.backward(dy)
    want = coded_step(twin, recipe, x, dy, columns=columns)
    found = {"y": y.detach(), "dx": leaf.grad, "dw": stacked(layer), "db": stacked(layer, "bias")}
    assert_equal_steps(found, want, *found)


@pytest.mark.parametrize(("recipe", "columns"), [("fp8-block", False), ("fp8-block", True)])
def test_codes_enter_a_graph_and_dw_is_left_to_later(recipe, columns, fresh_compiler):
    layer = experts(recipe, delay_wgrad_compute=True)
    twin, (x, dy) = experts(recipe), batch()
    leaf = x.clone().requires_grad_()
    run = torch.compile(lambda q: layer(q), fullgraph=True, backend="aot_eager")
    run(coded(recipe, leaf, columns=columns)).backward(dy)
    layer.backward_dw()
    want = coded_step(twin, recipe, x, dy, columns=columns)
    assert_equal_steps({"dx": leaf.grad, "dw": stacked(layer)}, want, "dx", "dw")


# -- options of the layer ----------------------------------------------------------------------------------------------


@stateless
def test_dw_later_into_main_grad_and_buffers_of_the_caller(recipe):
    layer = experts(recipe, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    twin, (x, dy) = experts(recipe), batch(poison=0.0)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    out, dgrad_out = torch.zeros(ROWS, N), torch.zeros(ROWS, K)
    found = coded_step(layer, recipe, x, dy, columns=False, out=out, dgrad_out=dgrad_out)
    layer.backward_dw()
    want = coded_step(twin, recipe, x, dy, columns=False)
    assert_equal_steps(found, want, "y", "db")
    assert_same(out, want["y"])
    assert_same(dgrad_out, want["dx"])
    assert_same(layer.weight.main_grad, want["dw"])


def test_the_first_operation_of_a_sequential_takes_codes():
    layer, (x, _) = experts("fp8-block"), batch()
    model = octavo.ops.Sequential(layer, torch.nn.SiLU())
    found = model(coded("fp8-block", x, columns=False), sizes())
    assert_same(found, torch.nn.functional.silu(layer(x, sizes())))


def test_frozen_weights_and_inference(casts):
    layer, (x, dy) = experts("fp8-block").requires_grad_(False), batch()
    leaf = x.clone().requires_grad_()
    layer(coded("fp8-block", leaf, columns=False)).backward(dy)
    assert leaf.grad[:USED].any() and stacked(layer) is None
    with torch.no_grad():
        assert_same(layer(coded("fp8-block", x, columns=False)), layer(x, sizes()))


# -- sizes and refusals ------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_codes():
    layer, (x, _) = experts("fp8-block"), batch()
    q, want = coded("fp8-block", x, columns=False), layer(x, sizes())
    for splits in (None, list(SPLITS), sizes(), sizes().int()):
        assert_same(layer(q, splits), want)
    with pytest.raises(UnsupportedShape, match=r"\[30, 0, 17\].*m_splits is \[17, 0, 30\].*Leave m_splits out"):
        layer(q, [17, 0, 30])
    with pytest.raises(UnsupportedShape, match="for each of the 3 groups"):
        layer(q, [30, 17])


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_sizes_are_those_of_the_codes_of_another_quantizer(recipe):
    layer, (x, _) = experts(recipe), batch()
    q = octavo.quant.Tensorwise().quantize_groups(x, sizes())
    assert_same(layer(q, sizes()), layer(q))
    with pytest.raises(UnsupportedShape, match=r"\[30, 0, 17\].*m_splits is \[17, 0, 30\].*Leave m_splits out"):
        layer(q, [17, 0, 30])
    other = octavo.quant.Tensorwise().quantize_groups(x, sizes((30, 17)))
    for splits in (None, sizes()):
        with pytest.raises(UnsupportedShape, match="quantized in 2 groups, and this GroupedLinear has 3 groups"):
            layer(other, splits)


def test_codes_without_groups_are_refused():
    layer, (x, _) = experts("fp8-block"), batch()
    q = octavo.quant.Block1D().quantize(x)
    for call in (layer, octavo.ops.Sequential(layer, torch.nn.SiLU())):
        with pytest.raises(UnsupportedDtype, match=r"GroupedLinear takes a tensor, got a QTensor.*quantize_groups"):
            call(q, sizes())


def test_what_no_codes_can_be_is_refused():
    layer, (x, _) = experts("fp8-block"), batch()
    spec = octavo.quant.Block1D()
    with pytest.raises(UnsupportedShape, match="got one of columns"):
        layer(spec.quantize_groups(x, sizes(), 0))
    with pytest.raises(UnsupportedShape, match="3 groups"):
        layer(spec.quantize_groups(x, sizes((30, 17))))
    with pytest.raises(UnsupportedShape, match=rf"\[\.\.\., {K}\]"):
        layer(spec.quantize_groups(x[:, :40], sizes()))
    q = coded("fp8-block", x, columns=False)
    with pytest.raises(UnsupportedConfig, match="codes of x"):
        layer(q, out=q.q.codes.view(torch.float32).flatten()[: ROWS * N].view(ROWS, N))
