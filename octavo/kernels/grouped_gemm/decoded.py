"""Grouped GEMMs of codes that are first decoded to bfloat16 in memory, then multiplied by the kernels for Hopper."""

from torch import Tensor

from octavo.kernels.decode import decode
from octavo.kernels.gemm import hopper
from octavo.kernels.grouped_gemm.hopper.plain import decoded_rows
from octavo.quant.grouped import GroupedTensor
from octavo.quant.qtensor import QTensor


def rows(
    a: GroupedTensor, b: QTensor, out: Tensor, bias: Tensor | None, scales: Tensor | None, height: int, along: str
) -> None:
    factors = bias, scales, a.q.global_scale, b.global_scale
    decoded_rows(decode(a.q, a.groups), decode(b), out, a.groups, factors, height, along)


def grouped_wgrad(a: GroupedTensor, b: GroupedTensor, out: Tensor, accumulate: bool) -> None:
    """Contract whole blocks of rows: those that pad a group decode to zero."""
    level2 = a.q.global_scale, b.q.global_scale
    hopper.wgrad(decode(a.q), decode(b.q), out, level2, a.groups.block, accumulate)
