"""Grouped GEMMs group by group, each by the reference GEMM. The sizes of the groups are read on the host."""

from itertools import pairwise

import torch
from torch import Tensor

from octavo.kernels.gemm.reference import gemm
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.qtensor import QTensor


def rows(a: GroupedTensor, b: QTensor, out: Tensor, bias: Tensor | None, apart: tuple[int, int]) -> None:
    starts = a.groups.start.tolist()
    for g, left in enumerate(a.members()):
        right = _stacked(b, g, apart, out.shape[1], left.columns)
        y = gemm(left, right, out.dtype, None if bias is None else bias[g])
        out[starts[g] : starts[g + 1]] = y


def _stacked(b: QTensor, g: int, apart: tuple[int, int], rows: int, columns: int) -> QTensor:
    """Group g's matrix [rows, columns]."""
    down, across = g * apart[0], g * apart[1]
    height = b.spec.block[0] or 1
    first, last = down // height, -(-(down + rows) // height)
    blocks = slice(across // BLOCK, -(-(across + columns) // BLOCK))
    codes = b.codes[down : down + rows, across : across + columns]
    return QTensor(codes, b.scale[first:last, blocks], b.spec, (rows, columns), b.dtype)


def depth(a: GroupedTensor, b: GroupedTensor, out: Tensor, accumulate: bool) -> None:
    n, k = out.shape[1:]
    for g, (left, right) in enumerate(zip(a.members(), b.members(), strict=True)):
        dw = gemm(left[:n], right[:k], out.dtype, None)
        out[g] = out[g] + dw if accumulate else dw


def zero_tail(out: Tensor, groups: Groups) -> None:
    out[int(groups.start[-1]) :] = 0


def column_sums(dy: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    starts = groups.start.tolist()
    sums = [dy[a:b].sum(0, dtype=torch.float64) for a, b in pairwise(starts)]
    return torch.stack(sums).to(dtype)


def plain_rows(a: Tensor, b: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    out = a.new_zeros(a.shape[0], b.shape[1])
    for g, (first, end) in enumerate(pairwise(groups.start.tolist())):
        out[first:end] = gemm(a[first:end], b[g], a.dtype, None if bias is None else bias[g])
    return out


def plain_depth(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    parts = [gemm(a[first:end].T, b[first:end].T, a.dtype, None) for first, end in pairwise(groups.start.tolist())]
    return torch.stack(parts)
