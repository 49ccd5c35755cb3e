"""The one driver of the layer contract (`octavo.layers.contract`)."""

from octavo.lower.eager import run
from octavo.lower.graph import (
    buffer,
    claim,
    is_captured,
    is_first_in_graph,
    is_inside_ddp,
    is_inside_operator,
    is_static,
    is_watched,
    recomputes,
    sac_save_ops,
    saved_elsewhere,
    while_tracing,
)
from octavo.lower.graph import refresh as refresh_in_graph
from octavo.lower.graph import run as run_in_graph
from octavo.lower.graph import run_into as run_into_in_graph

__all__ = [
    "buffer",
    "claim",
    "is_captured",
    "is_first_in_graph",
    "is_inside_ddp",
    "is_inside_operator",
    "is_static",
    "is_watched",
    "recomputes",
    "refresh_in_graph",
    "run",
    "run_in_graph",
    "run_into_in_graph",
    "sac_save_ops",
    "saved_elsewhere",
    "while_tracing",
]
