"""Weights of a GroupedLinear that are stored as codes: those of Linears, in either layout."""

import pytest
import torch

import octavo
from octavo.errors import Unsupported
from octavo.ops.grouped_parameters import stacked
from tests.support.experts import LAYOUTS, Alone, K, assert_steps, batch, experts, grid, sizes, step
from tests.support.linear_oracle import assert_same
from tests.support.recipe_traits import QUANTIZED


@grid(QUANTIZED, layout=LAYOUTS)
def test_weights_held_as_codes_are_those_of_linears(recipe, layout):
    layer = experts(recipe, **layout)
    alone = Alone(layer, recipe)
    for model in (layer, alone):
        octavo.quantize_weights(model)
    assert {type(p).__name__ for p in layer._weight_parts()} == {"QuantizedWeight"}
    for i in range(2):
        x, dy = batch(seed=i)
        assert_steps(step(layer, x, dy), alone.step(x, dy))
    layer.zero_grad()
    layer(x, sizes()).backward(dy)
    with pytest.raises((RuntimeError, Unsupported)):
        torch.optim.SGD(layer.parameters(), lr=0.1).step()


@grid(QUANTIZED, layout=LAYOUTS, to=LAYOUTS)
def test_weights_held_as_codes_travel_between_layouts_too(recipe, layout, to):
    source = experts(recipe, seed=3, **layout)
    octavo.quantize_weights(source)
    plain, codes = experts(recipe, seed=9, **to), experts(recipe, seed=9, **to)
    octavo.quantize_weights(codes)
    for target in (plain, codes):
        target.load_state_dict(source.state_dict(), strict=True)
    with torch.no_grad():
        want, x = source(batch()[0], sizes()), batch()[0]
        assert_same(codes(x, sizes()), want)
        octavo.quantize_weights(plain)
        assert_same(plain(x, sizes()), want)


def test_held_codes_of_groups_are_all_there_is():
    layer = experts("fp8-current", **LAYOUTS["per group"])
    octavo.quantize_weights(layer)
    for p in layer._weight_parts():
        p.requires_grad_(False)
    assert stacked(layer._weight_parts()).untyped_storage().nbytes() == 4
    octavo.revert(layer)
    assert not layer._codes.has_quantized_weight
    assert all(p.stride() == (K, 1) for p in layer._weight_parts())
