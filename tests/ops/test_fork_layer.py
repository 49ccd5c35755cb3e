"""The contract of the fork, without a chain around it."""

import pytest
import torch

from octavo.ops.fork_layer import Config, Inputs, layer
from tests.support.contract_checks import check_backward, check_forward, wants


@pytest.mark.parametrize("grads", ["", "dx"])
@pytest.mark.parametrize("leads", [False, True])
def test_forward_and_backward(leads, grads):
    config, inputs = Config(leads, **wants(grads)), Inputs(torch.randn(3, 8))
    made = check_forward(layer, config, inputs)
    assert layer.forks and made.outputs[0] is inputs.x
    if grads:
        check_backward(layer, config, inputs, made, (torch.randn(3, 8), torch.randn(3, 8)))


def test_only_a_leading_fork_returns_a_token_for_x():
    x = torch.randn(3, 8)
    assert layer.forward(Config(), Inputs(x)).outputs[1] is x
    token = layer.forward(Config(leads=True), Inputs(x)).outputs[1]
    assert token.shape == x.shape and token.untyped_storage().nbytes() == x.element_size()


def test_dx_is_the_sum_of_the_gradients_that_there_are():
    config = Config(**wants("dx"))
    first, second = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.equal(layer.backward(config, (), (), (first, second))[0], first + second)
    assert layer.backward(config, (), (), (first, None))[0] is first
    assert layer.backward(config, (), (), (None, second))[0] is second
    assert layer.backward(config, (), (), (None, None)) == (None,)
