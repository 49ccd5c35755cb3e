"""The one entry to a call of a layer. Here, and nowhere else, it is decided how the call runs: as nodes of a graph, or
by the eager driver, which replays it where it can.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.dispatch import dispatch_depth
from octavo._torch.tracing import saved_elsewhere
from octavo.layers.contract import LAYERS
from octavo.lower import eager, operators


class Stage(NamedTuple):
    """One operation's part in one call: all of a layer's call but x."""

    name: str  # of the layer
    key: str  # of its config
    inputs: tuple[Any, ...]  # but for x
    buffers: tuple[Any, ...]  # that backward writes to besides its results
    needs: bool  # whether it wants any gradient
    width: int = 0  # y's last dim; 0: x's
    outputs: tuple[Any, ...] = ()  # y and what it gives away, as Edges, of an operation that tells them itself
    anchored: bool = False  # backward has to run for what it writes, though no input of it takes a gradient
    watched: Sequence[Tensor] = ()  # tensors that must not be written to before backward
    after: Any = None  # called with its extras, once forward has run


def takes_nodes(operations: Sequence[Any] = ()) -> bool:
    """Whether a call of these operations is nodes of a graph: while a compiler traces, and where a mode watches
    operators. A backward that holds Python objects is no node, and a node cannot write to what hooks keep elsewhere:
    a mode does not see such calls."""
    if torch.compiler.is_compiling():
        return True
    return dispatch_depth() > 0 and not saved_elsewhere() and not any([op.op_holds_objects() for op in operations])


def call(stage: Stage, x: Any, as_nodes: bool, owner: Any = None) -> Sequence[Tensor]:
    """Outputs, then extras, of a stage with this x; in a graph, fresh tensors after them. Messages name the `owner`."""
    if as_nodes:
        return operators.run(stage.name, stage.key, (x, *stage.inputs), stage.buffers)
    layer = LAYERS[stage.name]
    return eager.run(
        layer, layer.config(stage.key), layer.Inputs._make((x, *stage.inputs)), layer.Buffers._make(stage.buffers),
        differentiable=stage.needs, anchored=stage.anchored, watched=stage.watched, owner=owner,
    )  # fmt: skip


def call_into(
    out: Tensor, stage: Stage, x: Any, as_nodes: bool, shape: tuple[int, ...], owner: Any
) -> Sequence[Tensor]:
    """The same with y in `out`, memory of the caller's, which in a graph comes back in this shape."""
    if as_nodes:
        return operators.run_into(stage.name, stage.key, (x, *stage.inputs), stage.buffers, out, shape)
    at = LAYERS[stage.name].Inputs._fields.index("out") - 1
    return call(stage._replace(inputs=(*stage.inputs[:at], out, *stage.inputs[at + 1 :])), x, False, owner)
