"""The parts that the kernels of a cast activation share, on a tile in the layout of `octavo.quant.dual`: places, loads,
the value and the gradient of an element beside its function, the scales of groups, and partial sums."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.kernels.activation import DRAWN_BITS, STREAM
from octavo.quant import dual
from octavo.quant.tensorwise.triton import multiplier, store_scale
from octavo.quant.tile import inverse_scale_from

_STREAM = gl.constexpr(STREAM)
_UNUSED_BITS = gl.constexpr(32 - DRAWN_BITS)


@gluon.jit
def places_of_tile(first_row, first_column, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Return rows [R] and columns [C] of a tile."""
    layout: gl.constexpr = dual.row_layout(C, W)
    rows = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    return rows, columns


@gluon.jit
def live_mask(rows, columns, end, H, WHOLE: gl.constexpr):
    """Return a mask of the elements of a tile that exist; of its rows alone where tiles cover the columns exactly
    (WHOLE)."""
    if WHOLE:  # with other savings of its kind, the gradient of SwiGLU went from 87 to 72 instructions an element
        return (rows < end)[:, None]
    else:
        return (rows < end)[:, None] & (columns < H)[None, :]


@gluon.jit
def times_scales(value, scales, rows, live, end, WHOLE: gl.constexpr):
    """Multiply values by the scales of their rows; zero outside, where a scale of Inf meets the zeros of columns that
    do not exist. The scales of rows that do not exist are zero."""
    value = value * scales_of(scales, rows, end)
    if WHOLE:
        return value
    else:
        return gl.where(live, value, 0.0)


@gluon.jit
def load_raw(x, rows, columns, live, stride_m, stride_k):
    at = rows.to(gl.int64)[:, None] * stride_m + columns.to(gl.int64)[None, :] * stride_k
    # in x's own dtype: widened when it is used, it takes half the registers until then
    return gl.load(x + at, mask=live, other=0.0)


@gluon.constexpr_function
def elements_per_register(dtype):
    """Return how many elements a register holds."""
    return 32 // dtype.primitive_bitwidth


@gluon.jit
def compute_here(v):
    """Return v, computed no later than here: the compiler would move the computation to where v is used, and keep its
    wider inputs in registers until then."""
    # the backward of SwiGLU takes 80 registers with this and 128 without: six programs share a multiprocessor, not four
    pack: gl.constexpr = elements_per_register(v.dtype)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], dtype=v.dtype, is_pure=False, pack=pack)


@gluon.jit
def with_bias(v, bias, columns, limit, live):
    """Return float32 of v, the bias added; zero outside, as v is: the counterpart of activation.triton._values."""
    wide = v.to(gl.float32)
    if bias is not None:
        wide += gl.load(bias + columns, mask=columns < limit, other=0.0).to(gl.float32)[None, :]
        # a bias would make elements that do not exist count in sums
        wide = gl.where(live, wide, 0.0)
    return wide


@gluon.jit
def drop_out(v, seed, rows, columns, H, DROP: gl.constexpr, KEPT: gl.constexpr):
    """Return v where it stays, made larger, or zero: the counterpart of reference.kept, a counter for every element."""
    # a counter for every four neighbours of a row, as in the reference: any tile draws the same bits
    index = rows.to(gl.int64)[:, None] * gl.cdiv(H, 4) + (columns // 4)[None, :]
    low, high = index.to(gl.uint32), (index >> 32).to(gl.uint32)
    zero = low * 0
    step = gl.load(seed + 1).to(gl.uint32)
    a, b, c, d = triton.language.philox(gl.load(seed), low, high, zero + step, zero + _STREAM)
    word = (columns % 4)[None, :]
    drawn = gl.where(word < 2, gl.where(word == 0, a, b), gl.where(word == 2, c, d))
    # compared as integers, exactly
    return gl.where((drawn >> _UNUSED_BITS).to(gl.int32) >= DROP, v * KEPT, 0.0)


@gluon.jit
def scales_of(scales, rows, end):
    return gl.load(scales + rows, mask=rows < end, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def multiplier_of(inverse_scale, measured, g, RULE: gl.constexpr):
    """Return the inverse scale of a tile cast, asked for early, so that it comes while x does; 1 if the cast finds its
    own."""
    if inverse_scale is not None:
        return gl.load(inverse_scale + g)
    elif measured is not None:
        # each program computes it again from the amax, without a launch in between
        s, _ = inverse_scale_from(gl.load(measured + g), RULE[1], RULE[2], RULE[3], RULE[4])
        return s
    else:
        return 1.0


@gluon.jit
def store_group_scales(
    row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE: gl.constexpr, ROWS: gl.constexpr
):
    """Store the scales of groups. A group without rows has a scale too, and no tile: the tiles share out the groups.
    Blocks store their own, and `store_given_scale` that of a given inverse scale outside of groups. Backward calls it
    just before a cast, one orientation at a time: without a branch between them, the compiler mixes the casts and keeps
    twice the values in registers."""
    if (inverse_scale is not None) or (measured is not None):
        # one program for each row of tiles: they share the groups out
        if pk == 0:
            for i in range(pm, G, gl.maximum(gl.cdiv(M, ROWS), 1)):
                _, undo = multiplier(measured, inverse_scale, i, RULE[1], RULE[2], RULE[3], RULE[4])
                store_scale(row_scale, column_scale, i, undo)


@gluon.jit
def finish_value(
    value, like, scales, seed, rows, columns, live, end, H,
    DROP: gl.constexpr, KEPT: gl.constexpr, AT_ZERO: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Return y of the function's own value, as it would have been written; zero outside, where the function need not
    be."""
    if AT_ZERO:
        # such a curve is not zero where a masked load returned zero
        value = gl.where(live, value, 0.0)
    if scales is not None:
        value = times_scales(value, scales, rows, live, end, WHOLE)
    if seed is not None:
        value = drop_out(value, seed, rows, columns, H, DROP, KEPT)
    return value.to(like.dtype.element_ty)


@gluon.jit
def begin_gradient(dy, seed, rows, columns, H, DROP: gl.constexpr, KEPT: gl.constexpr):
    """Return the gradient of the scaled value: zero outside, and so is all that is made of it."""
    g = dy.to(gl.float32)
    if seed is not None:
        g = drop_out(g, seed, rows, columns, H, DROP, KEPT)
    return g


@gluon.jit
def unscale_gradient(g, scales, rows, live, end, WHOLE: gl.constexpr):
    """Return the gradient of the function's own value."""
    if scales is not None:
        g = times_scales(g, scales, rows, live, end, WHOLE)
    return g


@gluon.jit
def store_sums(parts, v, pm, columns, limit, N):
    """Store sums of a tile down its columns, to a row of parts [tiles down, N]."""
    # of the rounded gradient, as a pass over the written one would sum
    total = gl.sum(v.to(gl.float32), 0)
    gl.store(parts + pm.to(gl.int64) * N + columns, total, mask=columns < limit)


@gluon.jit
def store_row_sums(parts, v, first_row, pk, M, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Store sums of a tile along its rows, to a row of parts [tiles across, M]."""
    rows = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, dual.row_layout(C, W)))
    gl.store(parts + pk.to(gl.int64) * M + rows, gl.sum(v, 1), mask=rows < M)
