"""Settings of blocks and mixtures that are assigned after construction: the next call has them, or a sentence says
why not."""

import copy

import pytest
import torch

import octavo
from octavo.errors import UnsupportedConfig


def routed(tokens=8, experts=4):
    x = torch.randn(tokens, 32, requires_grad=True)
    return x, torch.randint(experts, (tokens, 2)), torch.rand(tokens, 2)


BLOCKS = {
    "LayerNormLinear": lambda recipe: octavo.LayerNormLinear(32, 32, recipe=recipe),
    "LayerNormMLP": lambda recipe: octavo.LayerNormMLP(32, 48, recipe=recipe),
    "MoE": lambda recipe: octavo.MoE(32, 48, 4, 2, shared_ffn_size=16, recipe=recipe),
    "Experts": lambda recipe: octavo.moe.Experts(4, 32, 48, recipe=recipe),
}


@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_a_recipe_that_a_block_is_assigned_is_that_of_its_layers(make):
    old, new = make("bf16"), make("mxfp8")
    new.load_state_dict(old.state_dict())
    given = routed() if isinstance(old, octavo.moe.Experts) else routed()[:1]
    before = old(*given)
    old.recipe = "mxfp8"
    assert old.recipe == octavo.recipe("mxfp8")
    assert torch.equal(old(*given), new(*given)) and not torch.equal(old(*given), before)


def test_a_recipe_that_one_layer_refuses_changes_none():
    mlp = octavo.LayerNormMLP(32, 48, recipe="fp8-current")
    octavo.quantize_weights(mlp.fc2)
    with pytest.raises(UnsupportedConfig, match="stored as codes"):
        mlp.recipe = "mxfp8"
    with pytest.raises(UnsupportedConfig, match="no-such"):
        mlp.recipe = "no-such"
    assert mlp.recipe == octavo.recipe("fp8-current") == mlp.fc1.recipe


def test_a_block_of_two_recipes_has_none():
    mlp = octavo.LayerNormMLP(32, 48, recipe="fp8-current")
    mlp.fc2.recipe = "mxfp8"
    assert not hasattr(mlp, "recipe")


@pytest.mark.parametrize("mixture", [False, True])
def test_an_assigned_storage_of_fc1s_output_holds_from_the_next_forward_on(mixture):
    def make(storage):
        torch.manual_seed(0)
        if mixture:
            return octavo.MoE(32, 48, 4, 2, recipe="fp8-block", fc1_output_storage=storage)
        return octavo.moe.Experts(4, 32, 48, recipe="fp8-block", fc1_output_storage=storage)

    old, new = make("unquantized"), make("fp8")
    given = routed(16)[:1] if mixture else routed(16)

    def gradient(module):
        return torch.autograd.grad(module(*given).square().sum(), given[0])[0]

    before = gradient(old)
    old.fc1_output_storage = "fp8"
    assert old.fc1_output_storage == "fp8" == copy.deepcopy(old).fc1_output_storage
    assert torch.equal(gradient(old), gradient(new)) and not torch.equal(gradient(old), before)
    old.fc1_output_storage = "unquantized"
    assert torch.equal(gradient(old), before)
    with pytest.raises(UnsupportedConfig, match="no such thing"):
        old.fc1_output_storage = "no such thing"


def test_a_storage_is_refused_where_a_dispatcher_takes_its_place():
    moe = octavo.MoE(32, 48, 4, 2, dispatcher=octavo.moe.LocalDispatch())
    with pytest.raises(UnsupportedConfig, match="dispatcher takes the place"):
        moe.fc1_output_storage = "fp8"


def test_a_dispatcher_that_is_set_or_cleared_is_refused_with_the_way_to_one():
    x = torch.randn(8, 32)
    moe = octavo.MoE(32, 48, 4, 2, recipe="fp8-block")
    moe.dispatcher = octavo.moe.LocalDispatch(capacity=64)
    with pytest.raises(UnsupportedConfig, match=r"was set to LocalDispatch, .*load_state_dict"):
        moe(x)
    moe.dispatcher = None
    y = moe(x)
    other = octavo.MoE(32, 48, 4, 2, recipe="fp8-block", dispatcher=octavo.moe.LocalDispatch(capacity=64))
    other.load_state_dict(moe.state_dict())
    assert torch.allclose(other(x), y, atol=1e-2)
    other.dispatcher = None
    with pytest.raises(UnsupportedConfig, match=r"was set to None, .*load_state_dict"):
        other(x)


def test_one_dispatcher_takes_the_place_of_another():
    moe = octavo.MoE(32, 48, 4, 2, recipe="fp8-block", dispatcher=octavo.moe.LocalDispatch(capacity=64))
    moe.dispatcher = octavo.moe.LocalDispatch(capacity=4)
    moe(torch.randn(8, 32))
    assert moe.overflow() > 0
