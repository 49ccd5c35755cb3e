"""Sums of 64x256 in four quarters, for a warpgroup whose products are scaled every 128 elements of the contraction.

The rows of one operand are in registers, read once for all quarters. While a quarter's product is scaled and added, the
tensor cores compute the next one: two products of 64x64 need no more registers than one of 64x128.

The additions are written as assembly. The compiler would put them off until after the next product is begun, and then
has no registers for it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from octavo._torch.triton import async_store, wait_until_read
from octavo.kernels.grouped_gemm.hopper.tiles import following, sum_layout

QUARTER = gl.constexpr(64)  # rows and columns


@gluon.jit
def _begun(mine, right, PART: gl.constexpr):
    """Begin the product of the rows with a quarter of the columns."""
    zero = gl.zeros((QUARTER, QUARTER), gl.float32, layout=sum_layout(QUARTER))
    columns = right.slice(PART * QUARTER, QUARTER, dim=0).permute((1, 0))
    return warpgroup_mma(mine, columns, warpgroup_mma_init(zero), use_acc=False, is_async=True)


@gluon.jit
def _columns_of(line, PART: gl.constexpr):
    return line.slice(PART * QUARTER, QUARTER, dim=1).load(sum_layout(QUARTER))


@gluon.jit
def _added(total, done, rows, columns):
    """Return total + (done * rows) * columns, at this place."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.rn.f32 t, $1, $2; fma.rn.f32 $0, t, $3, $4; }",
        "=r,r,r,r,r", [done, rows, columns, total], gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_scaled_quarters(HALF: gl.constexpr, left, right, of_rows, of_columns, ready, empty, stage, phase, steps):
    """Return the sums of so many products, each by the scales of its rows and columns, and the buffer after them.
    Waiting once more for a buffer that is there costs a branch, across which ptxas moves no addition. The fence is that
    of `contraction._add_scaled`."""
    A: gl.constexpr = gl.DotOperandLayout(0, sum_layout(QUARTER), 4)
    one = gl.zeros((QUARTER, QUARTER), gl.float32, layout=sum_layout(QUARTER))
    two, three, four = one, one, one
    if steps > 0:  # Triton 3.6 drops a carried value that only bounds an inner loop: the last tile's would stay
        for _ in range(0, steps):
            mbarrier.wait(ready.index(stage), phase)
            # rows in registers: four products read them, and shared memory once
            mine = left.index(stage).slice(HALF * QUARTER, QUARTER, dim=0).load(A)
            across, line = right.index(stage), of_columns.index(stage)
            first = _begun(mine, across, 0)
            second = _begun(mine, across, 1)
            # while two products are on their way
            rows = of_rows.index(stage).slice(HALF * QUARTER, QUARTER, dim=1).permute((1, 0)).load(sum_layout(QUARTER))
            done = warpgroup_mma_wait(1, deps=[first])
            one = _added(one, done, rows, _columns_of(line, 0))
            mbarrier.wait(ready.index(stage), phase)
            first = _begun(mine, across, 2)
            done = warpgroup_mma_wait(1, deps=[second])
            two = _added(two, done, rows, _columns_of(line, 1))
            mbarrier.wait(ready.index(stage), phase)
            second = _begun(mine, across, 3)
            done = warpgroup_mma_wait(1, deps=[first])
            three = _added(three, done, rows, _columns_of(line, 2))
            done = warpgroup_mma_wait(0, deps=[second])
            # the last read of this buffer: it can be given back before the addition
            columns = _columns_of(line, 3)
            fence_async_shared()
            mbarrier.arrive(empty.index(stage), count=1)
            four = _added(four, done, rows, columns)
            stage, phase = following(stage, phase, left.shape[0])
    return one, two, three, four, stage, phase


@gluon.jit
def hand_over_quarters(one, two, three, four, whole, room, row, column):
    """Copy the sums to shared memory, from where TMA writes them. All four fit, so that no warp waits for a write."""
    wait_until_read()
    room.index(0).store(one.to(whole.dtype))
    room.index(1).store(two.to(whole.dtype))
    room.index(2).store(three.to(whole.dtype))
    room.index(3).store(four.to(whole.dtype))
    fence_async_shared()
    for part in gl.static_range(4):
        async_store(whole, [row, column + part * QUARTER], room.index(part))
