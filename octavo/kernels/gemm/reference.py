"""The GEMM that defines the others: float64 throughout, one rounding to float32, bias added there, then the out dtype.

Products of E4M3 codes span 2^-18 to 2^18, so for K up to 2^16 their sum is exact in float64: the result does not depend
on shape, threads or order, and a row computed alone equals the row in a batch. Float32 has none of these properties.
E5M2 by E4M3 spans 2^-25 to 2^25, and block scales are folded into the values first: there a sum may round at 2^-53, and
under float32 block scales a product too, which has up to 56 bits. Both are far below the one rounding to float32 that
follows.
"""

import torch
from torch import Tensor

from octavo.quant.qtensor import QTensor


def gemm(a: Tensor | QTensor, b: Tensor | QTensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    (left, left_scale), (right, right_scale) = _operand(a), _operand(b)
    y = (left @ right.T) * left_scale * right_scale.T
    alpha = [q.global_scale for q in (a, b) if isinstance(q, QTensor) and q.global_scale is not None]
    if alpha:
        y = y * (alpha[0] * alpha[1]).double()  # the kernels also multiply the two scales in float32
    y32 = y.float()
    if bias is not None:
        y32 = y32 + bias.float()
    return y32.to(dtype)


def _operand(x: Tensor | QTensor) -> tuple[Tensor, Tensor]:
    """Return float64 values [M, K], and the float64 scale, [M, 1] or [1, 1], that multiplies the sum: the operand's own
    if it is constant along the contraction. Any other scale is in the values."""
    if isinstance(x, Tensor):
        values = x.detach().double()
    else:
        values = x.spec.code_values(x).double()
        if x.spec.block[1] is None:
            return values, x.scale.double()
        values = values * x.spec._spread_scale(x).double()
    return values, torch.ones(1, 1, dtype=torch.float64, device=x.device)
