"""Unquantized rows in groups: multiply each group by its own matrix."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from octavo.kernels.grouped_gemm.hopper.row_groups import load_rows, write_rows
from octavo.kernels.grouped_gemm.hopper.tiles import (
    barriers,
    can_be_copied,
    following,
    processors,
    room_for_tiles,
    sum_layout,
    tile_of_rows,
)
from octavo.launch import TiledLaunch, Tiles
from octavo.quant.groups import BLOCK, Groups


@gluon.jit
def sum_of_products(HALF: gl.constexpr, left, right, ready, empty, stage, phase, depth, TRANSPOSED: gl.constexpr):
    """Return the sum of one half of a tile over so many elements of the contraction, and the buffer after them."""
    H: gl.constexpr = left.shape[1] // 2
    DEEP: gl.constexpr = left.shape[2]
    ACROSS: gl.constexpr = right.shape[2] if TRANSPOSED else right.shape[1]
    # no promotion: bfloat16 products are summed in float32 by the tensor cores
    total = gl.zeros((H, ACROSS), gl.float32, layout=sum_layout(ACROSS, 16))
    for _ in range(0, depth, DEEP):  # the other warpgroup multiplies while this one waits
        mbarrier.wait(ready.index(stage), phase)
        mine = left.index(stage).slice(HALF * H, H, dim=0)
        # sixteen-bit operands may lie either way in shared memory; eight-bit ones may not
        if TRANSPOSED:
            theirs = right.index(stage)
        else:
            theirs = right.index(stage).permute((1, 0))
        begun = warpgroup_mma(mine, theirs, warpgroup_mma_init(total), is_async=True)
        total = warpgroup_mma_wait(0, deps=[begun])
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = following(stage, phase, left.shape[0])
    return total, stage, phase


@gluon.jit
def _multiply_plain(
    HALF: gl.constexpr, left, right, ready, empty, out, bias, scales, a_global, b_global, owner, block, source, live,
    G, N, K, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    ACROSS: gl.constexpr = right.shape[2] if TRANSPOSED else right.shape[1]
    across = gl.cdiv(N, ACROSS)
    tiles = gl.load(block + G) * across
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    group, row, column = tile_of_rows(gl.program_id(0), tiles, owner, block, across)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # asked for one tile ahead
        next_group, next_row, next_column = tile_of_rows(t + gl.num_programs(0), tiles, owner, block, across)
        start, count = gl.load(source + row), gl.load(live + row)
        if a_global is not None:  # asked for before the products
            # rows of a tile exist, and so its group is not empty
            level2 = gl.load(a_global + group) * gl.load(b_global + group)
        total, stage, phase = sum_of_products(HALF, left, right, ready, empty, stage, phase, K, TRANSPOSED)
        if a_global is not None:
            total *= level2
        write_rows(HALF, total, out, None, None, bias, scales, start, count, group, column, N)
        group, row, column = next_group, next_row, next_column


@gluon.jit
def plain_rows_kernel(
    a, b, out, bias, scales, a_global, b_global, owner, block, source, live, G, N, K, group_rows, group_columns,
    TRANSPOSED: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """Return b [G * N, K], or [G * K, N] if TRANSPOSED. Its matrices begin so many rows, or columns, after each
    other."""
    left, right = room_for_tiles(a, b, COUNT)
    ready, empty = barriers(COUNT)
    gl.warp_specialize(
        [
            (_multiply_plain, (0, left, right, ready, empty, out, bias, scales, a_global, b_global, owner, block,
                               source, live, G, N, K, TRANSPOSED)),
            (_multiply_plain, (1, left, right, ready, empty, out, bias, scales, a_global, b_global, owner, block,
                               source, live, G, N, K, TRANSPOSED)),
            (load_rows, (a, b, left, right, ready, empty, owner, block, source, G, N, K, group_rows, group_columns,
                         TRANSPOSED)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


# -- launches ----------------------------------------------------------------------------------------------------------

DEPTH = 64  # depth of a tile in sixteen bits: 128 bytes, the most that one copy covers
# columns of a result tile, and the buffers that fit beside it: 16 KiB for rows of a and 32 or 16 KiB for b, each
WIDE, NARROW = (256, 4), (128, 6)


def _stack(b: Tensor) -> tuple[Tensor, bool] | None:
    """Return b [G, N, K] as one matrix [G * N, K], or transposed [G * K, N], if TMA can copy its tiles; else None. A
    tile of a transposed one must not reach into the next group, whose values may be NaN."""
    for matrices, transposed in ((b, False), (b.transpose(1, 2), True)):
        # only then do the matrices follow each other without a gap
        if matrices.stride(0) == matrices.shape[1] * matrices.stride(1) and not (transposed and b.shape[2] % DEPTH):
            flat = matrices.flatten(0, 1)
            if can_be_copied(flat):
                return flat, transposed
    return None


def takes_plain_rows(a: Tensor, b: Tensor) -> bool:
    sixteen = a.dtype in (torch.bfloat16, torch.float16) and b.dtype == a.dtype
    return sixteen and can_be_copied(a) and _stack(b) is not None


def plain_rows(a: Tensor, b: Tensor, out: Tensor, groups: Groups, bias: Tensor | None, scales: Tensor | None) -> None:
    found = _stack(b)
    assert found is not None
    flat, transposed = found
    _rows(a, flat, out, groups, (bias, scales, None, None), (b.shape[2] if transposed else b.shape[1], 0), transposed)


def decoded_rows(
    a: Tensor, b: Tensor, out: Tensor, groups: Groups, factors: tuple[Tensor | None, ...], height: int, along: str
) -> None:
    """Compute `plain_rows` for one matrix b with those of the groups stacked in it: one begins `height` rows, or
    columns, after the previous one. `factors`: the bias, its scales, and the global scales of a and of b."""
    _rows(a, b, out, groups, factors, (height, 0) if along == "rows" else (0, height), False)


def _rows(
    a: Tensor, b: Tensor, out: Tensor, groups: Groups, factors: tuple[Tensor | None, ...], apart: tuple[int, int],
    transposed: bool,
) -> None:  # fmt: skip
    across, stages = plain_tile(out)
    tile = [DEPTH, across] if transposed else [across, DEPTH]
    sizes = groups.number, out.shape[1], a.shape[1], *apart
    _plain_rows_launch(processors(out.device), sizes, transposed, stages)(
        plain_tiles(a, [BLOCK, DEPTH]), plain_tiles(b, tile), out, *factors,
        groups.owner, groups.block, groups.source, groups.live,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _plain_rows_launch(programs: int, sizes: tuple[int, ...], transposed: bool, stages: int) -> TiledLaunch:
    return TiledLaunch(plain_rows_kernel, programs, sizes, num_warps=4, TRANSPOSED=transposed, COUNT=stages)


def plain_tile(out: Tensor) -> tuple[int, int]:
    """Return the columns of a result tile, which also uses shared memory, and how many buffers fit beside it."""
    n = out.shape[-1]
    # wide where it wastes few columns; float32 results take twice the shared memory
    return WIDE if out.dtype != torch.float32 and (n % 256 == 0 or n > 1024) else NARROW


def plain_layout(tile: list[int]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(tile, gl.bfloat16)


def plain_tiles(matrix: Tensor, tile: list[int]) -> Tiles:
    return Tiles(matrix, tile, plain_layout(tile))
