"""The one entry to a call of a layer. Only this module decides how the call runs: as nodes of a graph, or by the eager
driver, which replays it where it can.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo._torch.dispatch import dispatch_depth
from octavo._torch.tracing import saved_elsewhere
from octavo.layers.contract import LAYERS
from octavo.lower import eager, operators
from octavo.lower.stage import Stage as Stage


def takes_nodes(operations: Sequence[Any] = ()) -> bool:
    """Whether a call of these operations runs as nodes of a graph: while a compiler traces, and where a mode watches
    operators. A backward that holds Python objects cannot be a node, and a node cannot write to tensors that hooks keep
    elsewhere: a mode does not see such calls."""
    if torch.compiler.is_compiling():
        return True
    return dispatch_depth() > 0 and not saved_elsewhere() and not any([op.op_holds_objects() for op in operations])


def call(stage: Stage, x: Any, as_nodes: bool, owner: Any = None) -> Sequence[Tensor]:
    """Run a stage on x. Returns outputs, then extras; in a graph, fresh tensors after them. Messages name the
    `owner`."""
    if as_nodes:
        return operators.run(stage.name, stage.key, (x, *stage.inputs), stage.buffers)
    return eager.run(stage, x, owner)


def call_into(
    out: Tensor, stage: Stage, x: Any, as_nodes: bool, shape: tuple[int, ...], owner: Any
) -> Sequence[Tensor]:
    """Run a stage as `call` does, with y in `out`, the caller's memory; a graph returns `out` in this shape."""
    if as_nodes:
        return operators.run_into(stage.name, stage.key, (x, *stage.inputs), stage.buffers, out, shape)
    at = LAYERS[stage.name].Inputs._fields.index("out") - 1
    return call(stage._replace(inputs=(*stage.inputs[:at], out, *stage.inputs[at + 1 :])), x, False, owner)
