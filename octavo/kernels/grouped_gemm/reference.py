"""Grouped GEMMs, computed group by group with the reference GEMM. Reads the sizes of the groups on the host."""

from itertools import pairwise

import torch
from torch import Tensor

from octavo.kernels.gemm.reference import gemm
from octavo.quant.grouped import GroupedTensor, member
from octavo.quant.groups import Groups
from octavo.quant.qtensor import QTensor


def rows(
    a: GroupedTensor, b: QTensor, out: Tensor, bias: Tensor | None, scales: Tensor | None, height: int, along: str,
    accumulation: str,
) -> None:  # fmt: skip
    """Compute `rows` in float64, whatever `accumulation` permits."""
    for g, (left, (first, end)) in enumerate(zip(a.members(), _ranges(a.groups), strict=True)):
        if along == "rows":
            right = member(b, "row", g, g * height, out.shape[1])
        else:
            # codes by column are padded to whole blocks of rows: what pads them is no feature
            right = _first(member(b, "column", g, g * height, left.columns), out.shape[1])
        out[first:end] = gemm(left, right, out.dtype, _bias(bias, scales, g, first, end))


def grouped_wgrad(a: GroupedTensor, b: GroupedTensor, out: Tensor, accumulate: bool) -> None:
    n, k = out.shape[1:]
    for g, (left, right) in enumerate(zip(a.members(), b.members(), strict=True)):
        # an empty group has a gradient, zero
        dw = gemm(_first(left, n), _first(right, k), out.dtype, None) if left.columns else torch.zeros_like(out[g])
        # dw is rounded to the buffer's dtype before it is added, as the kernels do
        out[g] = out[g] + dw if accumulate else dw


def _first(q: QTensor, rows: int) -> QTensor:
    """Return the first `rows` rows of q: the rest only pads tiles for the copies, and may share a block with them."""
    scale = q.scale if q.spec.block[0] is None else q.scale[: -(-rows // q.spec.block[0])]
    return QTensor(q.codes[:rows], scale, q.spec, (rows, q.columns), q.dtype, q.global_scale)


def plain_rows(a: Tensor, b: Tensor, out: Tensor, groups: Groups, bias: Tensor | None, scales: Tensor | None) -> None:
    for g, (first, end) in enumerate(_ranges(groups)):
        out[first:end] = gemm(a[first:end], b[g], out.dtype, _bias(bias, scales, g, first, end))


def plain_wgrad(a: Tensor, b: Tensor, out: Tensor, groups: Groups, accumulate: bool) -> None:
    for g, (first, end) in enumerate(_ranges(groups)):
        dw = gemm(a[first:end].T, b[first:end].T, out.dtype, None)
        out[g] = out[g] + dw if accumulate else dw


def zero_tail(out: Tensor, groups: Groups) -> None:
    out[int(groups.start[-1]) :] = 0


def column_sums(dy: Tensor, groups: Groups, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    rows = dy.double() if scales is None else dy.double() * scales.double()[:, None]
    return torch.stack([rows[first:end].sum(0) for first, end in _ranges(groups)]).to(dtype)


def bias_products(dy: Tensor, bias: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(dy.shape[0], dtype=dtype, device=dy.device)
    for g, (first, end) in enumerate(_ranges(groups)):
        out[first:end] = (dy[first:end].double() @ bias[g].double()).to(dtype)
    return out


def _ranges(groups: Groups) -> list[tuple[int, int]]:
    return list(pairwise(groups.start.tolist()))


def _bias(bias: Tensor | None, scales: Tensor | None, g: int, first: int, end: int) -> Tensor | None:
    """Return the bias of group g: [N], or [rows, N] if each row scales it."""
    if bias is None or scales is None:
        return None if bias is None else bias[g]
    # float32, to which the sum is rounded before the bias is added
    return scales[first:end, None].float() * bias[g].float()


def fresh_wgrad(a: Tensor, b: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    out = torch.empty(groups.number, a.shape[1], b.shape[1], dtype=dtype, device=a.device)
    plain_wgrad(a, b, out, groups, False)
    return out
