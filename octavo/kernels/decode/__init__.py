"""Decode codes to the bfloat16 values that an emulated GEMM multiplies.

    value = code * scale of its block          without NVFP4's global scale, which multiplies sums

Every code fits bfloat16, and so does its product with a scale: that of E2M1 with every E4M3 scale, that of E4M3 with an
E8M0 byte of 3 to 246, that of E5M2 with one of 10 to 239. Below these bytes values under 2^-133 are rounded away; above
them values saturate to bfloat16's largest. A code of Inf stays Inf. A scale of NaN makes all values of its block NaN.
"""

from torch import Tensor

from octavo import backend
from octavo.kernels.grouped_gemm import hopper_support
from octavo.quant.groups import Groups
from octavo.quant.qtensor import QTensor

REACHES = (16, 32)  # elements of the contraction that share a scale, in schemes whose scales multiply values
FEW = 64  # rows; below, decoding once for all tiles, which takes as long as one product, is not paid back


def is_worth_it(a: QTensor, m: int, n: int) -> bool:
    """Return whether a GEMM with the operand a, of m rows by n, should decode both operands to memory and then
    multiply, by the kernels for Hopper. With few rows on one side a value of the other is used too rarely to pay for
    that; the kernels that decode as they multiply then run."""
    worth = a.spec.block[1] in REACHES and a.columns > 0 and min(m, n) > FEW
    return worth and hopper_support.is_hopper(a.device) and hopper_support.support("decoded products", a.device).ok


def decode(q: QTensor, groups: Groups | None = None) -> Tensor:
    """Return the values of q, scaled by block, as bfloat16 [rows, K]; packed codes include their padding. On a GPU
    rows begin at multiples of 16 bytes, as TMA needs them. With `groups`, q's rows are in the padded layout and the
    result has them packed; its tail is unspecified."""
    return backend.implementation(__name__, q.codes).decode(q, groups)
