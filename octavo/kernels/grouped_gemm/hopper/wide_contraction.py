"""Contraction over the rows of each group in tiles of 128x256: dw, where a scale reaches 128 far."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from octavo._torch.triton import async_store, wait_until_read
from octavo.kernels.grouped_gemm.hopper.contraction import depth_of, load_depth, place_after, place_of, write_depth
from octavo.kernels.grouped_gemm.hopper.quarters import QUARTER, add_scaled_quarters
from octavo.kernels.grouped_gemm.hopper.tiles import SIZE, barriers, room_for_tiles

ACROSS = gl.constexpr(256)  # columns of a tile
STAGES = gl.constexpr(3)  # buffers of both operands, 48 KiB each, beside 64 KiB for the result


@gluon.jit
def _hand_over(one, two, three, four, whole, room, row, column):
    """Copies the sums to shared memory, from where TMA writes them. All four fit, so that no warp waits for a write."""
    wait_until_read()
    room.index(0).store(one.to(whole.dtype))
    room.index(1).store(two.to(whole.dtype))
    room.index(2).store(three.to(whole.dtype))
    room.index(3).store(four.to(whole.dtype))
    fence_async_shared()
    for part in gl.static_range(4):
        async_store(whole, [row, column + part * QUARTER], room.index(part))


@gluon.jit
def _multiply(
    HALF: gl.constexpr, left, right, of_rows, of_columns, ready, empty, out, whole, block, G, N, K, span,
    ADD: gl.constexpr,
):  # fmt: skip
    """One half of each tile's rows."""
    down, across = gl.cdiv(N, SIZE), gl.cdiv(K, ACROSS)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    tiles = G * down * across
    group, top, n, low = place_of(gl.program_id(0), span, down, across)
    step_group, step_top, step_n, step_low = place_of(gl.num_programs(0), span, down, across)
    first, end = depth_of(group, block, G)
    if whole is not None:
        room = gl.allocate_shared_memory(whole.dtype, [4, QUARTER, QUARTER], whole.layout)
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        next_group, next_top, next_n, next_low = place_after(
            group, top, n, low, step_group, step_top, step_n, step_low, span, down, across
        )
        next_first, next_end = depth_of(next_group, block, G)
        one, two, three, four, stage, phase = add_scaled_quarters(
            HALF, left, right, of_rows, of_columns, ready, empty, stage, phase, end - first
        )
        if whole is not None:
            row = group * N + (top + low) * SIZE + HALF * QUARTER
            _hand_over(one, two, three, four, whole, room, row, n * ACROSS)
        else:
            write_depth(HALF, one, out, group, top + low, n * 4, N, K, ADD)
            write_depth(HALF, two, out, group, top + low, n * 4 + 1, N, K, ADD)
            write_depth(HALF, three, out, group, top + low, n * 4 + 2, N, K, ADD)
            write_depth(HALF, four, out, group, top + low, n * 4 + 3, N, K, ADD)
        first, end = next_first, next_end
        group, top, n, low = next_group, next_top, next_n, next_low
    if whole is not None:
        wait_until_read()


@gluon.jit
def wide_depth_kernel(a, b, a_lines, b_lines, out, whole, block, G, N, K, span, ADD: gl.constexpr):
    left, right = room_for_tiles(a, b, STAGES)
    of_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SIZE], a_lines.layout)
    of_columns = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ACROSS], b_lines.layout)
    ready, empty = barriers(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (0, left, right, of_rows, of_columns, ready, empty, out, whole, block, G, N, K, span, ADD)),
            (_multiply, (1, left, right, of_rows, of_columns, ready, empty, out, whole, block, G, N, K, span, ADD)),
            (load_depth, (a, b, a_lines, b_lines, left, right, of_rows, of_columns, ready, empty, block, G, N, K,
                          span)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
