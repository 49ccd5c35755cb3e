"""The contract of the sum, without a module around it."""

import pytest
import torch

from octavo.ops.add_layer import Config, Inputs, layer
from octavo.runtime.contract import DTYPES
from tests.support.contract_checks import check_backward, check_forward, wants


@pytest.mark.parametrize("extra", ["float32", "bfloat16"])
@pytest.mark.parametrize("grads", ["", "dx", "dextra", "dx dextra"])
def test_the_add_layer_keeps_the_contract(grads, extra):
    config = Config("bfloat16", extra, **wants(grads))
    x, other = torch.randn(3, 8).bfloat16(), torch.randn(3, 8, dtype=DTYPES[extra])
    inputs = Inputs(x, other)
    made = check_forward(layer, config, inputs)
    assert torch.equal(made.outputs[0], (x.float() + other.float()).bfloat16())
    check_backward(layer, config, inputs, made, (torch.randn(3, 8).bfloat16(),))


def test_both_gradients_are_dy_itself_in_one_dtype():
    config = Config(**wants("dx dextra"))
    dy = torch.randn(3, 8)
    assert layer.gradient_aliases(config) == {0: -1, 1: -1}
    assert all(g is dy for g in layer.backward(config, (), (), (dy,)))


def test_the_extra_gets_dy_in_its_own_dtype():
    config = Config("bfloat16", "float32", **wants("dx dextra"))
    dy = torch.randn(3, 8).bfloat16()
    assert layer.gradient_aliases(config) == {0: -1}
    dx, extra = layer.backward(config, (), (), (dy,))
    assert dx is dy and torch.equal(extra, dy.float())


def test_y_is_contiguous_whatever_x_is():
    x = torch.randn(8, 3).T
    inputs = Inputs(x, torch.randn(8, 3).T)
    y = layer.forward(Config(), inputs).outputs[0]
    assert y.is_contiguous() and torch.equal(y, x + inputs.extra)
