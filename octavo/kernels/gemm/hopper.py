"""Products of bfloat16 matrices on Hopper, in Gluon: y = a · bᵀ, or one such product for each group of columns.

Decoded codes are multiplied here rather than by torch: cuBLAS may add the parts of a split contraction in bfloat16,
unless a global setting forbids it, and cannot multiply a sum by NVFP4's global scales before it is rounded. Here a sum
stays in float32, takes its factors and the bias, and is rounded once.

The kernel is made of the parts of `octavo.kernels.grouped_gemm.hopper`: one producer warp, two warpgroups of 64 rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from octavo._torch.triton import async_load
from octavo.kernels.grouped_gemm.hopper.contraction import write_depth
from octavo.kernels.grouped_gemm.hopper.plain import (
    DEPTH,
    NARROW,
    plain_tile,
    plain_tiles,
    sum_of_products,
)
from octavo.kernels.grouped_gemm.hopper.row_groups import write_rows
from octavo.kernels.grouped_gemm.hopper.tiles import (
    SIZE,
    SPAN,
    barriers,
    following,
    processors,
    room_for_tiles,
)
from octavo.launch import TiledLaunch
from octavo.quant.groups import BLOCK

Globals = tuple[Tensor | None, Tensor | None]  # the global scales of a and b, one for each group


@gluon.jit
def _place(t, down, across):
    """Return (group, tile down, tile across) of a tile's number. SPAN tiles down go all the way across before the next
    ones, so that both operands stay in the cache."""
    group = t // (down * across)
    t -= group * down * across
    lead = t // (across * SPAN) * SPAN
    # the last span may be lower
    height = gl.minimum(down - lead, SPAN)
    t -= lead * across
    column = t // height
    return group, lead + t - column * height, column


@gluon.jit
def _range_of(group, block, K):
    """Return the first column of a group's contraction, and its length."""
    if block is not None:
        first = gl.load(block + group)
        return first * SIZE, (gl.load(block + group + 1) - first) * SIZE
    else:
        return gl.to_tensor(0), K


@gluon.jit
def _load(a, b, left, right, ready, empty, block, G, M, N, K):
    DEEP: gl.constexpr = left.shape[2]
    ACROSS: gl.constexpr = right.shape[1]
    down, across = gl.cdiv(M, SIZE), gl.cdiv(N, ACROSS)
    # buffers begin empty: a wait for the phase before the first one passes at once
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for t in range(gl.program_id(0), G * down * across, gl.num_programs(0)):
        group, row, column = _place(t, down, across)
        first, depth = _range_of(group, block, K)
        for i in range(0, depth, DEEP):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes)
            async_load(a, [row * SIZE, first + i], bar, left.index(stage))
            async_load(b, [column * ACROSS, first + i], bar, right.index(stage))
            stage, phase = following(stage, phase, left.shape[0])


@gluon.jit
def _multiply(
    HALF: gl.constexpr, left, right, ready, empty, out, bias, a_global, b_global, block, G, M, N, K, ADD: gl.constexpr
):
    """Multiply one half of each tile's rows. The global scales of a group without rows are not read: its sum is
    zero."""
    ACROSS: gl.constexpr = right.shape[1]
    down, across = gl.cdiv(M, SIZE), gl.cdiv(N, ACROSS)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for t in range(gl.program_id(0), G * down * across, gl.num_programs(0)):
        group, row, column = _place(t, down, across)
        _, depth = _range_of(group, block, K)
        if a_global is not None:  # asked for before the products
            level2 = gl.load(a_global + group, mask=depth > 0, other=0.0)
            level2 *= gl.load(b_global + group, mask=depth > 0, other=0.0)
        total, stage, phase = sum_of_products(HALF, left, right, ready, empty, stage, phase, depth, False)
        if a_global is not None:
            total *= level2
        if ADD:
            write_depth(HALF, total, out, group, row, column, M, N, ADD)
        else:
            start, count = group * M + row * SIZE, M - row * SIZE
            write_rows(HALF, total, out, None, None, bias, None, start, count, group, column, N)


@gluon.jit
def product_kernel(a, b, out, bias, a_global, b_global, block, G, M, N, K, ADD: gl.constexpr, COUNT: gl.constexpr):
    """Compute out [G, M, N] of a [M, columns] and b [N, columns], over K columns, or over those of each group."""
    left, right = room_for_tiles(a, b, COUNT)
    ready, empty = barriers(COUNT)
    gl.warp_specialize(
        [
            (_multiply, (0, left, right, ready, empty, out, bias, a_global, b_global, block, G, M, N, K, ADD)),
            (_multiply, (1, left, right, ready, empty, out, bias, a_global, b_global, block, G, M, N, K, ADD)),
            (_load, (a, b, left, right, ready, empty, block, G, M, N, K)),
        ],
        [4, 1],
        [232, 40],
    )


def gemm(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None, level2: Globals) -> Tensor:
    """Return a · bᵀ, times the global scales, plus the bias. Rows of both begin at multiples of 16 bytes."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    _launch(a, b, out, bias, level2, None, (1, *out.shape), False)
    return out


def wgrad(a: Tensor, b: Tensor, out: Tensor, level2: Globals, block: Tensor, accumulate: bool) -> None:
    """Fill `out` [G, M, N], or add to it: each group is contracted over its own blocks of 128 columns, from block[g] to
    block[g + 1]. a and b may have more rows than M and N."""
    _launch(a, b, out, None, level2, block, (*out.shape,), accumulate)


def _launch(
    a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, level2: Globals, block: Tensor | None,
    sizes: tuple[int, ...], accumulate: bool,
) -> None:  # fmt: skip
    programs = processors(out.device)
    across, stages = _tile(out, sizes, programs)
    _product_launch(programs, (*sizes, a.shape[1]), accumulate, stages)(
        plain_tiles(a, [BLOCK, DEPTH]), plain_tiles(b, [across, DEPTH]), out, bias, *level2, block
    )


def _tile(out: Tensor, sizes: tuple[int, ...], programs: int) -> tuple[int, int]:
    """Return the columns of a result tile and how many buffers fit beside it: narrow if wide tiles are so few that
    multiprocessors would be idle."""
    across, stages = plain_tile(out)
    tiles = sizes[0] * -(-sizes[1] // BLOCK) * -(-sizes[2] // across)
    return (across, stages) if tiles >= programs else NARROW


@lru_cache(maxsize=4096)
def _product_launch(programs: int, sizes: tuple[int, ...], accumulate: bool, stages: int) -> TiledLaunch:
    return TiledLaunch(product_kernel, programs, sizes, num_warps=4, ADD=accumulate, COUNT=stages)
