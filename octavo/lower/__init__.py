"""The one driver of the layer contract (`octavo.layers.contract`)."""

from octavo.lower.eager import run
from octavo.lower.graph import run as run_in_graph

__all__ = ["run", "run_in_graph"]
