"""The one driver of the layer contract (`octavo.layers.contract`)."""

from octavo.lower.eager import run

__all__ = ["run"]
