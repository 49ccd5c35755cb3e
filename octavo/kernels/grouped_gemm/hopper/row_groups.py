"""Rows in groups, each group multiplied by its own matrix: y and dx."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from octavo._torch.triton import async_load, async_store, wait_until_read
from octavo.kernels.grouped_gemm.hopper.tiles import (
    HALF_TILE,
    SIZE,
    STAGES,
    add_in_tensor_cores,
    add_products,
    add_unscaled,
    barriers,
    can_be_copied,
    flat_layout,
    following,
    processors,
    product,
    room_for_tiles,
    scaled,
    scales_ahead,
    sum_layout,
    tile_of_rows,
    tiles_of,
)
from octavo.kernels.grouped_gemm.scale_strides import grouped_strides, stacked_strides, whole
from octavo.launch import TiledLaunch, Tiles
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK
from octavo.quant.qtensor import QTensor


@gluon.jit
def pass_over(ready, empty, stage, phase, steps, COUNT: gl.constexpr = STAGES):
    """Give back so many buffers unused: a half without a row of the group's has nothing to multiply."""
    for _ in range(0, steps):
        mbarrier.wait(ready.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = following(stage, phase, COUNT)
    return stage, phase


@gluon.jit
def _with_bias(HALF: gl.constexpr, total, bias, scales, start, count, group, column, N):
    H: gl.constexpr = total.shape[0]
    ACROSS: gl.constexpr = total.shape[1]
    SUM: gl.constexpr = total.type.layout
    if bias is not None:
        columns = column * ACROSS + gl.arange(0, ACROSS, layout=gl.SliceLayout(0, SUM))
        at_bias = bias + group.to(gl.int64) * N + columns
        if scales is not None:
            # scales of the rows belong to the packed rows, not to the padded ones
            lanes = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, SUM))
            own = gl.load(scales + start + lanes, mask=lanes < count, other=0.0).to(gl.float32)
            total += own[:, None] * gl.load(at_bias, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        else:
            total += gl.load(at_bias, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    return total


@gluon.jit
def write_rows(HALF: gl.constexpr, total, out, whole, room, bias, scales, start, count, group, column, N):
    """Write a half of a tile, with its bias, where the rows that are the group's belong. Where all of them are, the
    copy unit writes them (`whole`, from `room`), and nobody waits."""
    H: gl.constexpr = total.shape[0]
    ACROSS: gl.constexpr = total.shape[1]
    FLAT: gl.constexpr = flat_layout(ACROSS)
    total = _with_bias(HALF, total, bias, scales, start, count, group, column, N)
    if whole is not None:
        wait_until_read()  # what was there has left
        room.store(total.to(whole.dtype))
        fence_async_shared()
        # the copy unit writes whole boxes: it would write into the rows of the next group
        if count >= (HALF + 1) * H:
            async_store(whole, [start + HALF * H, column * ACROSS], room)
        else:
            _write_some(HALF, room.load(FLAT), out, start, count, column, N)
    else:
        _write_some(HALF, gl.convert_layout(total.to(out.dtype.element_ty), FLAT), out, start, count, column, N)


@gluon.jit
def _write_some(HALF: gl.constexpr, y, out, start, count, column, N):
    """Write those of a half tile's rows that are the group's."""
    H: gl.constexpr = y.shape[0]
    ACROSS: gl.constexpr = y.shape[1]
    FLAT: gl.constexpr = y.type.layout
    r = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, FLAT))
    c = column * ACROSS + gl.arange(0, ACROSS, layout=gl.SliceLayout(0, FLAT))
    at = (start + r).to(gl.int64)[:, None] * N + c[None, :]
    gl.store(out + at, y, mask=(r < count)[:, None] & (c < N)[None, :])


@gluon.jit
def load_rows(
    a, b, left, right, ready, empty, owner, block, source, G, N, K, group_rows, group_columns, TRANSPOSED: gl.constexpr
):
    """Load the tiles of a and b for each tile of the result, in turn. With `source`, a's rows are packed: those of a
    tile past the group's end are multiplied like the others, and not written."""
    DEEP: gl.constexpr = left.shape[2]
    ACROSS: gl.constexpr = right.shape[2] if TRANSPOSED else right.shape[1]
    across = gl.cdiv(N, ACROSS)
    total = gl.load(block + G) * across
    # buffers begin empty: a wait for the phase before the first one passes at once
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    group, row, column = tile_of_rows(gl.program_id(0), total, owner, block, across)
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        # asked for one tile ahead: its loads and divisions are done while this tile is copied
        next_group, next_row, next_column = tile_of_rows(t + gl.num_programs(0), total, owner, block, across)
        if source is not None:
            start = gl.load(source + row)
        else:
            start = row * SIZE
        for k in range(0, K, DEEP):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes)
            async_load(a, [start, k], bar, left.index(stage))
            if TRANSPOSED:
                at = [group * group_rows + k, column * ACROSS]
            else:
                at = [group * group_rows + column * ACROSS, group * group_columns + k]
            async_load(b, at, bar, right.index(stage))
            stage, phase = following(stage, phase, left.shape[0])
        group, row, column = next_group, next_row, next_column


@gluon.jit
def _two_scales(at_a, at_b, a_scale_step, b_scale_step, step, steps):
    """Return the factors of the scales of two products, from this step on, asked for two products ahead. They are
    multiplied only when they are needed: that waits for them."""
    # past the last product any scale will do: it multiplies nothing
    second = gl.minimum(step + 1, steps - 1)
    first = gl.minimum(step, steps - 1)
    a, b = gl.load(at_a + gl.cast(first, gl.int64) * a_scale_step), gl.load(at_b + first * b_scale_step)
    return a, b, gl.load(at_a + gl.cast(second, gl.int64) * a_scale_step), gl.load(at_b + second * b_scale_step)


@gluon.jit
def _add_scaled_products(
    HALF: gl.constexpr, left, right, ready, empty, stage, phase, steps, a, b, c, d, at_a, at_b, a_scale_step,
    b_scale_step,
):  # fmt: skip
    """Return the sum of so many products, each by the scales of its 128, a * b of the first and c * d of the second,
    and the buffer after them. Two at a time, which ends with none begun: in turn, as in `add_products`, they would need
    more registers than there are."""
    total = gl.zeros((SIZE // 2, SIZE), gl.float32, layout=sum_layout())
    for step in range(1, steps, 2):
        mbarrier.wait(ready.index(stage), phase)
        part = product(HALF, left, right, stage)
        second, second_phase = following(stage, phase)
        mbarrier.wait(ready.index(second), second_phase)
        other = product(HALF, left, right, second)
        # the factors of these products came two products ago; those of the next two are asked for now
        now, then = a * b, c * d
        a, b, c, d = _two_scales(at_a, at_b, a_scale_step, b_scale_step, step + 1, steps)
        # the second product runs in the tensor cores while the first is scaled and added
        done = warpgroup_mma_wait(1, deps=[part])
        mbarrier.arrive(empty.index(stage), count=1)
        total += done * now[:, None]
        done = warpgroup_mma_wait(0, deps=[other])
        mbarrier.arrive(empty.index(second), count=1)
        total += done * then[:, None]
        stage, phase = following(second, second_phase)
    if steps % 2 == 1:
        mbarrier.wait(ready.index(stage), phase)
        part = product(HALF, left, right, stage)
        now = a * b
        done = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage), count=1)
        total += done * now[:, None]
        stage, phase = following(stage, phase)
    return total, stage, phase


@gluon.jit
def _multiply_rows(
    HALF: gl.constexpr, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner, block, source,
    live, G, N, K, a_scale_step, b_scale_row, b_scale_step, group_rows, group_columns,
):  # fmt: skip
    """Multiply one half of each tile's rows, where a scale reaches 128 far."""
    H: gl.constexpr = SIZE // 2
    SUM: gl.constexpr = sum_layout()
    room = None
    if whole is not None:
        room = gl.allocate_shared_memory(whole.dtype, [H, SIZE], whole.layout)
    across, steps = gl.cdiv(N, SIZE), gl.cdiv(K, SIZE)
    tiles = gl.load(block + G) * across
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    lanes = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, SUM))
    # a group's matrix begins so many blocks of scales down, or across if it is stacked by columns
    b_group = (group_rows // SIZE) * b_scale_row + (group_columns // SIZE) * b_scale_step
    group, row, column = tile_of_rows(gl.program_id(0), tiles, owner, block, across)
    at_a, at_b = a_scale + row * SIZE + lanes, b_scale + group * b_group + column * b_scale_row
    a, b, c, d = _two_scales(at_a, at_b, a_scale_step, b_scale_step, 0, steps)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        next_group, next_row, next_column = tile_of_rows(t + gl.num_programs(0), tiles, owner, block, across)
        start, count = gl.load(source + row), gl.load(live + row)
        # half of a tile may lie past the group's end
        if count > HALF * H:
            total, stage, phase = _add_scaled_products(
                HALF, left, right, ready, empty, stage, phase, steps, a, b, c, d, at_a, at_b, a_scale_step, b_scale_step
            )
            at_a, at_b = a_scale + next_row * SIZE + lanes, b_scale + next_group * b_group + next_column * b_scale_row
            a, b, c, d = _two_scales(at_a, at_b, a_scale_step, b_scale_step, 0, steps)
            write_rows(HALF, total, out, whole, room, bias, scales, start, count, group, column, N)
        else:
            stage, phase = pass_over(ready, empty, stage, phase, steps)
            at_a, at_b = a_scale + next_row * SIZE + lanes, b_scale + next_group * b_group + next_column * b_scale_row
            a, b, c, d = _two_scales(at_a, at_b, a_scale_step, b_scale_step, 0, steps)
        group, row, column = next_group, next_row, next_column
    if whole is not None:
        wait_until_read()


@gluon.jit
def multiply_whole_rows(
    HALF: gl.constexpr, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner, block, source,
    live, G, N, K, a_scale_group, b_scale_group, A_EACH: gl.constexpr, B_EACH: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    """Multiply one half of each tile's rows, where a scale reaches over all of K and multiplies the sum. A sum in the
    tensor cores (FAST) may be wide: it is written in two goes, for which the room of one is enough."""
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
        # before the products, which take long enough for the scales to come
        of_rows, of_columns = scales_ahead(at_a, at_b, lanes, SIZE, N, A_EACH, B_EACH)
        if count > HALF * H:
            if FAST:
                total, stage, phase = add_in_tensor_cores(HALF, left, right, ready, empty, stage, phase, steps)
            else:
                total, stage, phase = add_products(
                    HALF, left, right, None, None, ready, empty, stage, phase, steps, add_unscaled
                )
            # 128 columns at a time, through the room of one: the rest of shared memory is for buffers
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
def rows_kernel(
    a, b, out, whole, bias, scales, a_scale, b_scale, owner, block, source, live,
    G, N, K, a_scale_step, b_scale_row, b_scale_step, group_rows, group_columns,
):  # fmt: skip
    left, right = room_for_tiles(a, b)
    ready, empty = barriers()
    # 384 threads begin with 168 registers each, 64,512 of the 65,536 that there are. The 128 threads of the loader, of
    # which one warp works, give up 128 each, and the two warpgroups that multiply take 64 each, in all kernels here
    gl.warp_specialize(
        [
            (_multiply_rows, (0, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner, block,
                              source, live, G, N, K, a_scale_step, b_scale_row, b_scale_step, group_rows,
                              group_columns)),
            (_multiply_rows, (1, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner, block,
                              source, live, G, N, K, a_scale_step, b_scale_row, b_scale_step, group_rows,
                              group_columns)),
            (load_rows, (a, b, left, right, ready, empty, owner, block, None, G, N, K, group_rows, group_columns,
                         False)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def whole_rows_kernel(
    a, b, out, whole, bias, scales, a_scale, b_scale, owner, block, source, live,
    G, N, K, a_scale_group, b_scale_group, group_rows, group_columns, A_EACH: gl.constexpr, B_EACH: gl.constexpr,
):  # fmt: skip
    left, right = room_for_tiles(a, b)
    ready, empty = barriers()
    gl.warp_specialize(
        [
            (multiply_whole_rows, (0, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner,
                                   block, source, live, G, N, K, a_scale_group, b_scale_group, A_EACH, B_EACH,
                                   False)),
            (multiply_whole_rows, (1, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner,
                                   block, source, live, G, N, K, a_scale_group, b_scale_group, A_EACH, B_EACH,
                                   False)),
            (load_rows, (a, b, left, right, ready, empty, owner, block, None, G, N, K, group_rows, group_columns,
                         False)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


# -- launches ----------------------------------------------------------------------------------------------------------


def halves_of(out: Tensor) -> Tiles | None:
    """Return `out` [rows, N] for TMA to write by half tiles; None for float32 or unaligned rows."""
    # TMA takes rows that begin at multiples of 16 bytes
    if out.dtype == torch.float32 or out.shape[1] % 8 or out.data_ptr() % 16:
        return None
    return Tiles(out, [BLOCK // 2, BLOCK], HALF_TILE)


def takes_rows(a: GroupedTensor, b: QTensor) -> bool:
    return can_be_copied(a.q.codes) and can_be_copied(b.codes)


def rows(
    a: GroupedTensor, b: QTensor, out: Tensor, bias: Tensor | None, scales: Tensor | None, height: int, along: str
) -> None:
    groups, left, right = a.groups, grouped_strides(a), stacked_strides(b, height, along)
    tensors = (
        tiles_of(a.q.codes), tiles_of(b.codes), out, halves_of(out), bias, scales, a.q.scale, b.scale,
        groups.owner, groups.block, groups.source, groups.live,
    )  # fmt: skip
    sizes = groups.number, out.shape[1], a.q.columns
    apart, programs = (height, 0) if along == "rows" else (0, height), processors(out.device)
    if whole(a.q.spec):
        steps = (left.group, right.group)
        launch = _whole_rows_launch(programs, (*sizes, *steps, *apart), left.row == 1, right.row == 1)
    else:
        launch = _rows_launch(programs, (*sizes, left.block, right.row, right.block, *apart))
    launch(*tensors)


@lru_cache(maxsize=4096)
def _rows_launch(programs: int, sizes: tuple[int, ...]) -> TiledLaunch:
    return TiledLaunch(rows_kernel, programs, sizes, num_warps=4)


@lru_cache(maxsize=4096)
def _whole_rows_launch(programs: int, sizes: tuple[int, ...], a_each: bool, b_each: bool) -> TiledLaunch:
    return TiledLaunch(whole_rows_kernel, programs, sizes, num_warps=4, A_EACH=a_each, B_EACH=b_each)
