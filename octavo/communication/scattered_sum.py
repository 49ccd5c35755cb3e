"""The sum over ranks of a row layer's y, each rank its part of the rows, whose gradient is gathered as codes.

Where one scale covers dy, both GEMMs of backward take these codes. Where blocks of a row have scales, they take the
values of the row codes, which a cast by row leaves as they are.

Backward casts this rank's rows of dy as the layer would cast all of them, and gathers the codes. Autograd passes a
tensor of one stored element in the place of dy, and the codes as its attribute. That element is NaN: an operation that
did not know of the codes would be seen. In a graph AOTAutograd traces this backward, and that of the layer's node after
it, which takes the codes.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import values
from octavo._torch.autograd import mapped
from octavo._torch.dispatcher import dispatch_depth, is_batched
from octavo._torch.tracing import in_graph
from octavo.communication import collectives
from octavo.communication.all_reduced_amaxes import WHOLE, scales_whole
from octavo.quant.qtensor import Parts, QTensor
from octavo.quant.quantizer import Quantizer
from octavo.runtime.call import Stage, call
from octavo.runtime.eager import DY_CODES


class DyCast(NamedTuple):
    """A cast of rows of dy, as one process would cast them."""

    spec: str  # the key of the quantizer
    inverse_scale: Tensor | None = None  # delayed
    running_amax: Tensor | None = None  # delayed, in training


def _takes_values(dy: Any) -> bool:
    """Return whether an eager backward gathers values: something besides the layer's node might read the gradient."""
    reads_gradients = torch.is_anomaly_enabled()  # it takes the NaN for one of the program
    return bool(
        torch.is_grad_enabled() or type(dy) is not Tensor or dispatch_depth() or is_batched(dy) or reads_gradients
    )


def scattered_sum(y: Tensor, cast: DyCast, size: int, group: str, where: str) -> Tensor:
    """Sum over ranks, and return this rank's part of the rows; `cast` quantizes rows of dy."""
    collectives.check_divides(y.shape, size, where)
    ranks = size, group, where
    if torch.compiler.is_compiling():
        state = () if cast.inverse_scale is None else (cast.inverse_scale,)
        amax = () if cast.running_amax is None else (cast.running_amax,)
        return _sum_in_graph(y, cast.spec, state, amax, *ranks)[0]
    return _sum(y, cast, False, ranks)


@in_graph
def _sum_in_graph(y: Tensor, spec: str, scale: Parts, amax: Parts, size: int, group: str, where: str) -> Parts:
    cast = DyCast(spec, scale[0] if scale else None, amax[0] if amax else None)
    return (_sum(y, cast, True, (size, group, where)),)


def _sum(y: Tensor, cast: DyCast, as_nodes: bool, ranks: tuple[int, str, str]) -> Tensor:
    return mapped(y, collectives.scatter_sum, partial(_gathered, cast, as_nodes), *ranks)


def _gathered(cast: DyCast, as_nodes: bool, dy: Tensor, size: int, group: str, where: str) -> Tensor:
    if not as_nodes and _takes_values(dy):
        return collectives.gather(dy, size, group, where)
    q = collectives.gather_codes(_rows_cast(cast, group, where, dy, as_nodes), size, group, where)
    if q.spec.block != WHOLE:
        return q.dequantize()
    token = dy.new_full((1,), float("nan")).expand(q.shape)
    setattr(token, DY_CODES, q)
    return token


def _rows_cast(cast: DyCast, group: str, where: str, dy: Tensor, as_nodes: bool) -> QTensor:
    """Return the codes of this rank's rows of dy."""
    spec: Quantizer = values.parse(cast.spec)
    bits = None
    if cast.inverse_scale is None and scales_whole(spec):
        measured = call(Stage("amaxes", f"amaxes(x_row={spec.key})", (dy, None), (), False), dy, as_nodes)[0]
        bits = collectives.largest(measured[:1], group, where)
    stage = Stage("dy-cast", f"dy-cast(spec={spec.key})", (cast.inverse_scale, cast.running_amax, bits), (), False)
    parts = call(stage, dy, as_nodes)[1:]
    return spec.assemble(parts, tuple(dy.shape), dy.dtype)
