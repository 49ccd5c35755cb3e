"""The sample of the harness: some pairs of a layer and an environment. The recipe changes from pair to pair, so that
each environment and each layer meet many recipes."""

from collections.abc import Iterator

from tests.strange.environments import ENVIRONMENTS, Environment
from tests.strange.layers import LAYERS, Layer

Case = tuple[Layer, str, Environment]
# one pair of so many is in the sample; on a GPU kernels compile for every layer
PERIODS = {"cpu": 3, "cuda": 8}
COMPILED = 5  # of environments in which the layer is compiled


def sample(device: str) -> Iterator[Case]:
    """Yields the cases of a device."""
    for j, environment in enumerate(ENVIRONMENTS):
        period = COMPILED if environment.compiles else PERIODS["cuda" if environment.needs_gpu else device]
        for i, layer in enumerate(LAYERS):
            turn, rest = divmod(i + j, period)
            recipe = layer.recipes[turn % len(layer.recipes)]
            if rest == 0 and environment.takes(layer, recipe):
                yield layer, recipe, environment
