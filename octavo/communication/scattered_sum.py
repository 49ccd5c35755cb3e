"""The sum over ranks of a row layer's y, each rank its part of the rows, whose gradient is gathered as codes.

Where one scale covers dy, both GEMMs of backward take these codes. Where blocks of a row have scales, they take the
values of the row codes, which a cast by row leaves as they are.

Backward casts this rank's rows of dy as the layer would cast all of them, and gathers the codes. Autograd passes a
tensor of one stored element in the place of dy, and the codes as its attribute. That element is NaN: an operation that
did not know of the codes would be seen.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo._torch.dispatcher import dispatch_depth, is_batched
from octavo.communication import collectives
from octavo.communication.all_reduced_amaxes import WHOLE
from octavo.quant.qtensor import QTensor
from octavo.runtime.eager import DY_CODES

Cast = Callable[[Tensor], QTensor]  # this rank's rows of dy, as one process would cast them


class _ScatteredSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, cast: Cast, size: int, group: str, where: str) -> Tensor:
        ctx.call = size, group, where
        ctx.cast = cast
        return collectives.scatter_sum(y, size, group, where)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        more = None, None, None, None
        reads_gradients = torch.is_anomaly_enabled()  # it takes the NaN for one of the program
        if torch.is_grad_enabled() or type(dy) is not Tensor or dispatch_depth() or is_batched(dy) or reads_gradients:
            return collectives.gather(dy, *ctx.call), *more
        size, group, where = ctx.call
        q = collectives.gather_codes(ctx.cast(dy), size, group, where)
        if q.spec.block != WHOLE:
            return q.dequantize(), *more
        token = dy.new_full((1,), float("nan")).expand(q.shape)
        setattr(token, DY_CODES, q)
        return token, *more


def scattered_sum(y: Tensor, cast: Cast, size: int, group: str, where: str) -> Tensor:
    """Sum over ranks, and return this rank's part of the rows; `cast` quantizes rows of dy."""
    collectives.check_divides(y.shape, size, where)
    found: Tensor = _ScatteredSum.apply(y, cast, size, group, where)  # type: ignore[no-untyped-call]
    return found
