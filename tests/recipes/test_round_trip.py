"""Recipes read back from their strings make the same codes, and hold nothing that a string cannot."""

import pytest
import torch

import octavo
import octavo.quant as Q
from octavo import values
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import OTHERS, assert_same, spiky
from tests.support.same_tensors import assert_same as assert_same_codes


def quantized_all(spec, x, seed):
    given = {"seed": seed} if spec.is_stochastic else {}
    return [spec.quantize(x, axis, **given) for axis in (-1, 0)]


@pytest.mark.parametrize("recipe", [*SHIPPED, *OTHERS])
def test_a_recipe_read_back_from_its_string_is_equal_and_quantizes_the_same(recipe):
    """Derived state, such as the signs of nvfp4's turn, comes back with it."""
    recipe = octavo.recipe(recipe)
    again = octavo.recipe(str(recipe))
    assert again == recipe and hash(again) == hash(recipe) and str(again) == str(recipe)
    x, seed = spiky(21, 48), torch.tensor([7, 3])
    one, two = recipe.linear(), again.linear()
    assert one == two
    for gemm in ("fprop", "dgrad", "wgrad"):
        for side in ("left", "right"):
            a, b = (getattr(getattr(q, gemm), side) for q in (one, two))
            if a is not None:
                c = values.parse(a.key)
                assert a == b == c and hash(a) == hash(b) == hash(c)
                for found, want in zip(quantized_all(c, x, seed), quantized_all(a, x, seed), strict=True):
                    assert_same_codes(found, want)
                    assert_same(found.dequantize(), want.dequantize())


def test_a_live_process_group_in_a_value_is_refused():
    class Group:
        pass

    for make_value in (octavo.recipes.Block, Q.MX, Q.NVFP4):
        with pytest.raises((TypeError, UnsupportedConfig)):
            make_value(group=Group())
    with pytest.raises(UnsupportedConfig, match="scale"):
        octavo.recipes.Block(scale=Group())
