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


PERIOD = 8  # one pair of so many is in the sample
# torch.compile, or the layer in a graph, refuses to run in these
REFUSED = {
    "FLOP counter, one step", "dispatch mode, one step", "save_on_cpu, one step", "copies of saved tensors, one step",
    "failure in forward", "failure of backward", "forward in a thread", "checkpoint", "DDP", "FSDP2",
}  # fmt: skip
COMPILED = [each for each in ENVIRONMENTS if each.name not in REFUSED]


def cases():
    """Yields every pair that fits. Most environments have one layer in the sample."""
    for i, (name, recipe) in enumerate(LAYERS.items()):
        for j, environment in enumerate(COMPILED):
            if environment.takes(BY_NAME[name], recipe):
                marks = [pytest.mark.gpu] * environment.needs_gpu + [pytest.mark.slow] * ((i + j) % PERIOD != 0)
                yield pytest.param(BY_NAME[name], recipe, environment, marks=marks, id=f"{name}-{environment}")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("layer", "recipe", "environment"), list(cases()))
def test_a_compiled_layer_in_an_environment(layer, recipe, environment):
    assert traces(layer, recipe, environment, backend="aot_eager") == []
