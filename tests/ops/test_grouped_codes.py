"""Groups quantized together, and a GroupedLinear whose input is such codes."""

import pytest
import torch

import octavo
from octavo.errors import Unsupported, UnsupportedShape
from octavo.quant.grouped import quantize_groups
from octavo.quant.groups import split
from tests.support.experts import DTYPES, LAYOUTS, ROWS, SPLITS, K, batch, experts, grid, sizes, slices, stacked
from tests.support.linear_oracle import assert_same, spiky
from tests.support.recipe_traits import STATELESS
from tests.support.same_tensors import assert_same as assert_same_codes


@pytest.mark.parametrize("recipe", STATELESS)
def test_every_group_has_the_codes_of_its_rows_alone(recipe):
    gemms, (x, _) = octavo.recipe(recipe).linear(), batch((65, 0, 130), 9)
    row, column = quantize_groups(x, gemms.fprop.left, gemms.wgrad.right, split(sizes((65, 0, 130)), len(x)))
    for part, a, b in zip(slices((65, 0, 130)), row.members(), column.members(), strict=True):
        assert_same_codes(a, gemms.fprop.left.quantize(x[part]))
        assert_same_codes(b, gemms.wgrad.right.quantize(x[part], 0))
        for whole, member in ((row, a), (column, b)):
            assert member.codes.untyped_storage().data_ptr() == whole.q.codes.untyped_storage().data_ptr()


@grid(STATELESS, dtype=DTYPES)
def test_groups_dequantize_to_what_each_dequantizes_to(recipe, dtype):
    gemms, (x, _) = octavo.recipe(recipe).linear(), batch((65, 0, 130), 9, dtype=dtype)
    for found, spec, axis in zip(
        quantize_groups(x, gemms.fprop.left, gemms.wgrad.right, split(sizes((65, 0, 130)), len(x))),
        (gemms.fprop.left, gemms.wgrad.right),
        (-1, 0),
        strict=True,
    ):
        values = found.dequantize()
        assert (values.dtype, values.shape) == (dtype, x.shape)
        for part in slices((65, 0, 130)):
            want = spec.quantize(x[part], axis).dequantize()
            assert_same(values[part], want if axis else want.T)
        assert not values[195:].any()


@grid(STATELESS, layout=LAYOUTS)
def test_an_input_of_codes_is_the_values_they_stand_for(recipe, layout):
    layer, (x, dy) = experts(recipe, **layout), batch()
    twin = experts("nvfp4(wgrad='bf16')" if recipe == "nvfp4" else recipe, **layout)  # four bits are not cast twice
    q = quantize_groups(x, octavo.recipe(recipe).linear().fprop.left, None, split(sizes(), ROWS))[0]
    values = q.dequantize()
    with torch.no_grad():
        assert_same(layer(q, sizes()), twin(values, sizes()))
    y, want = layer(q, sizes()), twin(values, sizes())
    assert_same(y.detach(), want.detach())
    y.backward(dy)
    want.backward(dy)
    assert_same(stacked(layer), stacked(twin))
    assert_same(stacked(layer, "bias"), stacked(twin, "bias"))


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
def test_codes_of_the_wrong_shape_are_refused(recipe):
    layer, spec = experts(recipe), octavo.recipe(recipe).linear().fprop.left
    for rows, columns in ((ROWS, K + 16), (ROWS, K - 1)):
        q = quantize_groups(spiky(rows, columns), spec, None, split(sizes(), rows))[0]
        with pytest.raises(UnsupportedShape):
            layer(q, sizes())


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
def test_codes_of_other_groups_or_settings_are_refused_or_stand_for_their_values(recipe):
    layer, (x, _) = experts(recipe), batch()
    spec, other = (octavo.recipe(name).linear().fprop.left for name in (recipe, "fp8-rowwise"))
    for quantizer, splits in ((spec, (30, 17)), (spec, (7, 7, 33)), (other, SPLITS)):
        q = quantize_groups(x, quantizer, None, split(sizes(splits), ROWS))[0]
        try:
            found = layer(q, sizes())
        except Unsupported:
            continue
        assert_same(found.detach(), layer(q.dequantize(), sizes()).detach())
