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
    y = (_values(a) @ _values(b).T) * _outer_scale(a) * _outer_scale(b).T
    alpha = [q.global_scale for q in (a, b) if isinstance(q, QTensor) and q.global_scale is not None]
    if alpha:
        y = y * (alpha[0] * alpha[1]).double()  # the kernels also multiply the two scales in float32
    y32 = y.float()
    if bias is not None:
        y32 = y32 + bias.float()
    return y32.to(dtype)


def _values(x: Tensor | QTensor) -> Tensor:
    """Return values as float64 [M, K], scaled by block if a scale spans part of the contraction."""
    if isinstance(x, Tensor):
        return x.detach().double()
    if x.spec.block[1] is None:
        return x.spec.code_values(x).double()
    return x.spec.code_values(x).double() * x.spec._spread_scale(x).double()


def _outer_scale(x: Tensor | QTensor) -> Tensor:
    """Return float64 [M, 1] or [1, 1]: the scale that is constant along the contraction and multiplies the sum."""
    if isinstance(x, QTensor) and x.spec.block[1] is None:
        return x.scale.double()
    return torch.ones(1, 1, dtype=torch.float64, device=x.device)
