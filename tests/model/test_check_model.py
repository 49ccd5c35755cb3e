"""Functions over a model refuse anything else, with its type and the way out."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedDtype

LAYER = octavo.Linear(4, 4, recipe="fp8-delayed")
FUNCTIONS = {
    "step": UnsupportedDtype,
    "refresh_weights": UnsupportedDtype,
    "quantize_weights": UnsupportedDtype,
    "state_dict": UnsupportedDtype,
    "revert": UnsupportedConfig,
}
REFUSED = [
    ([LAYER, LAYER], "list. Call it for each module, or pass nn.ModuleList(modules)."),
    ([], "list. Pass the module that holds the layers."),
    ("model", "the string 'model'. Pass the module that holds the layers."),
    (torch.optim.SGD(LAYER.parameters(), lr=0.1), "SGD. Pass the model that it trains."),
    (octavo.Linear, "the class Linear. Pass an instance of it."),
    (None, "None. Pass the module that holds the layers."),
    (LAYER.state_dict(), "OrderedDict. Pass the module that holds the layers."),
    (torch.zeros(2), "Tensor. Pass the module that holds the layers."),
]


@pytest.mark.parametrize(("value", "found"), REFUSED, ids=[found.split(".")[0] for _, found in REFUSED])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_only_a_model_is_taken(function, value, found):
    with pytest.raises(FUNCTIONS[function]) as error:
        getattr(octavo, function)(value)
    assert str(error.value) == f"octavo.{function} takes a model (an nn.Module), got {found}"


@pytest.mark.parametrize(
    ("function", "arguments", "error"),
    [
        ("convert", ("fp8-current", nn.Linear(4, 4)), UnsupportedConfig),
        ("attach", (torch.optim.SGD(LAYER.parameters(), lr=0.1), LAYER), UnsupportedDtype),
        ("load_state_dict", (octavo.state_dict(LAYER), LAYER), UnsupportedDtype),
    ],
)
def test_swapped_arguments_are_named(function, arguments, error):
    with pytest.raises(error, match=rf"octavo\.{function} takes a model .* first, got .*\. Swap the arguments\."):
        getattr(octavo, function)(*arguments)


def test_a_state_is_a_dict():
    with pytest.raises(UnsupportedDtype, match=r"takes a state as a dict, got list\. Pass what octavo\.state_dict"):
        octavo.load_state_dict(LAYER, [])
