"""The contract of the cast by itself, without a module around it."""

import pytest
import torch

from octavo.formats import E4M3, E5M2
from octavo.ops.rounding_layer import Config, Inputs, layer
from octavo.quant import MX, Rowwise, Tensorwise
from octavo.recipes import recipe
from tests.support.contract_checks import check_backward, check_forward, wants

SPECS = [None, Tensorwise(E4M3), Rowwise(E4M3), MX(E4M3)]


@pytest.mark.parametrize("grads", ["", "dx"])
@pytest.mark.parametrize("back", [None, Tensorwise(E5M2)], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_rounding_layer_keeps_the_contract(spec, back, grads):
    config, inputs = Config(spec, back, **wants(grads)), Inputs(torch.randn(4, 64))
    made = check_forward(layer, config, inputs)
    assert made.outputs[0].stride() == (0, 0)
    if grads:
        check_backward(layer, config, inputs, made, (torch.randn(4, 64),))


def test_extras_are_the_codes_of_x():
    x = torch.randn(4, 64)
    parts = layer.forward(Config(MX(E4M3)), Inputs(x)).auxiliary
    for mine, other in zip(parts, MX(E4M3).quantize(x).tensors(), strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def test_dy_is_rounded_or_passed():
    dy = torch.randn(4, 64)
    assert layer.backward(Config(**wants("dx")), (None,), (), (dy,))[0] is dy
    rounded = layer.backward(Config(back=Tensorwise(E5M2), **wants("dx")), (None,), (), (dy,))[0]
    assert torch.equal(rounded, Tensorwise(E5M2).quantize(dy).dequantize())


def test_stochastic_rounding_draws_by_the_saved_seed():
    back = recipe("nvfp4").linear().dgrad.left
    assert back.is_stochastic
    config, inputs = Config(back=back, **wants("dx")), Inputs(torch.randn(16, 64), torch.tensor([5, 1]))
    saved = layer.save(config, inputs, layer.forward(config, inputs))
    assert saved.seed is inputs.seed
    dy = torch.randn(16, 64)
    first, again = (layer.backward(config, saved, (), (dy,))[0] for _ in range(2))
    other = layer.backward(config, (torch.tensor([5, 2]),), (), (dy,))[0]
    assert torch.equal(first, again) and not torch.equal(first, other)
