"""The sum over ranks of a row layer's y, each rank its part of the rows, whose gradient is gathered as codes.

Where one scale covers dy, both GEMMs of backward take these codes. Where blocks of a row have scales, they take the
values of the row codes, which a cast by row leaves as they are.

Backward casts this rank's rows of dy as the layer would cast all of them, and gathers the codes. Autograd passes a
tensor of one stored element in the place of dy, and the codes as its attribute. That element is NaN: an operation that
did not know of the codes would be seen.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo._torch.autograd import mapped
from octavo._torch.dispatcher import dispatch_depth, is_batched
from octavo.communication import collectives
from octavo.communication.all_reduced_amaxes import WHOLE
from octavo.quant.qtensor import QTensor
from octavo.runtime.eager import DY_CODES

Cast = Callable[[Tensor], QTensor]  # this rank's rows of dy, as one process would cast them


def scattered_sum(y: Tensor, cast: Cast, size: int, group: str, where: str) -> Tensor:
    """Sum over ranks, and return this rank's part of the rows; `cast` quantizes rows of dy."""
    collectives.check_divides(y.shape, size, where)
    return mapped(y, collectives.scatter_sum, partial(_gathered, cast), size, group, where)


def _gathered(cast: Cast, dy: Tensor, size: int, group: str, where: str) -> Tensor:
    reads_gradients = torch.is_anomaly_enabled()  # it takes the NaN for one of the program
    if torch.is_grad_enabled() or type(dy) is not Tensor or dispatch_depth() or is_batched(dy) or reads_gradients:
        return collectives.gather(dy, size, group, where)
    q = collectives.gather_codes(cast(dy), size, group, where)
    if q.spec.block != WHOLE:
        return q.dequantize()
    token = dy.new_full((1,), float("nan")).expand(q.shape)
    setattr(token, DY_CODES, q)
    return token
