"""Contraction over the rows of each group: dw."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from octavo._torch.triton import async_load, async_store, wait_until_read
from octavo.kernels.grouped_gemm.hopper.quarters import QUARTER, add_scaled_quarters, hand_over_quarters
from octavo.kernels.grouped_gemm.hopper.tiles import (
    SIZE,
    STAGES,
    add_products,
    add_unscaled,
    barriers,
    flat_layout,
    following,
    room_for_tiles,
    scaled,
    scales_ahead,
    sum_layout,
)


@gluon.jit
def place_of(t, span, down, across):
    """Return (group, tile down at which its span begins, tile across, tile down within the span) of a tile's number. A
    span of tiles down goes all the way across before the next one begins, so that both operands stay in the cache."""
    at = t // span
    line = at // across
    tall = down // span
    return line // tall, line % tall * span, at % across, t % span


@gluon.jit
def place_after(group, top, n, low, step_group, step_top, step_n, step_low, span, down, across):
    """Return the place so many groups, tiles down, across and within a span further on. It takes no divisions, the
    slowest arithmetic between tiles."""
    low += step_low
    carry = (low >= span).to(gl.int32)
    low -= carry * span
    n += step_n + carry
    carry = (n >= across).to(gl.int32)
    n -= carry * across
    top += step_top + carry * span
    carry = (top >= down).to(gl.int32)
    return group + step_group + carry, top - carry * down, n, low


@gluon.jit
def depth_of(group, block, G):
    """Return the blocks that a tile of a group is contracted over; of any group, since it is asked for one tile
    ahead."""
    group = gl.minimum(group, G - 1)
    return gl.load(block + group), gl.load(block + group + 1)


@gluon.jit
def load_depth(a, b, a_lines, b_lines, left, right, of_rows, of_columns, ready, empty, block, G, N, K, span):
    ACROSS: gl.constexpr = right.shape[1]
    down, across = gl.cdiv(N, SIZE), gl.cdiv(K, ACROSS)
    # buffers begin empty: a wait for the phase before the first one passes at once
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    tiles = G * down * across
    group, top, n, low = place_of(gl.program_id(0), span, down, across)
    step_group, step_top, step_n, step_low = place_of(gl.num_programs(0), span, down, across)
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first, end = depth_of(group, block, G)
        # Triton 3.6 drops a carried value that only bounds an inner loop, and then this one never ends: `first` is used
        # for coordinates too, so that `group` is kept
        for i in range(0, end - first):
            step = first + i
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            if a_lines is not None:
                # scales come with the codes: the fence that gives a buffer back may wait for loads from global memory
                # too
                scales: gl.constexpr = a_lines.block_type.nbytes + b_lines.block_type.nbytes
                mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes + scales)
                async_load(a_lines, [step, (top + low) * SIZE], bar, of_rows.index(stage))
                async_load(b_lines, [step, n * ACROSS], bar, of_columns.index(stage))
            else:
                mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes)
            async_load(a, [(top + low) * SIZE, step * SIZE], bar, left.index(stage))
            async_load(b, [n * ACROSS, step * SIZE], bar, right.index(stage))
            stage, phase = following(stage, phase, left.shape[0])
        group, top, n, low = place_after(group, top, n, low, step_group, step_top, step_n, step_low, span, down, across)


@gluon.jit
def write_depth(HALF: gl.constexpr, total, out, group, m, n, N, K, ADD: gl.constexpr):
    """Write a half of a tile where it belongs in `out` [G, N, K], or add it to what is there."""
    H: gl.constexpr = total.shape[0]
    ACROSS: gl.constexpr = total.shape[1]
    FLAT: gl.constexpr = flat_layout(ACROSS)
    # eight neighbours a thread: the layout of a sum would write two at a time
    y = gl.convert_layout(total.to(out.dtype.element_ty), FLAT)
    r = m * SIZE + HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, FLAT))
    c = n * ACROSS + gl.arange(0, ACROSS, layout=gl.SliceLayout(0, FLAT))
    at = (group.to(gl.int64) * N + r)[:, None] * K + c[None, :]
    live = (r < N)[:, None] & (c < K)[None, :]
    # no atomics: a tile belongs to one program
    if ADD:
        y += gl.load(out + at, mask=live, other=0.0)
    gl.store(out + at, y, mask=live)


@gluon.jit
def _hand_over(HALF: gl.constexpr, total, whole, room, group, m, n, N):
    """Hand a half of a tile to the copy unit, which writes it while nobody waits. No tile has rows of two groups
    there."""
    # the copy unit may still read what the tile before left there
    wait_until_read()
    room.store(total.to(whole.dtype))
    fence_async_shared()
    async_store(whole, [group * N + m * SIZE + HALF * (SIZE // 2), n * SIZE], room)


@gluon.jit
def _add_scaled(HALF: gl.constexpr, total, done, of_rows, of_columns, empty, stage):
    """Add a product by its scales to the sum, and give its buffer back. Threads have read scales there themselves:
    without the fence the copy unit, which does not wait for their reads, was seen to put the next ones there before all
    were done. No scale comes from global memory, whose loads the fence might wait for too."""
    H: gl.constexpr = SIZE // 2
    SUM: gl.constexpr = sum_layout()
    line = of_rows.index(stage).slice(HALF * H, H, dim=1).permute((1, 0))  # [H, 1]
    rows = line.load(SUM)
    columns = of_columns.index(stage).load(SUM)  # [1, SIZE]
    fence_async_shared()
    mbarrier.arrive(empty.index(stage), count=1)
    return total + (done * rows) * columns


@gluon.jit
def _add_then_scale(
    HALF: gl.constexpr, left, right, ready, empty, stage, phase, a_scale, b_scale, first, end, group, m, n,
    N, K, a_scale_group, b_scale_group, A_EACH: gl.constexpr, B_EACH: gl.constexpr,
):  # fmt: skip
    """Return the sum of a half tile by the scales of its group. Those of an empty group are not read: its sum is zero
    whatever they hold."""
    H: gl.constexpr = SIZE // 2
    SUM: gl.constexpr = sum_layout()
    rows = m * SIZE + HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, SUM))
    at_a, at_b = a_scale + group * a_scale_group, b_scale + group * b_scale_group
    # masks in place of a branch: the scales of an empty group are whatever the memory held
    some = (first < end).to(gl.int32)
    of_rows, of_columns = scales_ahead(at_a, at_b, rows, N * some, K * some, A_EACH, B_EACH)
    total, stage, phase = add_products(
        HALF, left, right, None, None, ready, empty, stage, phase, end - first, add_unscaled
    )
    columns = n * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, SUM))
    return scaled(total, of_rows, of_columns, at_b, columns, K * some, B_EACH), stage, phase


@gluon.jit
def multiply_depth(
    HALF: gl.constexpr, left, right, of_rows, of_columns, ready, empty, out, whole, a_scale, b_scale, block,
    G, N, K, a_scale_group, b_scale_group, span, A_EACH: gl.constexpr, B_EACH: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Multiply one half of each tile's rows. A scale reaches 128 far, and is copied with the codes (`of_rows`,
    `of_columns`), or over all rows of a group, and multiplies the sum (`a_scale`, `b_scale`). The sums of a wide tile
    are in four parts."""
    ACROSS: gl.constexpr = right.shape[1]
    WIDE: gl.constexpr = ACROSS == 4 * QUARTER
    down, across = gl.cdiv(N, SIZE), gl.cdiv(K, ACROSS)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    tiles = G * down * across
    group, top, n, low = place_of(gl.program_id(0), span, down, across)
    step_group, step_top, step_n, step_low = place_of(gl.num_programs(0), span, down, across)
    first, end = depth_of(group, block, G)
    if whole is not None:
        if WIDE:
            # all four quarters have room, so that no warp waits for a write
            room = gl.allocate_shared_memory(whole.dtype, [4, QUARTER, QUARTER], whole.layout)
        else:
            room = gl.allocate_shared_memory(whole.dtype, [SIZE // 2, SIZE], whole.layout)
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # one tile ahead, so that the products do not wait for the blocks of the next group
        next_group, next_top, next_n, next_low = place_after(
            group, top, n, low, step_group, step_top, step_n, step_low, span, down, across
        )
        next_first, next_end = depth_of(next_group, block, G)
        if WIDE:
            one, two, three, four, stage, phase = add_scaled_quarters(
                HALF, left, right, of_rows, of_columns, ready, empty, stage, phase, end - first
            )
            if whole is not None:
                row = group * N + (top + low) * SIZE + HALF * QUARTER
                hand_over_quarters(one, two, three, four, whole, room, row, n * ACROSS)
            else:
                write_depth(HALF, one, out, group, top + low, n * 4, N, K, ADD)
                write_depth(HALF, two, out, group, top + low, n * 4 + 1, N, K, ADD)
                write_depth(HALF, three, out, group, top + low, n * 4 + 2, N, K, ADD)
                write_depth(HALF, four, out, group, top + low, n * 4 + 3, N, K, ADD)
        else:
            if a_scale is not None:
                total, stage, phase = _add_then_scale(
                    HALF, left, right, ready, empty, stage, phase, a_scale, b_scale, first, end, group, top + low, n,
                    N, K, a_scale_group, b_scale_group, A_EACH, B_EACH,
                )  # fmt: skip
            else:
                total, stage, phase = add_products(
                    HALF, left, right, of_rows, of_columns, ready, empty, stage, phase, end - first, _add_scaled
                )
            if whole is not None:
                _hand_over(HALF, total, whole, room, group, top + low, n, N)
            else:
                write_depth(HALF, total, out, group, top + low, n, N, K, ADD)
        first, end = next_first, next_end
        group, top, n, low = next_group, next_top, next_n, next_low
    if whole is not None:
        wait_until_read()


@gluon.jit
def depth_kernel(a, b, a_lines, b_lines, out, whole, block, G, N, K, span, ADD: gl.constexpr):
    left, right = room_for_tiles(a, b)
    of_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SIZE], a_lines.layout)
    of_columns = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SIZE], b_lines.layout)
    ready, empty = barriers()
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
        [232, 40],
    )  # fmt: skip


@gluon.jit
def whole_depth_kernel(
    a, b, out, whole, a_scale, b_scale, block,
    G, N, K, a_scale_group, b_scale_group, span, A_EACH: gl.constexpr, B_EACH: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    left, right = room_for_tiles(a, b)
    ready, empty = barriers()
    gl.warp_specialize(
        [
            (multiply_depth, (0, left, right, None, None, ready, empty, out, whole, a_scale, b_scale, block,
                              G, N, K, a_scale_group, b_scale_group, span, A_EACH, B_EACH, ADD)),
            (multiply_depth, (1, left, right, None, None, ready, empty, out, whole, a_scale, b_scale, block,
                              G, N, K, a_scale_group, b_scale_group, span, A_EACH, B_EACH, ADD)),
            (load_depth, (a, b, None, None, left, right, None, None, ready, empty, block, G, N, K, span)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
