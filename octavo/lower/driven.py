"""The layers as the drivers run them: each is wrapped once, so that its calls are replayed."""

from functools import cache

from octavo.layers.contract import Layer
from octavo.lower.replay.layer import Replayed


@cache
def driven(layer: Layer) -> Replayed:
    """The layer that a driver calls in the place of this one."""
    return Replayed(layer)
