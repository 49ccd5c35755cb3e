"""The contract of the norm layer, without a module around it."""

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.norm_layer import KINDS, Config, Inputs, layer
from tests.support.contract_checks import check_backward, check_forward, wants

SHAPE = (3, 4, 10)


def case(kind, grads, dims=1, weight="float32", bias="float32"):
    """A config, and inputs that fit it."""
    row = SHAPE[-dims:]
    config = Config(kind, dims=dims, weight_dtype=weight, bias_dtype=bias, **wants(grads))
    inputs = Inputs(torch.randn(SHAPE), torch.randn(row) if weight else None, torch.randn(row) if bias else None)
    return config, inputs


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("grads", ["", "dx", "dw", "db", "dx dw", "dx dw db"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_layer_keeps_the_contract(kind, grads, dims):
    config, inputs = case(kind, grads, dims)
    check_backward(layer, config, inputs, check_forward(layer, config, inputs), (torch.randn(SHAPE),))


def test_gradients_are_those_of_torch():
    config, inputs = case("layer", "dx dw db")
    twins = [t.clone().requires_grad_() for t in inputs]
    y, dy = F.layer_norm(twins[0], SHAPE[-1:], *twins[1:], eps=config.eps), torch.randn(SHAPE)
    made = layer.forward(config, inputs)
    grads = layer.backward(config, layer.save(config, inputs, made), (), (dy,))
    torch.testing.assert_close(made.outputs[0], y)
    torch.testing.assert_close(grads, torch.autograd.grad(y, twins, dy))


def test_a_norm_without_weight_keeps_x_and_its_statistics():
    config, inputs = case("rms", "dx", weight="", bias="")
    saved = layer.save(config, inputs, layer.forward(config, inputs))
    assert saved.x is inputs.x and saved.weight is None and saved.mean is None
    assert saved.rstd.shape == (12,)


@pytest.mark.parametrize("grads", ["db", ""])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_for_the_gradient_of_the_bias(kind, grads):
    config, inputs = case(kind, grads)
    assert all(t is None for t in layer.save(config, inputs, layer.forward(config, inputs)))


def test_without_dy_there_is_no_gradient():
    config, inputs = case("layer", "dx dw db")
    saved = layer.save(config, inputs, layer.forward(config, inputs))
    assert layer.backward(config, saved, (), (None,)) == (None, None, None)
