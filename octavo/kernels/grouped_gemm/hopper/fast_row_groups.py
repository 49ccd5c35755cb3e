"""Rows in groups, each multiplied by its own matrix, with sums that stay in the tensor cores: fast accumulation."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.kernels.grouped_gemm.hopper.row_groups import halves_of, load_rows, multiply_whole_rows
from octavo.kernels.grouped_gemm.hopper.tiles import TILE, barriers, is_wide, processors, room_for_tiles, tiles_of
from octavo.kernels.grouped_gemm.scale_strides import grouped_strides, stacked_strides
from octavo.launch import TiledLaunch, Tiles
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK
from octavo.quant.qtensor import QTensor


@gluon.jit
def fast_rows_kernel(
    a, b, out, whole, bias, scales, a_scale, b_scale, owner, block, source, live,
    G, N, K, a_scale_group, b_scale_group, group_rows, group_columns,
    A_EACH: gl.constexpr, B_EACH: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    left, right = room_for_tiles(a, b, COUNT)
    ready, empty = barriers(COUNT)
    gl.warp_specialize(
        [
            (multiply_whole_rows, (0, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner,
                                   block, source, live, G, N, K, a_scale_group, b_scale_group, A_EACH, B_EACH,
                                   True)),
            (multiply_whole_rows, (1, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner,
                                   block, source, live, G, N, K, a_scale_group, b_scale_group, A_EACH, B_EACH,
                                   True)),
            (load_rows, (a, b, left, right, ready, empty, owner, block, None, G, N, K, group_rows, group_columns,
                         False)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


# -- launches ----------------------------------------------------------------------------------------------------------


def fast_rows(
    a: GroupedTensor, b: QTensor, out: Tensor, bias: Tensor | None, scales: Tensor | None, height: int, along: str
) -> None:
    groups, left, right = a.groups, grouped_strides(a), stacked_strides(b, height, along)
    programs = processors(out.device)
    across, stages = fast_tile(out.shape[1], groups.owner.shape[0], programs)
    apart = (height, 0) if along == "rows" else (0, height)
    sizes = groups.number, out.shape[1], a.q.columns, left.group, right.group, *apart
    _launch(programs, sizes, left.row == 1, right.row == 1, stages)(
        tiles_of(a.q.codes), Tiles(b.codes, [across, BLOCK], TILE), out, halves_of(out), bias, scales,
        a.q.scale, b.scale, groups.owner, groups.block, groups.source, groups.live,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _launch(programs: int, sizes: tuple[int, ...], a_each: bool, b_each: bool, stages: int) -> TiledLaunch:
    return TiledLaunch(
        fast_rows_kernel, programs, sizes, num_warps=4, A_EACH=a_each, B_EACH=b_each, COUNT=stages
    )  # fmt: skip


def fast_tile(n: int, blocks: int, programs: int) -> tuple[int, int]:
    """Return the columns of a result tile, and how many buffers fit beside the room for its rows; there are at most
    `blocks` blocks of rows. The bits of a sum do not depend on the choice."""
    # without a second sum to promote the first into, a warpgroup has registers for 64x256. For each product such a tile
    # reads a quarter less from L2, and moves a fifth less through shared memory
    return (256, 4) if is_wide(n, blocks, programs) else (128, 6)
