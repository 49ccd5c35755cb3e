"""Shared parts of the Hopper kernels: tiles in shared memory, the barriers that hand them over, products of FP8 tiles,
and the descriptors from which TMA copies a matrix."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from octavo.launch import Tiles
from octavo.quant.groups import BLOCK

SIZE = gl.constexpr(BLOCK)  # rows, columns and depth of a tile
STAGES = gl.constexpr(5)  # buffers of both operands, 32 KiB each, in the 227 KiB that a program may have
# row blocks whose tiles are computed together, so that their shared operand stays in the cache. Row by row, the other
# operand of a weight gradient with 14,336 columns was read from memory again for each row of tiles
SPAN = gl.constexpr(8)


@gluon.constexpr_function
def sum_layout(width=BLOCK, bits=8):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 256 // bits])


@gluon.constexpr_function
def flat_layout(width=BLOCK):
    """Return a layout with eight neighbours of a row per thread: sixteen bytes of bfloat16."""
    return gl.BlockedLayout([1, 8], [32 // (width // 8), width // 8], [4, 1], [1, 0])


@gluon.jit
def tile_of_rows(t, total, owner, block, across):
    """Return (group, row block, column tile) of a tile's number. Within a group, SPAN row blocks at a time, columns
    outermost. Any number will do: it is asked for one tile ahead, with two divisions, the slowest arithmetic between
    tiles."""
    # a number past the last tile, or of no tile at all, names one that exists: its loads are harmless
    t = gl.maximum(gl.minimum(t, total - 1), 0)
    at = t // across  # the row block, if tiles went row by row: of the same group, and of the same SPAN
    # a row block that no group has says -1
    group = gl.maximum(gl.load(owner + at), 0)
    first = gl.load(block + group)
    end = gl.load(block + group + 1)
    lead = first + (at - first) // SPAN * SPAN
    # the last span of a group may be lower
    height = gl.maximum(gl.minimum(end - lead, SPAN), 1)
    within = t - lead * across
    column = within // height
    return group, lead + within - column * height, column


@gluon.jit
def following(stage, phase, COUNT: gl.constexpr = STAGES):
    """Return the buffer after this one; the phase flips where they start over."""
    wraps = stage == COUNT - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def room_for_tiles(a, b, COUNT: gl.constexpr = STAGES):
    """Allocate shared memory for tiles of both operands."""
    left = gl.allocate_shared_memory(a.dtype, [COUNT, a.block_type.shape[0], a.block_type.shape[1]], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [COUNT, b.block_type.shape[0], b.block_type.shape[1]], b.layout)
    return left, right


@gluon.jit
def barriers(COUNT: gl.constexpr = STAGES):
    """Allocate barriers: a buffer is full, and both warpgroups are done with it."""
    ready = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(ready.index(i), count=1)
        # both warpgroups read a buffer, and each says when it is done
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return ready, empty


@gluon.jit
def operands(HALF: gl.constexpr, left, right, stage):
    """Return one half of a tile's rows, and the tile across."""
    H: gl.constexpr = SIZE // 2
    return left.index(stage).slice(HALF * H, H, dim=0), right.index(stage).permute((1, 0))


@gluon.jit
def product(HALF: gl.constexpr, left, right, stage):
    """Begin the product of one half of a tile's rows and the tile across."""
    ACROSS: gl.constexpr = right.shape[1]
    # not read: use_acc=False begins a sum anew
    zero = gl.zeros((SIZE // 2, ACROSS), gl.float32, layout=sum_layout(ACROSS))
    mine, across = operands(HALF, left, right, stage)
    return warpgroup_mma(mine, across, warpgroup_mma_init(zero), use_acc=False, is_async=True)


@gluon.jit
def begun(HALF: gl.constexpr, left, right, ready, stage, phase):
    """Begin a product, once its operands are there."""
    mbarrier.wait(ready.index(stage), phase)
    return product(HALF, left, right, stage)


@gluon.jit
def add_unscaled(HALF: gl.constexpr, total, done, of_rows, of_columns, empty, stage):
    """Add a product to the sum, and give its buffer back."""
    mbarrier.arrive(empty.index(stage), count=1)
    return total + done


@gluon.jit
def add_products(
    HALF: gl.constexpr, left, right, of_rows, of_columns, ready, empty, stage, phase, steps, ADD: gl.constexpr
):
    """Return the sum of so many products, and the buffer after them. ADD adds one and gives its buffer back:
    `add_unscaled`, or a function that multiplies it by the scales in `of_rows` and `of_columns`. The next product is
    begun before one is added: two are kept in turn, so that neither is moved while it is computed."""
    total = gl.zeros((SIZE // 2, SIZE), gl.float32, layout=sum_layout())
    if steps > 0:
        one = begun(HALF, left, right, ready, stage, phase)
        # in turn, by two names: with one, Triton would copy the registers of a product that is on its way
        for _ in range(2, steps, 2):
            second, second_phase = following(stage, phase)
            other = begun(HALF, left, right, ready, second, second_phase)
            done = warpgroup_mma_wait(1, deps=[one])
            total = ADD(HALF, total, done, of_rows, of_columns, empty, stage)
            stage, phase = following(second, second_phase)
            one = begun(HALF, left, right, ready, stage, phase)
            done = warpgroup_mma_wait(1, deps=[other])
            total = ADD(HALF, total, done, of_rows, of_columns, empty, second)
        if steps % 2 == 0:
            second, second_phase = following(stage, phase)
            other = begun(HALF, left, right, ready, second, second_phase)
            done = warpgroup_mma_wait(1, deps=[one])
            total = ADD(HALF, total, done, of_rows, of_columns, empty, stage)
            done = warpgroup_mma_wait(0, deps=[other])
            total = ADD(HALF, total, done, of_rows, of_columns, empty, second)
            stage, phase = following(second, second_phase)
        else:
            done = warpgroup_mma_wait(0, deps=[one])
            total = ADD(HALF, total, done, of_rows, of_columns, empty, stage)
            stage, phase = following(stage, phase)
    return total, stage, phase


@gluon.jit
def add_in_tensor_cores(HALF: gl.constexpr, left, right, ready, empty, stage, phase, steps):
    """Return the sum of so many products, one at least, and the buffer after them: fast accumulation. Each is begun
    before the one before it is waited for, so that the tensor cores always have work."""
    total = begun(HALF, left, right, ready, stage, phase)
    for _ in range(1, steps):
        last = stage
        stage, phase = following(stage, phase, left.shape[0])
        mbarrier.wait(ready.index(stage), phase)
        mine, across = operands(HALF, left, right, stage)
        total = warpgroup_mma(mine, across, total, is_async=True)
        # one product stays on its way; the one before it is done with its buffer
        total = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[total]))
        mbarrier.arrive(empty.index(last), count=1)
    done = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = following(stage, phase, left.shape[0])
    return done, stage, phase


@gluon.jit
def scales_ahead(a_scale, b_scale, rows, M, N, A_EACH: gl.constexpr, B_EACH: gl.constexpr):
    """Return the scales of a tile's rows and of its columns, asked for before its products; one of all rows, or
    columns, unless EACH has its own. Those of each column wait for `scaled`: they would need too many registers until
    then. Where there are no rows or columns, nothing is read."""
    # a scale for each row is one value a thread; one for each column would be as many as a thread has columns
    if A_EACH:
        of_rows = gl.load(a_scale + rows, mask=rows < M, other=0.0)[:, None]
    else:
        of_rows = gl.load(a_scale, mask=M > 0, other=0.0)
    if B_EACH:
        of_columns = 1.0
    else:
        of_columns = gl.load(b_scale, mask=N > 0, other=0.0)
    return of_rows, of_columns


@gluon.jit
def scaled(total, of_rows, of_columns, b_scale, columns, N, B_EACH: gl.constexpr):
    """Return a sum by the scales of its rows and its columns, as `scales_ahead` returned them."""
    total = total * of_rows
    if B_EACH:
        return total * gl.load(b_scale + columns, mask=columns < N, other=0.0)[None, :]
    else:
        return total * of_columns


TILE = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], gl.float8e4nv)
HALF_TILE = gl.NVMMASharedLayout.get_default_for([BLOCK // 2, BLOCK], gl.bfloat16)
QUARTER_TILE = gl.NVMMASharedLayout.get_default_for([BLOCK // 2, BLOCK // 2], gl.bfloat16)


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_be_copied(matrix: Tensor) -> bool:
    """Return whether TMA can copy tiles of this matrix by descriptors."""
    # what a descriptor of TMA takes
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0
    return aligned and matrix.stride(1) == 1 and matrix.numel() > 0


def tiles_of(codes: Tensor) -> Tiles:
    return Tiles(codes, [BLOCK, BLOCK], TILE)


def is_wide(columns: int, lines: int, programs: int) -> bool:
    """Return whether result tiles have 256 columns rather than 128: if that wastes few columns, and `lines` rows of
    tiles have one for each program."""
    # a wide tile reads a quarter less for each product than two narrow ones, and has half as many beginnings and ends;
    # with fewer tiles than multiprocessors, some of these would be idle
    return (columns % 256 == 0 or columns > 1024) and lines * -(-columns // 256) >= programs
