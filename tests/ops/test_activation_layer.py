"""The contract of the elementwise layer, without a module around it."""

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.activation import ACTIVATIONS
from octavo.ops.activation_layer import Config, Inputs, layer, shape_of_y
from tests.support.contract_checks import check_backward, check_forward, wants

LEAD, WIDTH = (3, 5), 16


def case(name, grads, drop=0.0):
    """A config, and inputs that fit it, with scales and a bias."""
    config = Config(name, drop=drop, scales_dtype="float32", bias_dtype="float32", **wants(grads))
    seed = torch.tensor([7, 1]) if drop else None
    return config, Inputs(torch.randn(*LEAD, WIDTH), torch.rand(LEAD) + 0.5, torch.randn(WIDTH), seed)


@pytest.mark.parametrize("grads", ["", "dx", "ds", "db", "dx ds db"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_activation_layer_keeps_the_contract(name, grads):
    config, inputs = case(name, grads, drop=0.25)
    made = check_forward(layer, config, inputs)
    dy = torch.randn(shape_of_y(config, (*LEAD, WIDTH)))
    check_backward(layer, config, inputs, made, (dy,))


def test_gradients_are_those_of_torch():
    config, inputs = case("silu", "dx ds db")
    x, scales, bias = (t.clone().requires_grad_() for t in inputs[:3])
    y, dy = F.silu(x + bias) * scales[..., None], torch.randn(*LEAD, WIDTH)
    made = layer.forward(config, inputs)
    grads = layer.backward(config, layer.save(config, inputs, made), (), (dy,))
    torch.testing.assert_close(made.outputs[0], y)
    torch.testing.assert_close(grads[:3], torch.autograd.grad(y, (x, scales, bias), dy))


def test_a_linear_function_keeps_no_x():
    config, inputs = case("linear", "dx db")
    saved = layer.save(config, inputs, layer.forward(config, inputs))
    assert saved.x is None and saved.bias is None and saved.scales is inputs.scales


def test_dropout_drops_the_same_elements_in_backward():
    config = Config("linear", drop=0.5, **wants("dx"))
    inputs = Inputs(torch.ones(4, 64), seed=torch.tensor([3, 9]))
    made = layer.forward(config, inputs)
    (dx, *_) = layer.backward(config, layer.save(config, inputs, made), (), (torch.ones(4, 64),))
    assert torch.equal(dx, made.outputs[0])
    assert set(dx.unique().tolist()) == {0.0, 2.0}
