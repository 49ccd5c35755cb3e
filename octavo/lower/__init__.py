"""The one driver of the layer contract (`octavo.layers.contract`)."""

from octavo.lower.eager import run
from octavo.lower.operators import refresh as refresh_in_graph
from octavo.lower.operators import run as run_in_graph
from octavo.lower.operators import run_into as run_into_in_graph
from octavo.lower.operators import sac_save_ops

__all__ = ["refresh_in_graph", "run", "run_in_graph", "run_into_in_graph", "sac_save_ops"]
