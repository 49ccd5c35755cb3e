"""A conversion, a reversion or a state that is refused leaves every layer of the model as it was."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedShape
from tests.support.linear_oracle import make, spiky


def test_a_conversion_that_is_refused_changes_nothing():
    model = nn.Sequential(nn.Linear(48, 48), make("fp8-delayed", 48, 40))
    with pytest.raises(UnsupportedConfig, match="remembers amaxes"):
        octavo.convert(model, "fp8-delayed(history=4)", overwrite=True)
    assert type(model[0]) is nn.Linear
    assert str(model[1].recipe) == "fp8-delayed"
    rows = list(octavo.convert(model, "fp8-delayed(history=4)", strict=False, overwrite=True))
    assert [row.reason for row in rows] == ["converted", "cannot be converted"]
    assert [row.recipe for row in rows] == ["fp8-delayed(history=4)", "fp8-delayed"]  # it goes on in the one it has


def test_a_shared_layer_cannot_be_two_things():
    shared = nn.Linear(48, 48)
    model = nn.ModuleDict({"body": shared, "head": shared})
    with pytest.raises(UnsupportedConfig, match="same layer as body"):
        octavo.convert(model, "fp8-current", policy=lambda path, module: path != "head")
    assert type(shared) is nn.Linear
    assert len(octavo.convert(model, "fp8-current")) == 2


X, DY = spiky(24, 48, seed=3), spiky(24, 40, seed=4)


def test_gradients_that_wait_are_not_reverted_away():
    layer = make("fp8-current", delay_wgrad_compute=True)
    layer(X).backward(DY)
    with pytest.raises(UnsupportedConfig, match="1 weight gradient pending"):
        octavo.revert(layer)
    layer.backward_dw()
    octavo.revert(layer)
    assert type(layer) is nn.Linear
    assert layer.weight.grad is not None


def test_a_state_with_one_bad_tensor_changes_nothing():
    model = nn.Sequential(make("fp8-delayed"), make("fp8-delayed", 40, 8))
    source = copy.deepcopy(model)
    for layer in source:
        layer._hidden.scaling_forward_inverse_scale.fill_(2.0)
    bad = octavo.state_dict(source) | {"1.scaling.backward.encode": torch.zeros(3, 3)}
    with pytest.raises(UnsupportedShape, match="encode"):
        octavo.load_state_dict(model, bad)
    assert all(layer._hidden.scaling_forward_inverse_scale.tolist() == [1.0, 1.0] for layer in model)
