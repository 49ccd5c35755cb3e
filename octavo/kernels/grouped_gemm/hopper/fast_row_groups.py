"""Rows in groups, each multiplied by its own matrix, with sums that stay in the tensor cores: fast accumulation."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from octavo._torch.triton import wait_until_read
from octavo.kernels.grouped_gemm.hopper.row_groups import halves_of, load_rows, pass_over, write_rows
from octavo.kernels.grouped_gemm.hopper.tiles import (
    SIZE,
    TILE,
    barriers,
    begun,
    following,
    is_wide,
    operands,
    processors,
    room_for_tiles,
    scaled,
    scales_ahead,
    sum_layout,
    tile_of_rows,
    tiles_of,
)
from octavo.kernels.grouped_gemm.scale_strides import grouped_strides, stacked_strides
from octavo.launch import TiledLaunch, Tiles
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK
from octavo.quant.qtensor import QTensor


@gluon.jit
def _sum(HALF: gl.constexpr, left, right, ready, empty, stage, phase, steps):
    """The sum of so many products, one at least, and the buffer after them. Each is begun before the one before it is
    waited for, so that the tensor cores always have work."""
    total = begun(HALF, left, right, ready, stage, phase)
    for _ in range(1, steps):
        last = stage
        stage, phase = following(stage, phase, left.shape[0])
        mbarrier.wait(ready.index(stage), phase)
        mine, across = operands(HALF, left, right, stage)
        total = warpgroup_mma(mine, across, total, is_async=True)
        total = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[total]))
        mbarrier.arrive(empty.index(last), count=1)
    done = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = following(stage, phase, left.shape[0])
    return done, stage, phase


@gluon.jit
def _multiply(
    HALF: gl.constexpr, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner, block, source,
    live, G, N, K, a_scale_group, b_scale_group, A_EACH: gl.constexpr, B_EACH: gl.constexpr,
):  # fmt: skip
    """One half of each tile's rows. A wide sum is written in two goes, for which the room of one is enough."""
    H: gl.constexpr = SIZE // 2
    ACROSS: gl.constexpr = right.shape[1]
    PARTS: gl.constexpr = ACROSS // SIZE
    SUM: gl.constexpr = sum_layout()
    room = None
    if whole is not None:
        room = gl.allocate_shared_memory(whole.dtype, [H, SIZE], whole.layout)
    across, steps = gl.cdiv(N, ACROSS), gl.cdiv(K, SIZE)
    tiles = gl.load(block + G) * across
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    lanes = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, SUM))
    group, row, column = tile_of_rows(gl.program_id(0), tiles, owner, block, across)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        next_group, next_row, next_column = tile_of_rows(t + gl.num_programs(0), tiles, owner, block, across)
        start, count = gl.load(source + row), gl.load(live + row)
        if A_EACH:
            at_a = a_scale + row * SIZE
        else:
            at_a = a_scale + group * a_scale_group
        at_b = b_scale + group * b_scale_group
        of_rows, of_columns = scales_ahead(at_a, at_b, lanes, SIZE, N, A_EACH, B_EACH)
        if count > HALF * H:
            total, stage, phase = _sum(HALF, left, right, ready, empty, stage, phase, steps)
            for part in gl.static_range(PARTS):
                if PARTS == 1:
                    y = total
                else:  # columns of 128 and more are in registers of their own: no value moves
                    y = total.reshape((H, 2, SIZE)).permute((0, 2, 1)).split()[part]
                    y = gl.convert_layout(y, SUM, assert_trivial=True)
                at = column * PARTS + part
                columns = at * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, SUM))
                y = scaled(y, of_rows, of_columns, at_b, columns, N, B_EACH)
                write_rows(HALF, y, out, whole, room, bias, scales, start, count, group, at, N)
        else:
            stage, phase = pass_over(ready, empty, stage, phase, steps, left.shape[0])
        group, row, column = next_group, next_row, next_column
    if whole is not None:
        wait_until_read()


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
            (_multiply, (0, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner, block, source,
                         live, G, N, K, a_scale_group, b_scale_group, A_EACH, B_EACH)),
            (_multiply, (1, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner, block, source,
                         live, G, N, K, a_scale_group, b_scale_group, A_EACH, B_EACH)),
            (load_rows, (a, b, left, right, ready, empty, owner, block, G, N, K, group_rows, group_columns)),
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
    """Returns the columns of a result tile, and how many buffers fit beside the room for its rows; there are at most
    `blocks` blocks of rows. The bits of a sum do not depend on the choice."""
    return (256, 4) if is_wide(n, blocks, programs) else (128, 6)
