"""Grouped GEMMs in plain Triton, for any GPU from SM89 on: schemes that no tensor core here multiplies, in true codes
decoded to bfloat16 tile by tile as `octavo.kernels.gemm.triton` does it, and unquantized operands of any dtype and
strides.

A program computes one tile. The grid has a program for every tile that any split of the rows can need; a program whose
tile has no rows returns at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.decode.triton import SCALES
from octavo.kernels.gemm.triton import check_reach, product
from octavo.kernels.grouped_gemm.scale_strides import grouped_strides, stacked_strides
from octavo.launch import Launch
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Quantizer

Config = tuple[int, int, int, int, int]  # rows, columns, depth of a step, warps, stages

CODES: dict[int, Config] = {  # by how far a scale reaches along the contraction; 0: all of it
    0: (128, 128, 64, 8, 3),
    128: (128, 64, 128, 8, 2),  # wider tiles spill
    32: (128, 128, 64, 8, 2),
    16: (128, 128, 64, 8, 2),
}
PLAIN: dict[torch.dtype, Config] = {
    torch.float32: (64, 64, 16, 4, 3),  # exact products, off the tensor cores
    torch.bfloat16: (128, 128, 64, 8, 3),
    torch.float16: (128, 128, 64, 8, 3),
}


@triton.jit
def _place(owner, source, live, N, BM: tl.constexpr, BN: tl.constexpr, SIZE: tl.constexpr):
    """Return this program's group, the block it is in, the rows of the group before this block and those left from
    there, and the column tile."""
    across = tl.cdiv(N, BN)
    # column tiles of a row block follow each other, so that its codes stay in the cache
    part, column = tl.program_id(0) // across, tl.program_id(0) % across
    block, before = part // (SIZE // BM), part % (SIZE // BM) * BM
    count = tl.load(live + block) - before
    return tl.load(owner + block).to(tl.int64), block, before, tl.load(source + block) + before, count, column


@triton.jit
def _store_rows(total, out, bias, scales, group, start, rows, count, columns, N):
    if bias is not None:
        added = tl.load(bias + group * N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if scales is not None:
            added = tl.load(scales + start + rows, mask=rows < count, other=0.0).to(tl.float32)[:, None] * added
        total += added
    at = (start + rows).to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(rows < count)[:, None] & (columns < N)[None, :])


@triton.jit
def _store_depth(total, out, group, rows, columns, N, K, ADD: tl.constexpr):
    at = (group * N + rows)[:, None] * K + columns[None, :]
    live = (rows < N)[:, None] & (columns < K)[None, :]
    y = total.to(out.dtype.element_ty)
    if ADD:
        y += tl.load(out + at, mask=live, other=0.0)
    tl.store(out + at, y, mask=live)


# -- true codes --------------------------------------------------------------------------------------------------------


@triton.jit
def _rows_kernel(
    a, b, out, bias, scales, a_scale, b_scale, a_global, b_global, owner, source, live,
    N, K, a_stride, b_stride, apart, a_scale_group, a_scale_row, a_scale_block,
    b_scale_group, b_scale_row, b_scale_block,
    REACH: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    group, block, before, start, count, column = _place(owner, source, live, N, BM, BN, SIZE)
    # a part of a block past its group's end
    if count <= 0:
        return
    top = tl.cast(block * SIZE + before, tl.int64)
    rows, columns = tl.arange(0, BM), column * BN + tl.arange(0, BN)
    total = product(
        a + top * a_stride, b + group * apart,
        a_scale + group * a_scale_group + top // A_ROWS * a_scale_row, b_scale + group * b_scale_group,
        rows, columns, count, N, K, a_stride, b_stride, a_scale_row, a_scale_block, b_scale_row, b_scale_block,
        REACH, A_ROWS, B_ROWS, KIND, PACKED, BM, BN, BK,
    )  # fmt: skip
    if a_global is not None:
        # after the sum: both global scales are constant along the contraction
        total *= tl.load(a_global + group) * tl.load(b_global + group)
    _store_rows(total, out, bias, scales, group, start, rows, count, columns, N)


@triton.jit
def _depth_kernel(
    a, b, out, a_scale, b_scale, a_global, b_global, start, block,
    N, K, a_stride, b_stride, a_scale_group, a_scale_row, a_scale_block, b_scale_group, b_scale_row, b_scale_block,
    ADD: tl.constexpr, REACH: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, KIND: tl.constexpr,
    PACKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Contract over the rows that a group has, so that neither scales nor codes of an empty one are read."""
    down, across = tl.cdiv(N, BM), tl.cdiv(K, BN)
    group = (tl.program_id(0) // (down * across)).to(tl.int64)
    size = tl.load(start + group + 1) - tl.load(start + group)
    first = tl.load(block + group).to(tl.int64)
    rows = tl.program_id(0) // across % down * BM + tl.arange(0, BM)
    columns = tl.program_id(0) % across * BN + tl.arange(0, BN)
    # a group begins at a block of 128 rows: so many blocks of scales, and bytes of codes, before it
    blocks: tl.constexpr = SIZE // REACH if REACH > 0 else 0
    codes: tl.constexpr = SIZE // 2 if PACKED else SIZE
    total = product(
        a + first * codes, b + first * codes,
        a_scale + group * a_scale_group + first * blocks * a_scale_block,
        b_scale + group * b_scale_group + first * blocks * b_scale_block,
        rows, columns, tl.where(size > 0, N, 0), tl.where(size > 0, K, 0), size,
        a_stride, b_stride, a_scale_row, a_scale_block, b_scale_row, b_scale_block,
        REACH, A_ROWS, B_ROWS, KIND, PACKED, BM, BN, BK,
    )  # fmt: skip
    if a_global is not None:
        # an empty group's global scale is whatever the memory held
        level2 = tl.load(a_global + group, mask=size > 0, other=0.0)
        total *= level2 * tl.load(b_global + group, mask=size > 0, other=0.0)
    _store_depth(total, out, group, rows, columns, N, K, ADD)


def rows(
    a: GroupedTensor, b: QTensor, out: Tensor, bias: Tensor | None, scales: Tensor | None, height: int, along: str
) -> None:
    apart = height * b.codes.stride(0) if along == "rows" else height // b.spec.fmt.packed
    sizes = (
        out.shape[1], a.q.columns, a.q.codes.stride(0), b.codes.stride(0), apart,
        *grouped_strides(a), *stacked_strides(b, height, along),
    )  # fmt: skip
    groups = a.groups
    _rows_launch(a.q.spec, b.spec, groups.owner.shape[0], sizes)(
        a.q.codes, b.codes, out, bias, scales, a.q.scale, b.scale, a.q.global_scale, b.global_scale,
        groups.owner, groups.source, groups.live,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _rows_launch(a: Quantizer, b: Quantizer, blocks: int, sizes: tuple[int, ...]) -> Launch:
    constants, warps, stages = _constants(a, b)
    grid = blocks * (BLOCK // constants["BM"]) * triton.cdiv(sizes[0], constants["BN"])
    return Launch(_rows_kernel, grid, sizes, num_warps=warps, num_stages=stages, **constants)


def grouped_wgrad(a: GroupedTensor, b: GroupedTensor, out: Tensor, accumulate: bool) -> None:
    sizes = *out.shape[1:], a.q.codes.stride(0), b.q.codes.stride(0), *grouped_strides(a), *grouped_strides(b)
    _depth_launch(a.q.spec, b.q.spec, a.groups.number, sizes, accumulate)(
        a.q.codes, b.q.codes, out, a.q.scale, b.q.scale, a.q.global_scale, b.q.global_scale,
        a.groups.start, a.groups.block,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _depth_launch(a: Quantizer, b: Quantizer, groups: int, sizes: tuple[int, ...], accumulate: bool) -> Launch:
    constants, warps, stages = _constants(a, b)
    grid = groups * triton.cdiv(sizes[0], constants["BM"]) * triton.cdiv(sizes[1], constants["BN"])
    return Launch(
        _depth_kernel, grid, sizes, num_warps=warps, num_stages=stages, ADD=accumulate, **constants
    )  # fmt: skip


def _constants(a: Quantizer, b: Quantizer) -> tuple[dict[str, Any], int, int]:
    check_reach(a.block[1] or 0, CODES)
    bm, bn, bk, warps, stages = CODES[a.block[1] or 0]
    constants: dict[str, Any] = {
        "REACH": a.block[1] or 0, "A_ROWS": a.block[0] or 1, "B_ROWS": b.block[0] or 1,
        "KIND": SCALES[a.scale_format], "PACKED": a.fmt.packed == 2, "BM": bm, "BN": bn, "BK": bk, "SIZE": BLOCK,
    }  # fmt: skip
    return constants, warps, stages


# -- unquantized -------------------------------------------------------------------------------------------------------


@triton.jit
def _plain_rows_kernel(
    a, b, out, bias, scales, owner, source, live,
    N, K, a_row, a_k, b_group, b_row, b_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    group, _, _, start, count, column = _place(owner, source, live, N, BM, BN, SIZE)
    if count <= 0:
        return
    rows, columns = tl.arange(0, BM), column * BN + tl.arange(0, BN)
    at_a = a + (start + rows).to(tl.int64)[:, None] * a_row
    at_b = b + group * b_group + columns.to(tl.int64)[None, :] * b_row
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = (first + tl.arange(0, BK)).to(tl.int64)
        left = tl.load(at_a + k[None, :] * a_k, mask=(rows < count)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(at_b + k[:, None] * b_k, mask=(k < K)[:, None] & (columns < N)[None, :], other=0.0)
        # ieee: TF32 would drop 13 bits of float32 operands
        total = tl.dot(left, right, total, input_precision="ieee")
    _store_rows(total, out, bias, scales, group, start, rows, count, columns, N)


@triton.jit
def _plain_depth_kernel(
    a, b, out, start,
    N, K, a_row, a_column, b_row, b_column,
    ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(N, BM), tl.cdiv(K, BN)
    group = (tl.program_id(0) // (down * across)).to(tl.int64)
    begin, end = tl.load(start + group), tl.load(start + group + 1)
    rows = tl.program_id(0) // across % down * BM + tl.arange(0, BM)
    columns = tl.program_id(0) % across * BN + tl.arange(0, BN)
    at_a, at_b = a + rows.to(tl.int64)[:, None] * a_column, b + columns.to(tl.int64)[None, :] * b_column
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(begin, end, BK):
        t = (first + tl.arange(0, BK)).to(tl.int64)
        left = tl.load(at_a + t[None, :] * a_row, mask=(rows < N)[:, None] & (t < end)[None, :], other=0.0)
        right = tl.load(at_b + t[:, None] * b_row, mask=(t < end)[:, None] & (columns < K)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    _store_depth(total, out, group, rows, columns, N, K, ADD)


def plain_rows(a: Tensor, b: Tensor, out: Tensor, groups: Groups, bias: Tensor | None, scales: Tensor | None) -> None:
    sizes = out.shape[1], a.shape[1], *a.stride(), *b.stride()
    _plain_rows_launch(a.dtype, groups.owner.shape[0], sizes)(
        a, b, out, bias, scales, groups.owner, groups.source, groups.live
    )


@lru_cache(maxsize=4096)
def _plain_rows_launch(dtype: torch.dtype, blocks: int, sizes: tuple[int, ...]) -> Launch:
    bm, bn, bk, warps, stages = PLAIN[dtype]
    grid = blocks * (BLOCK // bm) * triton.cdiv(sizes[0], bn)
    return Launch(
        _plain_rows_kernel, grid, sizes, num_warps=warps, num_stages=stages, BM=bm, BN=bn, BK=bk, SIZE=BLOCK
    )  # fmt: skip


def plain_wgrad(a: Tensor, b: Tensor, out: Tensor, groups: Groups, accumulate: bool) -> None:
    sizes = *out.shape[1:], *a.stride(), *b.stride()
    _plain_depth_launch(a.dtype, groups.number, sizes, accumulate)(a, b, out, groups.start)


@lru_cache(maxsize=4096)
def _plain_depth_launch(dtype: torch.dtype, groups: int, sizes: tuple[int, ...], accumulate: bool) -> Launch:
    bm, bn, bk, warps, stages = PLAIN[dtype]
    grid = groups * triton.cdiv(sizes[0], bm) * triton.cdiv(sizes[1], bn)
    return Launch(
        _plain_depth_kernel, grid, sizes, num_warps=warps, num_stages=stages, ADD=accumulate, BM=bm, BN=bn, BK=bk
    )  # fmt: skip
