"""Totals of the partial sums that programs write for rows in groups. Additions have a fixed order.

group_sums      sums down the columns of tiles, over each group: the gradient of a bias for each group
row_sums        sums along the rows of tiles, over all tiles of a row: the gradient of row scales
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.launch import Launch
from octavo.quant.groups import BLOCK, Groups

DOWN, ACROSS, WARPS = 32, 128, 4  # of a tile of partial sums


@triton.jit
def _group_sums_kernel(parts, out, block, N, EACH: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    across = tl.cdiv(N, ACROSS)
    g, n = tl.program_id(0) // across, tl.program_id(0) % across
    columns = n * ACROSS + tl.arange(0, ACROSS)
    # a group's parts are those of its own blocks: none is of two groups
    first, end = tl.load(block + g) * EACH, tl.load(block + g + 1) * EACH
    total = tl.zeros((DOWN, ACROSS), tl.float32)
    for row in range(first, end, DOWN):
        rows = row + tl.arange(0, DOWN)
        live = (rows < end)[:, None] & (columns < N)[None, :]
        total += tl.load(parts + rows.to(tl.int64)[:, None] * N + columns[None, :], mask=live, other=0.0)
    tl.store(out + g.to(tl.int64) * N + columns, tl.sum(total, 0).to(out.dtype.element_ty), mask=columns < N)


def group_sums(parts: Tensor, groups: Groups, rows: int, dtype: torch.dtype) -> Tensor:
    """Sum parts [padded / rows, N], one for every so many rows of the padded layout, to [G, N]."""
    out = torch.empty(groups.number, parts.shape[1], dtype=dtype, device=parts.device)
    _group_sums_launch(groups.number, parts.shape[1], BLOCK // rows)(parts, out, groups.block)
    return out


@lru_cache(maxsize=4096)
def _group_sums_launch(groups: int, n: int, each: int) -> Launch:
    grid = groups * triton.cdiv(n, ACROSS)
    return Launch(_group_sums_kernel, grid, (n,), num_warps=WARPS, EACH=each, DOWN=DOWN, ACROSS=ACROSS)


@triton.jit
def _row_sums_kernel(
    parts, out, source_row, used_rows, TILES, M, SIZE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * ACROSS + tl.arange(0, ACROSS)  # of the padded layout, all in one block
    block, within = tl.program_id(0) * ACROSS // SIZE, rows % SIZE
    used = tl.load(used_rows + block)
    # rows of a block that its group does not have
    if tl.min(within, 0) >= used:
        return
    total = tl.zeros((DOWN, ACROSS), tl.float32)
    for first in range(0, TILES, DOWN):
        tiles = first + tl.arange(0, DOWN)
        live = (tiles < TILES)[:, None] & (within < used)[None, :]
        total += tl.load(parts + tiles.to(tl.int64)[:, None] * M + rows[None, :], mask=live, other=0.0)
    at = tl.load(source_row + block) + within
    tl.store(out + at, tl.sum(total, 0).to(out.dtype.element_ty), mask=within < used)


def row_sums(parts: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Sum parts [tiles, padded] to packed rows [rows], with a zero tail."""
    # zeros for the tail, which no program writes
    out = torch.zeros(groups.rows, dtype=dtype, device=parts.device)
    _row_sums_launch(*parts.shape)(parts, out, groups.source, groups.live)
    return out


ROWS_ACROSS = 32  # rows of a program: few, so that there are many programs


@lru_cache(maxsize=4096)
def _row_sums_launch(tiles: int, padded: int) -> Launch:
    return Launch(
        _row_sums_kernel, padded // ROWS_ACROSS, (tiles, padded), num_warps=WARPS,
        SIZE=BLOCK, DOWN=DOWN, ACROSS=ROWS_ACROSS,
    )  # fmt: skip
