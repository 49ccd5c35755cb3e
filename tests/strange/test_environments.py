"""No environment leaves a trace in a layer: outputs, gradients, weights, the state of recipes and version counters are
those of a layer that never saw it, bit for bit."""

import pytest
import torch

from tests.strange.environments import ENVIRONMENTS
from tests.strange.harness import traces
from tests.strange.layers import LAYERS
from tests.strange.sample import sample

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
PAIRS = [(layer, recipe) for layer in LAYERS for recipe in layer.recipes]


def cases(device):
    for layer, recipe, environment in sample(device):
        marks = [pytest.mark.gpu] * (device == "cuda" or environment.needs_gpu)
        name = f"{layer}-{recipe}-{environment}-{device}"
        yield pytest.param(layer, recipe, environment, device, marks=marks, id=name)


@pytest.mark.parametrize(("layer", "recipe", "environment", "device"), [*cases("cpu"), *cases("cuda")])
def test_a_layer_in_an_environment(layer, recipe, environment, device):
    if environment.compiles:
        torch._dynamo.reset()  # the compiler gives up on code that it has compiled eight times
    assert traces(layer, recipe, environment, device=device) == []


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("layer", "recipe"), PAIRS, ids=str)
def test_a_layer_in_every_environment(layer, recipe, device):
    found = {}
    for environment in ENVIRONMENTS:
        if environment.takes(layer, recipe) and (torch.cuda.is_available() or not environment.needs_gpu):
            torch._dynamo.reset()
            found[environment.name] = traces(layer, recipe, environment, device=device)
    assert {name: names for name, names in found.items() if names} == {}
