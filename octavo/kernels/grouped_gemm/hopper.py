"""Grouped GEMMs for Hopper's tensor cores, in Gluon: one producer warp, two warpgroups that multiply.

The producer copies tiles of codes to shared memory (TMA) as buffers become free; each warpgroup owns 64 rows of a
128x128 tile of the result. Both wait for the same buffers and otherwise run free of each other: while one scales and
adds what it has multiplied, the other multiplies. A product of FP8 covers 128 of the contraction, which is as far as
the tensor cores' own sum can be trusted; it is then added in float32, scaled before where a scale reaches 128 far, or
at the end where it reaches over all of the contraction. Sums of unquantized products stay in the tensor cores.

Programs are as many as the chip has processors. They take tiles by number until there are none, and find out on the
device which group a number belongs to: how many tiles there are depends on the groups, the grid does not.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import cache, lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from octavo.kernels.grouped_gemm.scales import own, stacked, whole
from octavo.launch import TiledLaunch, Tiles
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.qtensor import QTensor

SIZE = gl.constexpr(BLOCK)  # of a tile, every way
STAGES = gl.constexpr(5)  # buffers of both operands, 32 KiB each, in the 227 KiB that a program may have
SPAN = gl.constexpr(8)  # row blocks whose tiles are taken together, so that what they share stays in the cache


@gluon.constexpr_function
def _sum_layout(width=BLOCK, bits=8):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 256 // bits])


@gluon.constexpr_function
def _flat_layout(width=BLOCK):
    """Eight neighbours of a row to a thread: sixteen bytes of bfloat16."""
    return gl.BlockedLayout([1, 8], [32 // (width // 8), width // 8], [4, 1], [1, 0])


@gluon.jit
def _tile_of_rows(t, total, owner, block, across):
    """Tile number -> (group, row block, column tile). Within a group, SPAN row blocks at a time, columns outermost.
    Any number will do: it is asked for one tile ahead, so that nobody waits for the answer."""
    t = gl.maximum(gl.minimum(t, total - 1), 0)
    group = gl.maximum(gl.load(owner + t // across), 0)
    first = gl.load(block + group)
    count = gl.load(block + group + 1) - first
    local = t - first * across
    lead = (local // (SPAN * across)) * SPAN
    height = gl.maximum(gl.minimum(count - lead, SPAN), 1)
    within = local % (SPAN * across)
    return group, first + lead + within % height, within // height


@gluon.jit
def _next(stage, phase, COUNT: gl.constexpr = STAGES):
    """The buffer after this one; the phase flips where they start over."""
    wraps = stage == COUNT - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _codes(a, b):
    """Shared memory for tiles of both operands."""
    left = gl.allocate_shared_memory(a.dtype, [STAGES, SIZE, SIZE], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES, SIZE, SIZE], b.layout)
    return left, right


@gluon.jit
def _barriers(COUNT: gl.constexpr = STAGES):
    """When a buffer is full, and when both warpgroups are done with it."""
    ready = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return ready, empty


@gluon.jit
def _product(HALF: gl.constexpr, left, right, stage):
    """One half of a tile's rows by the tile across, begun."""
    H: gl.constexpr = SIZE // 2
    zero = gl.zeros((H, SIZE), gl.float32, layout=_sum_layout())
    mine = left.index(stage).slice(HALF * H, H, dim=0)
    across = right.index(stage).permute((1, 0))
    return warpgroup_mma(mine, across, warpgroup_mma_init(zero), use_acc=False, is_async=True)


@gluon.jit
def _add_products(HALF: gl.constexpr, left, right, ready, empty, stage, phase, steps):
    """The sum of so many products, unscaled; and the buffer after them."""
    total = gl.zeros((SIZE // 2, SIZE), gl.float32, layout=_sum_layout())
    for _ in range(1, steps, 2):  # two at a time: the second is made while the first is added
        mbarrier.wait(ready.index(stage), phase)
        part = _product(HALF, left, right, stage)
        second, second_phase = _next(stage, phase)
        mbarrier.wait(ready.index(second), second_phase)
        other = _product(HALF, left, right, second)
        done = warpgroup_mma_wait(1, deps=[part])
        mbarrier.arrive(empty.index(stage), count=1)
        total += done
        done = warpgroup_mma_wait(0, deps=[other])
        mbarrier.arrive(empty.index(second), count=1)
        total += done
        stage, phase = _next(second, second_phase)
    if steps % 2 == 1:
        mbarrier.wait(ready.index(stage), phase)
        done = warpgroup_mma_wait(0, deps=[_product(HALF, left, right, stage)])
        mbarrier.arrive(empty.index(stage), count=1)
        total += done
        stage, phase = _next(stage, phase)
    return total, stage, phase


@gluon.jit
def _scaled(total, a_scale, b_scale, rows, columns, M, N, A_EACH: gl.constexpr, B_EACH: gl.constexpr):
    """A sum by the scales of its rows and its columns; or by one of all rows, or columns, unless EACH has its own.
    Where there are no rows or columns, nothing is read."""
    if A_EACH:
        total = total * gl.load(a_scale + rows, mask=rows < M, other=0.0)[:, None]
    else:
        total = total * gl.load(a_scale, mask=M > 0, other=0.0)
    if B_EACH:
        total = total * gl.load(b_scale + columns, mask=columns < N, other=0.0)[None, :]
    else:
        total = total * gl.load(b_scale, mask=N > 0, other=0.0)
    return total


@gluon.jit
def _pass_over(ready, empty, stage, phase, steps):
    """Give back so many buffers unused: a half without a row of the group's has nothing to multiply."""
    for _ in range(0, steps):
        mbarrier.wait(ready.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = _next(stage, phase)
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
            lanes = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, SUM))
            own = gl.load(scales + start + lanes, mask=lanes < count, other=0.0).to(gl.float32)
            total += own[:, None] * gl.load(at_bias, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        else:
            total += gl.load(at_bias, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    return total


@gluon.jit
def _write_rows(HALF: gl.constexpr, total, out, whole, room, bias, scales, start, count, group, column, N):
    """A half of a tile, with its bias, where the rows that are the group's belong. Where all of them are, the copy unit
    writes them (`whole`, from `room`), and nobody waits."""
    H: gl.constexpr = total.shape[0]
    ACROSS: gl.constexpr = total.shape[1]
    FLAT: gl.constexpr = _flat_layout(ACROSS)
    total = _with_bias(HALF, total, bias, scales, start, count, group, column, N)
    if whole is not None:
        tma.store_wait(0)  # what was there has left
        room.store(total.to(whole.dtype))
        fence_async_shared()
        if count >= (HALF + 1) * H:
            tma.async_copy_shared_to_global(whole, [start + HALF * H, column * ACROSS], room)
        else:
            _write_some(HALF, room.load(FLAT), out, start, count, column, N)
    else:
        _write_some(HALF, gl.convert_layout(total.to(out.dtype.element_ty), FLAT), out, start, count, column, N)


@gluon.jit
def _write_some(HALF: gl.constexpr, y, out, start, count, column, N):
    """Those of its rows that are the group's."""
    H: gl.constexpr = y.shape[0]
    ACROSS: gl.constexpr = y.shape[1]
    FLAT: gl.constexpr = y.type.layout
    r = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, FLAT))
    c = column * ACROSS + gl.arange(0, ACROSS, layout=gl.SliceLayout(0, FLAT))
    at = (start + r).to(gl.int64)[:, None] * N + c[None, :]
    gl.store(out + at, y, mask=(r < count)[:, None] & (c < N)[None, :])


# -- groups of rows, each by its own matrix ----------------------------------------------------------------------------


@gluon.jit
def _load_rows(a, b, left, right, ready, empty, owner, block, G, N, K, group_rows, group_columns):
    across = gl.cdiv(N, SIZE)
    total = gl.load(block + G) * across
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    group, row, column = _tile_of_rows(gl.program_id(0), total, owner, block, across)
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        next_group, next_row, next_column = _tile_of_rows(t + gl.num_programs(0), total, owner, block, across)
        for k in range(0, K, SIZE):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes)
            tma.async_copy_global_to_shared(a, [row * SIZE, k], bar, left.index(stage))
            at = [group * group_rows + column * SIZE, group * group_columns + k]
            tma.async_copy_global_to_shared(b, at, bar, right.index(stage))
            stage, phase = _next(stage, phase)
        group, row, column = next_group, next_row, next_column


@gluon.jit
def _add_scaled_products(
    HALF: gl.constexpr, left, right, ready, empty, stage, phase, steps, scale, at_a, at_b, a_scale_step, b_scale_step
):
    """The sum of so many products, each by the scales of its 128; the first one's is given. And the buffer after."""
    total = gl.zeros((SIZE // 2, SIZE), gl.float32, layout=_sum_layout())
    for step in range(1, steps, 2):  # two at a time: the second is made while the first is scaled and added
        mbarrier.wait(ready.index(stage), phase)
        part = _product(HALF, left, right, stage)
        second, second_phase = _next(stage, phase)
        mbarrier.wait(ready.index(second), second_phase)
        other = _product(HALF, left, right, second)
        now = scale
        then = gl.load(at_a + gl.cast(step, gl.int64) * a_scale_step) * gl.load(at_b + step * b_scale_step)
        later = gl.minimum(step + 1, steps - 1)
        scale = gl.load(at_a + later.to(gl.int64) * a_scale_step) * gl.load(at_b + later * b_scale_step)
        done = warpgroup_mma_wait(1, deps=[part])
        mbarrier.arrive(empty.index(stage), count=1)
        total += done * now[:, None]
        done = warpgroup_mma_wait(0, deps=[other])
        mbarrier.arrive(empty.index(second), count=1)
        total += done * then[:, None]
        stage, phase = _next(second, second_phase)
    if steps % 2 == 1:
        mbarrier.wait(ready.index(stage), phase)
        done = warpgroup_mma_wait(0, deps=[_product(HALF, left, right, stage)])
        mbarrier.arrive(empty.index(stage), count=1)
        total += done * scale[:, None]
        stage, phase = _next(stage, phase)
    return total, stage, phase


@gluon.jit
def _multiply_rows(
    HALF: gl.constexpr, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner, block, source,
    live, G, N, K, a_scale_step, b_scale_row, b_scale_step, group_rows, group_columns,
):  # fmt: skip
    """One half of each tile's rows, where a scale reaches 128 far."""
    H: gl.constexpr = SIZE // 2
    SUM: gl.constexpr = _sum_layout()
    room = None
    if whole is not None:
        room = gl.allocate_shared_memory(whole.dtype, [H, SIZE], whole.layout)
    across, steps = gl.cdiv(N, SIZE), gl.cdiv(K, SIZE)
    tiles = gl.load(block + G) * across
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    lanes = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, SUM))
    b_group = (group_rows // SIZE) * b_scale_row + (group_columns // SIZE) * b_scale_step
    group, row, column = _tile_of_rows(gl.program_id(0), tiles, owner, block, across)
    at_a, at_b = a_scale + row * SIZE + lanes, b_scale + group * b_group + column * b_scale_row
    scale = gl.load(at_a) * gl.load(at_b)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        next_group, next_row, next_column = _tile_of_rows(t + gl.num_programs(0), tiles, owner, block, across)
        start, count = gl.load(source + row), gl.load(live + row)
        next_a = a_scale + next_row * SIZE + lanes
        next_b = b_scale + next_group * b_group + next_column * b_scale_row
        if count > HALF * H:
            total, stage, phase = _add_scaled_products(
                HALF, left, right, ready, empty, stage, phase, steps, scale, at_a, at_b, a_scale_step, b_scale_step
            )
            scale = gl.load(next_a) * gl.load(next_b)
            _write_rows(HALF, total, out, whole, room, bias, scales, start, count, group, column, N)
        else:
            stage, phase = _pass_over(ready, empty, stage, phase, steps)
            scale = gl.load(next_a) * gl.load(next_b)
        at_a, at_b = next_a, next_b
        group, row, column = next_group, next_row, next_column
    if whole is not None:
        tma.store_wait(0)


@gluon.jit
def _multiply_whole_rows(
    HALF: gl.constexpr, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner, block, source,
    live, G, N, K, a_scale_group, b_scale_group, A_EACH: gl.constexpr, B_EACH: gl.constexpr,
):  # fmt: skip
    """The same, where a scale reaches over all of K: it waits for the sum."""
    H: gl.constexpr = SIZE // 2
    SUM: gl.constexpr = _sum_layout()
    room = None
    if whole is not None:
        room = gl.allocate_shared_memory(whole.dtype, [H, SIZE], whole.layout)
    across, steps = gl.cdiv(N, SIZE), gl.cdiv(K, SIZE)
    tiles = gl.load(block + G) * across
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    lanes = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, SUM))
    group, row, column = _tile_of_rows(gl.program_id(0), tiles, owner, block, across)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        next_group, next_row, next_column = _tile_of_rows(t + gl.num_programs(0), tiles, owner, block, across)
        start, count = gl.load(source + row), gl.load(live + row)
        if count > HALF * H:
            total, stage, phase = _add_products(HALF, left, right, ready, empty, stage, phase, steps)
            columns = column * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, SUM))
            if A_EACH:
                at_a = a_scale + row * SIZE
            else:
                at_a = a_scale + group * a_scale_group
            at_b = b_scale + group * b_scale_group
            total = _scaled(total, at_a, at_b, lanes, columns, SIZE, N, A_EACH, B_EACH)
            _write_rows(HALF, total, out, whole, room, bias, scales, start, count, group, column, N)
        else:
            stage, phase = _pass_over(ready, empty, stage, phase, steps)
        group, row, column = next_group, next_row, next_column
    if whole is not None:
        tma.store_wait(0)


@gluon.jit
def _rows_kernel(
    a, b, out, whole, bias, scales, a_scale, b_scale, owner, block, source, live,
    G, N, K, a_scale_step, b_scale_row, b_scale_step, group_rows, group_columns,
):  # fmt: skip
    left, right = _codes(a, b)
    ready, empty = _barriers()
    gl.warp_specialize(
        [
            (_multiply_rows, (0, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner, block,
                              source, live, G, N, K, a_scale_step, b_scale_row, b_scale_step, group_rows,
                              group_columns)),
            (_multiply_rows, (1, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner, block,
                              source, live, G, N, K, a_scale_step, b_scale_row, b_scale_step, group_rows,
                              group_columns)),
            (_load_rows, (a, b, left, right, ready, empty, owner, block, G, N, K, group_rows, group_columns)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _whole_rows_kernel(
    a, b, out, whole, bias, scales, a_scale, b_scale, owner, block, source, live,
    G, N, K, a_scale_group, b_scale_group, group_rows, group_columns, A_EACH: gl.constexpr, B_EACH: gl.constexpr,
):  # fmt: skip
    left, right = _codes(a, b)
    ready, empty = _barriers()
    gl.warp_specialize(
        [
            (_multiply_whole_rows, (0, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner,
                                    block, source, live, G, N, K, a_scale_group, b_scale_group, A_EACH, B_EACH)),
            (_multiply_whole_rows, (1, left, right, ready, empty, out, whole, bias, scales, a_scale, b_scale, owner,
                                    block, source, live, G, N, K, a_scale_group, b_scale_group, A_EACH, B_EACH)),
            (_load_rows, (a, b, left, right, ready, empty, owner, block, G, N, K, group_rows, group_columns)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


# -- contraction over the rows of a group ------------------------------------------------------------------------------


@gluon.jit
def _depth_of(t, tiles, block, each):
    """The blocks that a tile is contracted over; as above, for any number."""
    group = gl.minimum(t, tiles - 1) // each
    return gl.load(block + group), gl.load(block + group + 1)


@gluon.jit
def _load_depth(a, b, lines, left, right, scales, ready, empty, block, G, N, K):
    down, across = gl.cdiv(N, SIZE), gl.cdiv(K, SIZE)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    tiles = G * down * across
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = (t // across) % down, t % across
        # asked one tile ahead, as everywhere else, this loop never ended on an H200 (triton 3.6)
        first, end = _depth_of(t, tiles, block, down * across)
        for step in range(first, end):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            if lines is not None:
                mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes + lines.block_type.nbytes)
            else:
                mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes)
            tma.async_copy_global_to_shared(a, [m * SIZE, step * SIZE], bar, left.index(stage))
            tma.async_copy_global_to_shared(b, [n * SIZE, step * SIZE], bar, right.index(stage))
            if lines is not None:
                tma.async_copy_global_to_shared(lines, [step, n * SIZE], bar, scales.index(stage))
            stage, phase = _next(stage, phase)


@gluon.jit
def _write_depth(HALF: gl.constexpr, total, out, group, m, n, N, K, ADD: gl.constexpr):
    H: gl.constexpr = SIZE // 2
    FLAT: gl.constexpr = _flat_layout()
    y = gl.convert_layout(total.to(out.dtype.element_ty), FLAT)
    r = m * SIZE + HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, FLAT))
    c = n * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, FLAT))
    at = (group.to(gl.int64) * N + r)[:, None] * K + c[None, :]
    live = (r < N)[:, None] & (c < K)[None, :]
    if ADD:
        y += gl.load(out + at, mask=live, other=0.0)
    gl.store(out + at, y, mask=live)


@gluon.jit
def _hand_over(HALF: gl.constexpr, total, whole, room, group, m, n, N):
    """Where no tile has rows of two groups, the copy unit writes it, and nobody waits."""
    tma.store_wait(0)
    room.store(total.to(whole.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(whole, [group * N + m * SIZE + HALF * (SIZE // 2), n * SIZE], room)


@gluon.jit
def _give_back(empty, stage):
    """A buffer that threads have read themselves. Without the fence the copy unit, which does not wait for their reads,
    was seen to put the next scales there before all of them were done."""
    fence_async_shared()
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _multiply_depth(
    HALF: gl.constexpr, left, right, scales, ready, empty, out, whole, a_scale, block, G, N, K, a_scale_stride,
    ADD: gl.constexpr,
):  # fmt: skip
    """One half of each tile's rows, where a scale reaches 128 far."""
    H: gl.constexpr = SIZE // 2
    SUM: gl.constexpr = _sum_layout()
    down, across = gl.cdiv(N, SIZE), gl.cdiv(K, SIZE)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    tiles = G * down * across
    lanes = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, SUM))
    first, end = _depth_of(gl.program_id(0), tiles, block, down * across)
    rows = (gl.program_id(0) // across) % down * SIZE + lanes
    scale = gl.load(a_scale + first.to(gl.int64) * a_scale_stride + rows, mask=(rows < N) & (first < end), other=0.0)
    if whole is not None:
        room = gl.allocate_shared_memory(whole.dtype, [H, SIZE], whole.layout)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, m, n = t // (down * across), (t // across) % down, t % across
        next_first, next_end = _depth_of(t + gl.num_programs(0), tiles, block, down * across)
        total = gl.zeros((H, SIZE), gl.float32, layout=SUM)
        for step in range(first + 1, end, 2):
            mbarrier.wait(ready.index(stage), phase)
            part = _product(HALF, left, right, stage)
            second, second_phase = _next(stage, phase)
            mbarrier.wait(ready.index(second), second_phase)
            other = _product(HALF, left, right, second)
            now = scale
            at_a = a_scale + gl.cast(step, gl.int64) * a_scale_stride + rows
            then = gl.load(at_a, mask=rows < N, other=0.0)
            later = gl.minimum(step + 1, end - 1).to(gl.int64)
            scale = gl.load(a_scale + later * a_scale_stride + rows, mask=rows < N, other=0.0)
            done = warpgroup_mma_wait(1, deps=[part])
            across_scale = scales.index(stage).load(SUM)  # [1, SIZE]
            _give_back(empty, stage)
            total += (done * now[:, None]) * across_scale
            done = warpgroup_mma_wait(0, deps=[other])
            across_scale = scales.index(second).load(SUM)
            _give_back(empty, second)
            total += (done * then[:, None]) * across_scale
            stage, phase = _next(second, second_phase)
        if (end - first) % 2 == 1:
            mbarrier.wait(ready.index(stage), phase)
            part = _product(HALF, left, right, stage)
            across_scale = scales.index(stage).load(SUM)
            done = warpgroup_mma_wait(0, deps=[part])
            _give_back(empty, stage)
            total += (done * scale[:, None]) * across_scale
            stage, phase = _next(stage, phase)
        first, end = next_first, next_end
        rows = ((t + gl.num_programs(0)) // across) % down * SIZE + lanes
        at_a = a_scale + first.to(gl.int64) * a_scale_stride + rows
        scale = gl.load(at_a, mask=(rows < N) & (first < end), other=0.0)
        if whole is not None:
            _hand_over(HALF, total, whole, room, group, m, n, N)
        else:
            _write_depth(HALF, total, out, group, m, n, N, K, ADD)
    if whole is not None:
        tma.store_wait(0)


@gluon.jit
def _multiply_whole_depth(
    HALF: gl.constexpr, left, right, ready, empty, out, whole, a_scale, b_scale, block,
    G, N, K, a_scale_group, b_scale_group, A_EACH: gl.constexpr, B_EACH: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """The same, where a scale reaches over all rows of a group. Those of an empty group are not read: its sum is zero
    whatever they hold."""
    H: gl.constexpr = SIZE // 2
    SUM: gl.constexpr = _sum_layout()
    down, across = gl.cdiv(N, SIZE), gl.cdiv(K, SIZE)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    tiles = G * down * across
    first, end = _depth_of(gl.program_id(0), tiles, block, down * across)
    if whole is not None:
        room = gl.allocate_shared_memory(whole.dtype, [H, SIZE], whole.layout)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, m, n = t // (down * across), (t // across) % down, t % across
        next_first, next_end = _depth_of(t + gl.num_programs(0), tiles, block, down * across)
        total, stage, phase = _add_products(HALF, left, right, ready, empty, stage, phase, end - first)
        rows = m * SIZE + HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, SUM))
        columns = n * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, SUM))
        at_a, at_b = a_scale + group * a_scale_group, b_scale + group * b_scale_group
        some = (first < end).to(gl.int32)
        total = _scaled(total, at_a, at_b, rows, columns, N * some, K * some, A_EACH, B_EACH)
        first, end = next_first, next_end
        if whole is not None:
            _hand_over(HALF, total, whole, room, group, m, n, N)
        else:
            _write_depth(HALF, total, out, group, m, n, N, K, ADD)
    if whole is not None:
        tma.store_wait(0)


@gluon.jit
def _depth_kernel(a, b, lines, out, whole, a_scale, block, G, N, K, a_scale_stride, ADD: gl.constexpr):
    left, right = _codes(a, b)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SIZE], lines.layout)
    ready, empty = _barriers()
    gl.warp_specialize(
        [
            (_multiply_depth, (0, left, right, scales, ready, empty, out, whole, a_scale, block, G, N, K,
                               a_scale_stride, ADD)),
            (_multiply_depth, (1, left, right, scales, ready, empty, out, whole, a_scale, block, G, N, K,
                               a_scale_stride, ADD)),
            (_load_depth, (a, b, lines, left, right, scales, ready, empty, block, G, N, K)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _whole_depth_kernel(
    a, b, out, whole, a_scale, b_scale, block,
    G, N, K, a_scale_group, b_scale_group, A_EACH: gl.constexpr, B_EACH: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    left, right = _codes(a, b)
    ready, empty = _barriers()
    gl.warp_specialize(
        [
            (_multiply_whole_depth, (0, left, right, ready, empty, out, whole, a_scale, b_scale, block,
                                     G, N, K, a_scale_group, b_scale_group, A_EACH, B_EACH, ADD)),
            (_multiply_whole_depth, (1, left, right, ready, empty, out, whole, a_scale, b_scale, block,
                                     G, N, K, a_scale_group, b_scale_group, A_EACH, B_EACH, ADD)),
            (_load_depth, (a, b, None, left, right, None, ready, empty, block, G, N, K)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


# -- unquantized rows --------------------------------------------------------------------------------------------------


@gluon.jit
def _load_plain(a, b, left, right, ready, empty, owner, block, source, G, N, K, TURNED: gl.constexpr):
    """a's tiles begin at packed rows: those past the group's end are multiplied like the others, and not written."""
    DEEP: gl.constexpr = left.shape[2]
    ACROSS: gl.constexpr = right.shape[2] if TURNED else right.shape[1]
    across = gl.cdiv(N, ACROSS)
    total = gl.load(block + G) * across
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    group, row, column = _tile_of_rows(gl.program_id(0), total, owner, block, across)
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        next_group, next_row, next_column = _tile_of_rows(t + gl.num_programs(0), total, owner, block, across)
        start = gl.load(source + row)
        for k in range(0, K, DEEP):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes)
            tma.async_copy_global_to_shared(a, [start, k], bar, left.index(stage))
            if TURNED:
                tma.async_copy_global_to_shared(b, [group * K + k, column * ACROSS], bar, right.index(stage))
            else:
                tma.async_copy_global_to_shared(b, [group * N + column * ACROSS, k], bar, right.index(stage))
            stage, phase = _next(stage, phase, left.shape[0])
        group, row, column = next_group, next_row, next_column


@gluon.jit
def _multiply_plain(
    HALF: gl.constexpr, left, right, ready, empty, out, bias, scales, owner, block, source, live, G, N, K,
    TURNED: gl.constexpr,
):  # fmt: skip
    H: gl.constexpr = SIZE // 2
    DEEP: gl.constexpr = left.shape[2]
    ACROSS: gl.constexpr = right.shape[2] if TURNED else right.shape[1]
    SUM: gl.constexpr = _sum_layout(ACROSS, 16)
    across = gl.cdiv(N, ACROSS)
    tiles = gl.load(block + G) * across
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    group, row, column = _tile_of_rows(gl.program_id(0), tiles, owner, block, across)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        next_group, next_row, next_column = _tile_of_rows(t + gl.num_programs(0), tiles, owner, block, across)
        start, count = gl.load(source + row), gl.load(live + row)
        total = gl.zeros((H, ACROSS), gl.float32, layout=SUM)
        for _ in range(0, K, DEEP):  # the other warpgroup multiplies while this one waits
            mbarrier.wait(ready.index(stage), phase)
            mine = left.index(stage).slice(HALF * H, H, dim=0)
            if TURNED:
                theirs = right.index(stage)
            else:
                theirs = right.index(stage).permute((1, 0))
            begun = warpgroup_mma(mine, theirs, warpgroup_mma_init(total), is_async=True)
            total = warpgroup_mma_wait(0, deps=[begun])
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = _next(stage, phase, left.shape[0])
        _write_rows(HALF, total, out, None, None, bias, scales, start, count, group, column, N)
        group, row, column = next_group, next_row, next_column


@gluon.jit
def _plain_rows_kernel(
    a, b, out, bias, scales, owner, block, source, live, G, N, K, TURNED: gl.constexpr, COUNT: gl.constexpr
):
    """b [G * N, K], or [G * K, N] where it is turned."""
    left = gl.allocate_shared_memory(a.dtype, [COUNT, a.block_type.shape[0], a.block_type.shape[1]], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [COUNT, b.block_type.shape[0], b.block_type.shape[1]], b.layout)
    ready, empty = _barriers(COUNT)
    gl.warp_specialize(
        [
            (_multiply_plain, (0, left, right, ready, empty, out, bias, scales, owner, block, source, live, G, N, K,
                               TURNED)),
            (_multiply_plain, (1, left, right, ready, empty, out, bias, scales, owner, block, source, live, G, N, K,
                               TURNED)),
            (_load_plain, (a, b, left, right, ready, empty, owner, block, source, G, N, K, TURNED)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


# -- launches ----------------------------------------------------------------------------------------------------------

_TILE = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], gl.float8e4nv)
_HALF = gl.NVMMASharedLayout.get_default_for([BLOCK // 2, BLOCK], gl.bfloat16)
_LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_DEEP = 64  # of a tile of sixteen bits: 128 bytes, as far as one copy reaches


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _copies(matrix: Tensor) -> bool:
    """Whether tiles of it can be copied by descriptors."""
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0
    return aligned and matrix.stride(1) == 1 and matrix.numel() > 0


def _tiles(codes: Tensor) -> Tiles:
    return Tiles(codes, [BLOCK, BLOCK], _TILE)


def _halves(out: Tensor) -> Tiles | None:
    """A result [G, N, K] for the copy unit to write, half a tile at a time, where no half lies in two groups."""
    if out.dtype == torch.float32 or out.shape[1] % BLOCK or out.shape[2] % 8 or out.data_ptr() % 16:
        return None
    return Tiles(out.view(-1, out.shape[2]), [BLOCK // 2, BLOCK], _HALF)


def _rows_of(out: Tensor) -> Tiles | None:
    """A result [rows, N] for the same."""
    if out.dtype == torch.float32 or out.shape[1] % 8 or out.data_ptr() % 16:
        return None
    return Tiles(out, [BLOCK // 2, BLOCK], _HALF)


def takes_rows(a: GroupedTensor, b: QTensor) -> bool:
    return _copies(a.q.codes) and _copies(b.codes)


def rows(
    a: GroupedTensor, b: QTensor, out: Tensor, bias: Tensor | None, scales: Tensor | None, height: int, along: str
) -> None:
    groups, left, right = a.groups, own(a), stacked(b, height, along)
    tensors = (
        _tiles(a.q.codes), _tiles(b.codes), out, _rows_of(out), bias, scales, a.q.scale, b.scale,
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
    return TiledLaunch(_rows_kernel, programs, sizes, num_warps=4)


@lru_cache(maxsize=4096)
def _whole_rows_launch(programs: int, sizes: tuple[int, ...], a_each: bool, b_each: bool) -> TiledLaunch:
    return TiledLaunch(_whole_rows_kernel, programs, sizes, num_warps=4, A_EACH=a_each, B_EACH=b_each)


def takes_depth(a: GroupedTensor, b: GroupedTensor) -> bool:
    return _copies(a.q.codes) and _copies(b.q.codes) and (whole(a.q.spec) or _copies(b.q.scale.T))


def depth(a: GroupedTensor, b: GroupedTensor, out: Tensor, accumulate: bool) -> None:
    codes, halves = (_tiles(a.q.codes), _tiles(b.q.codes)), None if accumulate else _halves(out)
    block, sizes, programs = a.groups.block, (a.groups.number, *out.shape[1:]), processors(out.device)
    left, right = own(a), own(b)
    if whole(a.q.spec):
        launch = _whole_depth_launch(
            programs, (*sizes, left.group, right.group), left.row == 1, right.row == 1, accumulate
        )
        launch(*codes, out, halves, a.q.scale, b.q.scale, block)
    else:
        lines = Tiles(b.q.scale.T, [1, BLOCK], _LINE)  # [blocks, K], contiguous
        _depth_launch(programs, (*sizes, left.block), accumulate)(*codes, lines, out, halves, a.q.scale, block)


@lru_cache(maxsize=4096)
def _depth_launch(programs: int, sizes: tuple[int, ...], add: bool) -> TiledLaunch:
    return TiledLaunch(_depth_kernel, programs, sizes, num_warps=4, ADD=add)


@lru_cache(maxsize=4096)
def _whole_depth_launch(programs: int, sizes: tuple[int, ...], a_each: bool, b_each: bool, add: bool) -> TiledLaunch:
    return TiledLaunch(_whole_depth_kernel, programs, sizes, num_warps=4, A_EACH=a_each, B_EACH=b_each, ADD=add)


def _stack(b: Tensor) -> tuple[Tensor, bool] | None:
    """b [G, N, K] as one matrix [G * N, K], or turned [G * K, N], if it is one that can be copied by tiles. A tile of
    a turned one must not reach into the next group: what it finds there may not be a number."""
    for matrices, turned in ((b, False), (b.transpose(1, 2), True)):
        if matrices.stride(0) == matrices.shape[1] * matrices.stride(1) and not (turned and b.shape[2] % _DEEP):
            flat = matrices.flatten(0, 1)
            if _copies(flat):
                return flat, turned
    return None


def takes_plain_rows(a: Tensor, b: Tensor) -> bool:
    sixteen = a.dtype in (torch.bfloat16, torch.float16) and b.dtype == a.dtype
    return sixteen and _copies(a) and _stack(b) is not None


def plain_rows(a: Tensor, b: Tensor, out: Tensor, groups: Groups, bias: Tensor | None, scales: Tensor | None) -> None:
    found = _stack(b)
    assert found is not None
    flat, turned = found
    across, stages = plain_tile(out)
    tile = [_DEEP, across] if turned else [across, _DEEP]
    _plain_rows_launch(processors(out.device), (groups.number, out.shape[1], a.shape[1]), turned, stages)(
        Tiles(a, [BLOCK, _DEEP], plain_layout([BLOCK, _DEEP])), Tiles(flat, tile, plain_layout(tile)),
        out, bias, scales, groups.owner, groups.block, groups.source, groups.live,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _plain_rows_launch(programs: int, sizes: tuple[int, ...], turned: bool, stages: int) -> TiledLaunch:
    return TiledLaunch(_plain_rows_kernel, programs, sizes, num_warps=4, TURNED=turned, COUNT=stages)


def plain_tile(out: Tensor) -> tuple[int, int]:
    """Columns of a tile of the result, and how many buffers fit beside it: it passes through shared memory too."""
    n = out.shape[1]
    return (256, 4) if out.dtype != torch.float32 and (n % 256 == 0 or n > 1024) else (128, 6)


def plain_layout(tile: list[int]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(tile, gl.bfloat16)
