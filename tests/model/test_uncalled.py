"""Layers that are converted and never called: said after the first attached step, once."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.recipes.ambient import process


class Reads(nn.Module):
    """Mamba's dt_proj: the model reads the weight itself."""

    def __init__(self):
        super().__init__()
        self.called, self.read, self.unused = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return F.linear(self.called(x), self.read.weight, self.read.bias)


def trained(model, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with octavo.attach(model, optimizer):
        for _ in range(steps):
            model(torch.randn(8, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(autouse=True)
def untraced(monkeypatch):
    monkeypatch.setattr(process, "has_traced", False)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_a_layer_whose_weight_is_read_is_named_once(recipe):
    model = Reads()
    octavo.convert(model, recipe)
    with pytest.warns(UserWarning, match="No forward has called read, and its weight has gradients") as said:
        trained(model)
    assert len([w for w in said if "No forward" in str(w.message)]) == 1


def test_graphs_which_may_serve_layers_that_they_did_not_trace_are_not_judged(fresh_compiler):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    octavo.convert(model, "fp8-current")
    for layer in model:
        layer.compile(backend="aot_eager")
    with warnings.catch_warnings(record=True) as said:
        trained(model)
    assert not [w for w in said if "No forward" in str(w.message)]


def test_layers_that_are_called_are_not_named():
    torch.manual_seed(0)
    parts = (
        nn.Linear(32, 32),
        octavo.LayerNormMLP(32, 64),
        octavo.GroupedLinear(1, 32, 32),
        nn.TransformerEncoderLayer(32, 4, 32),
    )

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(parts)

        def forward(self, x):
            first, mlp, grouped, encoder = self.parts
            return encoder(grouped(mlp(first(x)), torch.tensor([len(x)])))

    model = Model()
    octavo.convert(model, "fp8-delayed")
    with warnings.catch_warnings(record=True) as said:
        trained(model)
    assert not [w for w in said if "No forward" in str(w.message)]
