"""Grouped FP8 GEMMs for Hopper's tensor cores, in Gluon: one producer warp, two warpgroups that multiply.

The producer copies tiles of codes to shared memory (TMA) as buffers become free; each warpgroup owns 64 rows of a
128x128 tile of the result. Both wait for the same buffers and otherwise run free of each other: while one scales and
adds what it has multiplied, the other multiplies. A product covers 128 of the contraction, which is as long as a scale
reaches and as far as the tensor cores' own sum can be trusted; it is then scaled and added in float32.

Programs are as many as the chip has processors. They take tiles by number until there are none, and find out on the
device which group a number belongs to: how many tiles there are depends on the groups, the grid does not.
"""

from functools import cache

import torch
import triton
import triton.language as tl
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.errors import UnsupportedDtype, UnsupportedShape
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.qtensor import QTensor

SIZE = gl.constexpr(BLOCK)  # of a tile, every way
STAGES = gl.constexpr(5)  # buffers of both operands, 32 KiB each, in the 227 KiB that a program may have
SPAN = gl.constexpr(8)  # row blocks whose tiles are taken together, so that what they share stays in the cache


@gluon.constexpr_function
def _sum_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])


@gluon.constexpr_function
def _flat_layout():
    """Eight neighbours of a row to a thread: sixteen bytes of bfloat16."""
    return gl.BlockedLayout([1, 8], [32 // (BLOCK // 8), BLOCK // 8], [4, 1], [1, 0])


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
def _next(stage, phase):
    """The buffer after this one; the phase flips where they start over."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _codes(a, b):
    """Shared memory for tiles of both operands."""
    left = gl.allocate_shared_memory(a.dtype, [STAGES, SIZE, SIZE], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES, SIZE, SIZE], b.layout)
    return left, right


@gluon.jit
def _barriers():
    """When a buffer is full, and when both warpgroups are done with it."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
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
def _multiply_rows(
    HALF: gl.constexpr, left, right, ready, empty, out, bias, a_scale, b_scale, owner, block, source, live,
    G, N, K, a_scale_stride, b_scale_rows, b_scale_columns, group_rows, group_columns,
):  # fmt: skip
    """One half of each tile's rows."""
    H: gl.constexpr = SIZE // 2
    SUM: gl.constexpr = _sum_layout()
    FLAT: gl.constexpr = _flat_layout()
    across, steps = gl.cdiv(N, SIZE), gl.cdiv(K, SIZE)
    tiles = gl.load(block + G) * across
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    lanes = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, SUM))
    b_group = (group_rows // SIZE) * b_scale_rows + (group_columns // SIZE) * b_scale_columns
    group, row, column = _tile_of_rows(gl.program_id(0), tiles, owner, block, across)
    at_a, at_b = a_scale + row * SIZE + lanes, b_scale + group * b_group + column * b_scale_rows
    scale = gl.load(at_a) * gl.load(at_b)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        next_group, next_row, next_column = _tile_of_rows(t + gl.num_programs(0), tiles, owner, block, across)
        start, count = gl.load(source + row), gl.load(live + row)
        total = gl.zeros((H, SIZE), gl.float32, layout=SUM)
        for step in range(1, steps, 2):  # two at a time: the second is made while the first is scaled and added
            mbarrier.wait(ready.index(stage), phase)
            part = _product(HALF, left, right, stage)
            second, second_phase = _next(stage, phase)
            mbarrier.wait(ready.index(second), second_phase)
            other = _product(HALF, left, right, second)
            now = scale
            then = gl.load(at_a + gl.cast(step, gl.int64) * a_scale_stride) * gl.load(at_b + step * b_scale_columns)
            later = gl.minimum(step + 1, steps - 1)
            scale = gl.load(at_a + later.to(gl.int64) * a_scale_stride) * gl.load(at_b + later * b_scale_columns)
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
        at_a, at_b = a_scale + next_row * SIZE + lanes, b_scale + next_group * b_group + next_column * b_scale_rows
        scale = gl.load(at_a) * gl.load(at_b)
        if bias is not None:
            columns = column * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, SUM))
            at_bias = bias + group.to(gl.int64) * N + columns
            total += gl.load(at_bias, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        y = gl.convert_layout(total.to(out.dtype.element_ty), FLAT)
        r = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, FLAT))
        c = column * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, FLAT))
        at = (start + r).to(gl.int64)[:, None] * N + c[None, :]
        gl.store(out + at, y, mask=(r < count)[:, None] & (c < N)[None, :])
        group, row, column = next_group, next_row, next_column


@gluon.jit
def _rows_kernel(
    a, b, out, bias, a_scale, b_scale, owner, block, source, live,
    G, N, K, a_scale_stride, b_scale_rows, b_scale_columns, group_rows, group_columns,
):  # fmt: skip
    left, right = _codes(a, b)
    ready, empty = _barriers()
    gl.warp_specialize(
        [
            (_multiply_rows, (0, left, right, ready, empty, out, bias, a_scale, b_scale, owner, block, source, live,
                              G, N, K, a_scale_stride, b_scale_rows, b_scale_columns, group_rows, group_columns)),
            (_multiply_rows, (1, left, right, ready, empty, out, bias, a_scale, b_scale, owner, block, source, live,
                              G, N, K, a_scale_stride, b_scale_rows, b_scale_columns, group_rows, group_columns)),
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
def _load_depth(a, b, b_scale, left, right, scales, ready, empty, block, G, N, K):
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
            mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes + b_scale.block_type.nbytes)
            tma.async_copy_global_to_shared(a, [m * SIZE, step * SIZE], bar, left.index(stage))
            tma.async_copy_global_to_shared(b, [n * SIZE, step * SIZE], bar, right.index(stage))
            tma.async_copy_global_to_shared(b_scale, [step, n * SIZE], bar, scales.index(stage))
            stage, phase = _next(stage, phase)


@gluon.jit
def _multiply_depth(
    HALF: gl.constexpr, left, right, scales, ready, empty, out, whole, a_scale, block, G, N, K, a_scale_stride,
    ADD: gl.constexpr,
):  # fmt: skip
    H: gl.constexpr = SIZE // 2
    SUM: gl.constexpr = _sum_layout()
    FLAT: gl.constexpr = _flat_layout()
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
            mbarrier.arrive(empty.index(stage), count=1)
            total += (done * now[:, None]) * across_scale
            done = warpgroup_mma_wait(0, deps=[other])
            across_scale = scales.index(second).load(SUM)
            mbarrier.arrive(empty.index(second), count=1)
            total += (done * then[:, None]) * across_scale
            stage, phase = _next(second, second_phase)
        if (end - first) % 2 == 1:
            mbarrier.wait(ready.index(stage), phase)
            part = _product(HALF, left, right, stage)
            across_scale = scales.index(stage).load(SUM)
            done = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage), count=1)
            total += (done * scale[:, None]) * across_scale
            stage, phase = _next(stage, phase)
        first, end = next_first, next_end
        rows = ((t + gl.num_programs(0)) // across) % down * SIZE + lanes
        at_a = a_scale + first.to(gl.int64) * a_scale_stride + rows
        scale = gl.load(at_a, mask=(rows < N) & (first < end), other=0.0)
        if whole is not None:  # rows of no tile belong to another group: the copy unit writes them, and nobody waits
            tma.store_wait(0)
            room.store(total.to(whole.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(whole, [group * N + m * SIZE + HALF * H, n * SIZE], room)
        else:
            y = gl.convert_layout(total.to(out.dtype.element_ty), FLAT)
            r = m * SIZE + HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, FLAT))
            c = n * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, FLAT))
            at = (group.to(gl.int64) * N + r)[:, None] * K + c[None, :]
            live = (r < N)[:, None] & (c < K)[None, :]
            if ADD:
                y += gl.load(out + at, mask=live, other=0.0)
            gl.store(out + at, y, mask=live)
    if whole is not None:
        tma.store_wait(0)


@gluon.jit
def _depth_kernel(a, b, b_scale, out, whole, a_scale, block, G, N, K, a_scale_stride, ADD: gl.constexpr):
    left, right = _codes(a, b)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SIZE], b_scale.layout)
    ready, empty = _barriers()
    gl.warp_specialize(
        [
            (_multiply_depth, (0, left, right, scales, ready, empty, out, whole, a_scale, block, G, N, K,
                               a_scale_stride, ADD)),
            (_multiply_depth, (1, left, right, scales, ready, empty, out, whole, a_scale, block, G, N, K,
                               a_scale_stride, ADD)),
            (_load_depth, (a, b, b_scale, left, right, scales, ready, empty, block, G, N, K)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


# -- launches ----------------------------------------------------------------------------------------------------------

_TILE = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], gl.float8e4nv)
_HALF = gl.NVMMASharedLayout.get_default_for([BLOCK // 2, BLOCK], gl.bfloat16)
_LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tiles(codes: Tensor) -> TensorDescriptor:
    if codes.shape[1] % 16:
        raise UnsupportedShape(
            f"Grouped GEMMs copy rows of 16 codes, got {tuple(codes.shape)}. Pad the columns with zeros first."
        )
    return TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [BLOCK, BLOCK], _TILE)


def _halves(out: Tensor) -> TensorDescriptor | None:
    """A result [G, N, K] for the copy unit to write, half a tile at a time, where no half lies in two groups."""
    if out.dtype == torch.float32 or out.shape[1] % BLOCK or out.shape[2] % 8 or out.data_ptr() % 16:
        return None
    flat = out.view(-1, out.shape[2])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [BLOCK // 2, BLOCK], _HALF)


def rows(a: GroupedTensor, b: QTensor, out: Tensor, bias: Tensor | None, apart: tuple[int, int]) -> None:
    groups = a.groups
    _rows_kernel[(_processors(out.device),)](
        _tiles(a.q.codes), _tiles(b.codes), out, bias, a.q.scale, b.scale,
        groups.owner, groups.block, groups.source, groups.live,
        groups.number, out.shape[1], a.q.columns, a.q.scale.stride(1), *b.scale.stride(), *apart, num_warps=4,
    )  # fmt: skip


def depth(a: GroupedTensor, b: GroupedTensor, out: Tensor, accumulate: bool) -> None:
    line = b.q.scale.T  # [blocks, K], contiguous
    scales = TensorDescriptor(line, list(line.shape), list(line.stride()), [1, BLOCK], _LINE)
    _depth_kernel[(_processors(out.device),)](
        _tiles(a.q.codes), _tiles(b.q.codes), scales, out, None if accumulate else _halves(out), a.q.scale,
        a.groups.block,
        a.groups.number, out.shape[1], out.shape[2], a.q.scale.stride(1), ADD=accumulate, num_warps=4,
    )  # fmt: skip


@triton.jit
def _zero_tail_kernel(out, block_end, ROWS, N, SIZE: tl.constexpr):
    first = tl.load(block_end).to(tl.int64) * N
    total = tl.cast(ROWS, tl.int64) * N
    for at in range(first + tl.program_id(0) * SIZE, total, tl.num_programs(0) * SIZE):
        i = at + tl.arange(0, SIZE)
        tl.store(out + i, tl.zeros((SIZE,), out.dtype.element_ty), mask=i < total)


def zero_tail(out: Tensor, groups: Groups) -> None:
    _zero_tail_kernel[(_processors(out.device),)](out, groups.start[-1:], *out.shape, SIZE=2048, num_warps=4)


@triton.jit
def _column_sums_kernel(
    dy, out, start, N, stride_m, stride_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(N, COLUMNS)
    g, n = tl.program_id(0) // across, tl.program_id(0) % across
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    first, end = tl.load(start + g), tl.load(start + g + 1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(first, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_n
        total += tl.load(dy + at, mask=(rows < end)[:, None] & (columns < N)[None, :], other=0.0).to(tl.float32)
    tl.store(out + g.to(tl.int64) * N + columns, tl.sum(total, 0).to(out.dtype.element_ty), mask=columns < N)


def column_sums(dy: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    n = dy.shape[1]
    out = torch.empty(groups.number, n, dtype=dtype, device=dy.device)
    grid = groups.number * triton.cdiv(n, 128)
    _column_sums_kernel[(grid,)](dy, out, groups.start, n, *dy.stride(), ROWS=32, COLUMNS=128, num_warps=4)
    return out


# -- unquantized: torch's own grouped GEMM, which takes bfloat16 and reads no size on the host -------------------------


def plain_rows(a: Tensor, b: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    _check_plain(a, b)
    y = torch._grouped_mm(a, b.transpose(1, 2), groups.start[1:])
    if bias is None:
        return y
    row = torch.arange(groups.rows, device=a.device, dtype=torch.int32)
    group = torch.searchsorted(groups.start[1:], row, right=True).clamp_max(groups.number - 1)
    return (y.float() + bias.float()[group]).to(a.dtype)


def plain_depth(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    _check_plain(a, b)
    return torch._grouped_mm(a.T, b, groups.start[1:])


def _check_plain(a: Tensor, b: Tensor) -> None:
    if a.dtype != torch.bfloat16:
        raise UnsupportedDtype(
            f"Unquantized groups run in bfloat16 on a GPU, got {a.dtype}: for others torch would read their sizes on "
            "the host. Use torch.autocast, or a quantized recipe."
        )
    sizes = (a.shape[-1], *b.shape[-2:]) if b.dim() == 3 else (a.shape[-1], b.shape[-1])
    if any(n % 8 for n in sizes):
        raise UnsupportedShape(
            f"Unquantized groups need features in multiples of 8 on a GPU, got {sizes}. Pad them, or use a quantized "
            "recipe."
        )
