"""No environment leaves a trace in a layer that torch.compile compiled before it, in it or after it."""

import pytest

from tests.strange.environments import ENVIRONMENTS
from tests.strange.harness import traces
from tests.strange.layers import BY_NAME

LAYERS = {
    "Linear": "fp8-delayed",
    "GroupedLinear": "fp8-rowwise",
    "LayerNormMLP, swiglu": "nvfp4",
    "MoE": "fp8-block",
    "converted linears": "mxfp8",
}


def case(i, name, j, environment):
    """Every environment has one layer in the sample."""
    marks = [pytest.mark.gpu] * environment.needs_gpu + [pytest.mark.slow] * ((i + j) % len(LAYERS) != 0)
    return pytest.param(BY_NAME[name], LAYERS[name], environment, marks=marks, id=f"{name}-{environment}")


COMPILED = [each for each in ENVIRONMENTS if "FLOP" not in each.name]  # torch compiles nothing inside of such a mode
CASES = [case(i, name, j, each) for i, name in enumerate(LAYERS) for j, each in enumerate(COMPILED)]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("layer", "recipe", "environment"), CASES)
def test_a_compiled_layer_in_an_environment(layer, recipe, environment):
    assert traces(layer, recipe, environment, backend="aot_eager") == []
