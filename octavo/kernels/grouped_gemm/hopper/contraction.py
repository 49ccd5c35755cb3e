"""Contraction over the rows of each group: dw."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from octavo.kernels.grouped_gemm.hopper.tiles import (
    HALF_TILE,
    SIZE,
    STAGES,
    add_products,
    barriers,
    can_be_copied,
    flat_layout,
    following,
    processors,
    product,
    room_for_codes,
    scaled,
    sum_layout,
    tiles_of,
)
from octavo.kernels.grouped_gemm.scales import grouped_strides, whole
from octavo.launch import TiledLaunch, Tiles
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK


@gluon.jit
def _depth_of(t, tiles, block, each):
    """The blocks that a tile is contracted over; of any number, as `tile_of_rows`."""
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
            stage, phase = following(stage, phase)


@gluon.jit
def _write_depth(HALF: gl.constexpr, total, out, group, m, n, N, K, ADD: gl.constexpr):
    H: gl.constexpr = SIZE // 2
    FLAT: gl.constexpr = flat_layout()
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
    SUM: gl.constexpr = sum_layout()
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
            part = product(HALF, left, right, stage)
            second, second_phase = following(stage, phase)
            mbarrier.wait(ready.index(second), second_phase)
            other = product(HALF, left, right, second)
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
            stage, phase = following(second, second_phase)
        if (end - first) % 2 == 1:
            mbarrier.wait(ready.index(stage), phase)
            part = product(HALF, left, right, stage)
            across_scale = scales.index(stage).load(SUM)
            done = warpgroup_mma_wait(0, deps=[part])
            _give_back(empty, stage)
            total += (done * scale[:, None]) * across_scale
            stage, phase = following(stage, phase)
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
    SUM: gl.constexpr = sum_layout()
    down, across = gl.cdiv(N, SIZE), gl.cdiv(K, SIZE)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    tiles = G * down * across
    first, end = _depth_of(gl.program_id(0), tiles, block, down * across)
    if whole is not None:
        room = gl.allocate_shared_memory(whole.dtype, [H, SIZE], whole.layout)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, m, n = t // (down * across), (t // across) % down, t % across
        next_first, next_end = _depth_of(t + gl.num_programs(0), tiles, block, down * across)
        total, stage, phase = add_products(HALF, left, right, ready, empty, stage, phase, end - first)
        rows = m * SIZE + HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, SUM))
        columns = n * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, SUM))
        at_a, at_b = a_scale + group * a_scale_group, b_scale + group * b_scale_group
        some = (first < end).to(gl.int32)
        total = scaled(total, at_a, at_b, rows, columns, N * some, K * some, A_EACH, B_EACH)
        first, end = next_first, next_end
        if whole is not None:
            _hand_over(HALF, total, whole, room, group, m, n, N)
        else:
            _write_depth(HALF, total, out, group, m, n, N, K, ADD)
    if whole is not None:
        tma.store_wait(0)


@gluon.jit
def depth_kernel(a, b, lines, out, whole, a_scale, block, G, N, K, a_scale_stride, ADD: gl.constexpr):
    left, right = room_for_codes(a, b)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SIZE], lines.layout)
    ready, empty = barriers()
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
def whole_depth_kernel(
    a, b, out, whole, a_scale, b_scale, block,
    G, N, K, a_scale_group, b_scale_group, A_EACH: gl.constexpr, B_EACH: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    left, right = room_for_codes(a, b)
    ready, empty = barriers()
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


# -- launches ----------------------------------------------------------------------------------------------------------

LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def _halves(out: Tensor) -> Tiles | None:
    """Returns `out` [G, N, K] for TMA to write by half tiles; None if float32, unaligned, or a half spans groups."""
    if out.dtype == torch.float32 or out.shape[1] % BLOCK or out.shape[2] % 8 or out.data_ptr() % 16:
        return None
    return Tiles(out.view(-1, out.shape[2]), [BLOCK // 2, BLOCK], HALF_TILE)


def takes_wgrad(a: GroupedTensor, b: GroupedTensor) -> bool:
    return can_be_copied(a.q.codes) and can_be_copied(b.q.codes) and (whole(a.q.spec) or can_be_copied(b.q.scale.T))


def grouped_wgrad(a: GroupedTensor, b: GroupedTensor, out: Tensor, accumulate: bool) -> None:
    codes, halves = (tiles_of(a.q.codes), tiles_of(b.q.codes)), None if accumulate else _halves(out)
    block, sizes, programs = a.groups.block, (a.groups.number, *out.shape[1:]), processors(out.device)
    left, right = grouped_strides(a), grouped_strides(b)
    if whole(a.q.spec):
        launch = _whole_depth_launch(
            programs, (*sizes, left.group, right.group), left.row == 1, right.row == 1, accumulate
        )
        launch(*codes, out, halves, a.q.scale, b.q.scale, block)
    else:
        lines = Tiles(b.q.scale.T, [1, BLOCK], LINE)  # [blocks, K], contiguous
        _depth_launch(programs, (*sizes, left.block), accumulate)(*codes, lines, out, halves, a.q.scale, block)


@lru_cache(maxsize=4096)
def _depth_launch(programs: int, sizes: tuple[int, ...], add: bool) -> TiledLaunch:
    return TiledLaunch(depth_kernel, programs, sizes, num_warps=4, ADD=add)


@lru_cache(maxsize=4096)
def _whole_depth_launch(programs: int, sizes: tuple[int, ...], a_each: bool, b_each: bool, add: bool) -> TiledLaunch:
    return TiledLaunch(whole_depth_kernel, programs, sizes, num_warps=4, A_EACH=a_each, B_EACH=b_each, ADD=add)
