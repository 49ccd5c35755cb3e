"""Layers whose weight was replaced by one of another shape, or by None."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedDtype


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "nvfp4"])
def test_a_cache_is_made_anew_for_a_weight_of_another_shape(recipe):
    layer, x = octavo.Linear(64, 32, bias=False, recipe=recipe), torch.randn(4, 64)
    layer(x, is_first_microbatch=True)
    layer.weight = nn.Parameter(torch.randn(48, 64))
    octavo.refresh_weights(layer)
    assert torch.equal(layer(x, is_first_microbatch=False), layer(x))
    layer.weight = nn.Parameter(torch.randn(16, 64))
    assert torch.equal(layer(x, is_first_microbatch=True), layer(x))


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_a_weight_that_is_none_is_refused(kind):
    if kind == "Linear":
        layer, given = octavo.Linear(64, 32, recipe="fp8-block"), (torch.randn(4, 64),)
    else:
        layer, given = octavo.GroupedLinear(2, 64, 32, recipe="fp8-block"), (torch.randn(4, 64), torch.tensor([1, 3]))
    layer(*given, is_first_microbatch=True)
    layer.weight = None
    with pytest.raises(UnsupportedDtype, match=f"{kind} takes a tensor as its weight, got None. Give the layer"):
        layer(*given)
    with pytest.raises(UnsupportedConfig, match=rf"the weight of {kind}\(.* again, and that is None. Give the layer"):
        octavo.refresh_weights(layer)
