"""Contraction over the rows of each group in tiles of 128x256: dw, where a scale reaches 128 far."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.kernels.grouped_gemm.hopper.contraction import load_depth, multiply_depth
from octavo.kernels.grouped_gemm.hopper.tiles import SIZE, barriers, room_for_tiles

ACROSS = gl.constexpr(256)  # columns of a tile
STAGES = gl.constexpr(3)  # buffers of both operands, 48 KiB each, beside 64 KiB for the result


@gluon.jit
def wide_depth_kernel(a, b, a_lines, b_lines, out, whole, block, G, N, K, span, ADD: gl.constexpr):
    left, right = room_for_tiles(a, b, STAGES)
    of_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SIZE], a_lines.layout)
    of_columns = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ACROSS], b_lines.layout)
    ready, empty = barriers(STAGES)
    gl.warp_specialize(
        [
            (multiply_depth, (0, left, right, of_rows, of_columns, ready, empty, out, whole, None, None, block,
                              G, N, K, 0, 0, span, False, False, ADD)),
            (multiply_depth, (1, left, right, of_rows, of_columns, ready, empty, out, whole, None, None, block,
                              G, N, K, 0, 0, span, False, False, ADD)),
            (load_depth, (a, b, a_lines, b_lines, left, right, of_rows, of_columns, ready, empty, block, G, N, K,
                          span)),
        ],
        [4, 1],
        [240, 24],  # eight more than narrow tiles have, for four sums and the rows of dy; the loader does without
    )  # fmt: skip
