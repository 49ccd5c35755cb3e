"""The layers as the drivers run them: each is wrapped once, so that its calls are replayed."""

from functools import cache

from octavo.runtime.contract import Layer
from octavo.runtime.replay.layer import Replayed


@cache
def driven(layer: Layer) -> Replayed:
    """The layer that a driver calls in the place of this one."""
    return Replayed(layer)
