"""No environment leaves a trace in a layer: outputs, gradients, weights, the state of recipes and version counters are
those of a layer that never saw it, bit for bit."""

import pytest
import torch

from tests.strange.environments import ENVIRONMENTS
from tests.strange.harness import traces
from tests.strange.layers import LAYERS

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
PAIRS = [(layer, recipe) for layer in LAYERS for recipe in layer.recipes]
# a sample: every layer meets every environment in one of its recipes, and these meet each other in every recipe
CORE = ("Linear", "GroupedLinear", "LayerNormMLP, swiglu", "run with dropout", "MoE")
DTYPES = tuple(f"default dtype {dtype}, whole run" for dtype in ("float64", "float16", "bfloat16"))


def sample(device):
    """Yields cases on one device."""
    for i, layer in enumerate(LAYERS):
        for j, environment in enumerate(ENVIRONMENTS):
            if layer.name in environment.leaves_out:
                continue
            # few recipes for a layer: a plain run in each takes time as well
            recipes = (layer.recipes[(i + j // 6) % len(layer.recipes)],)
            if layer.name in CORE and environment.name in DTYPES:
                recipes = layer.recipes
            on_gpu = device == "cuda" or environment.needs_gpu
            if on_gpu and (i + j) % 4:  # a fourth of them there: kernels compile for every layer
                continue
            marks = [pytest.mark.gpu] * on_gpu
            for recipe in recipes:
                name = f"{layer}-{recipe}-{environment}-{device}"
                yield pytest.param(layer, recipe, environment, device, marks=marks, id=name)


@pytest.mark.parametrize(("layer", "recipe", "environment", "device"), [*sample("cpu"), *sample("cuda")])
def test_a_layer_in_an_environment(layer, recipe, environment, device):
    assert traces(layer, recipe, environment, device) == []


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("layer", "recipe"), PAIRS, ids=str)
def test_a_layer_in_every_environment(layer, recipe, device):
    here = [environment for environment in ENVIRONMENTS if torch.cuda.is_available() or not environment.needs_gpu]
    here = [environment for environment in here if layer.name not in environment.leaves_out]
    found = {environment.name: traces(layer, recipe, environment, device) for environment in here}
    assert {name: names for name, names in found.items() if names} == {}
