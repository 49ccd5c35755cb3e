"""The one entry to a call of a layer. Only this module decides how the call runs: as nodes of a graph, or by the eager
driver, which replays it where it can.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo._torch.dispatcher import dispatch_depth
from octavo._torch.tracing import moves_saved_tensors
from octavo.runtime import eager, graph_nodes
from octavo.runtime.eager import run_hit as run_hit
from octavo.runtime.stage import Stage as Stage


def takes_nodes(operations: Sequence[Any] = ()) -> bool:
    """Return whether a call of these operations runs as nodes of a graph: while a compiler traces, and where a mode
    watches operators. A backward that holds Python objects cannot be a node, and a node cannot write to tensors that
    hooks keep elsewhere: a mode does not see such calls."""
    if torch.compiler.is_compiling():
        return True
    return dispatch_depth() > 0 and not moves_saved_tensors() and not any([op.op_holds_objects() for op in operations])


def call(
    stage: Stage, x: Any, as_nodes: bool, owner: Any = None, shape: tuple[int, ...] | None = None
) -> Sequence[Tensor]:
    """Run a stage on x. Return outputs, then auxiliary outputs; in a graph, intermediates after them. Messages name the
    `owner`. If y lies in `stage.out`, a graph returns it in this shape."""
    if not as_nodes:
        return eager.run(stage, x, owner)
    if stage.out is None:
        return graph_nodes.run(stage, x)
    return graph_nodes.run_into(stage, x, stage.out, tuple(stage.out.shape) if shape is None else shape)
