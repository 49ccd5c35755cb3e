"""Activations into codes on the GPU, in Gluon, on tiles in the layout of `octavo.quant.dual`. The functions of
`octavo.kernels.activation.triton` compute each element in float32; the kernel rounds it, then casts it.

Bits agree with the kernels that write the value because both call the same functions, so that the compiler contracts
the same additions to a fused multiply-add. It has a choice only where two products are added, and none of these
functions does that. Keep it so.

Backward of a gated function has two kernels. With one scale for the whole tensor, and a and b as halves, a program
reads dy, a and b of a tile once and writes da, db and y. Otherwise a program covers a tile of dx, whose columns may
alternate between a and b: it computes both gradients of every pair and keeps one. Its second reads hit the cache,
since the programs that run at the same time cover a few hundred rows. (With blocks the first kernel would need a
128 x 128 tile of each, and spill.)

Rows in groups (`octavo.quant.groups`) come with the pointers `owner`, `source_row` and `used_rows`; the grid and M are
of the padded layout, and a tile belongs to one group. Without groups these are None, and the kernel is compiled without
this code. A Tensorwise whose inverse scale is not given takes a pass of the same kernel before, which only raises an
amax: that reads x and dy twice, where a value that is written first is written once and read twice."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.formats import E4M3, E5M2
from octavo.kernels import tile_cast
from octavo.kernels.activation import ACTIVATIONS, DRAWN_BITS, STREAM, Function, Inputs
from octavo.kernels.activation.cast import VectorGradients, plain_backward, plain_forward
from octavo.kernels.activation.cast.group_sums import group_sums, row_sums
from octavo.kernels.activation.triton import clamped_a, constants, gate_of, gated_slopes, places
from octavo.kernels.column_sums import column_sums
from octavo.kernels.tile_cast import NOTHING, Target
from octavo.kernels.tile_cast import triton as tile_casts
from octavo.launch import Launch
from octavo.quant import dual, tile
from octavo.quant.block import Block1D, Block2D
from octavo.quant.groups import Groups
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.tensorwise.triton import (
    is_transposable,
    multiplier,
    store_given_scale,
    store_scale,
    transposes_codes,
)
from octavo.quant.tile import Config, Variant, group_of, group_tile, inverse_scale_from, tile_index

# fastest first, measured on an H200 with [8192, 28672] into both orientations; blocks take the first of 128 x 128
CONFIGS = (Config(64, 64, 4), Config(128, 128, 16), Config(64, 128, 8))  # forward, and backward of one tile
GATED_CONFIGS = (Config(64, 64, 4), Config(64, 64, 8), Config(64, 128, 8))  # backward of da and db
# backward of da and db in groups, by measured scales, or with the gradient of scales, all of which take registers; of
# [16384, 28672] in 8 groups on an H200: 0.88 ms, 1.00, 1.03; a small tile leaves
# room for more programs, which wait in turn
GROUP_CONFIGS = (Config(32, 64, 4), Config(64, 64, 4), Config(64, 64, 8))
MEASURING = Config(64, 64, 8)  # the pass before that: on four warps it would spill for situglu
ROWS_ALONE = Config(64, 128, 8)  # forward into row codes only: 0.164 ms, against 0.172 with the first of 128 x 128
_STREAM = gl.constexpr(STREAM)
_UNUSED_BITS = gl.constexpr(32 - DRAWN_BITS)


@gluon.jit
def _places_of_tile(first_row, first_column, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Rows [R] and columns [C] of a tile."""
    layout: gl.constexpr = dual.row_layout(C, W)
    rows = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    return rows, columns


@gluon.jit
def _live(rows, columns, end, H, WHOLE: gl.constexpr):
    """A mask of the elements of a tile that exist; of its rows alone where tiles cover the columns exactly (WHOLE)."""
    if WHOLE:
        return (rows < end)[:, None]
    else:
        return (rows < end)[:, None] & (columns < H)[None, :]


@gluon.jit
def _times_scales(value, scales, rows, live, end, WHOLE: gl.constexpr):
    """value by the scales of its rows; zero outside, where a scale of Inf meets the zeros of columns that do not exist.
    The scales of rows that do not exist are zero."""
    value = value * _scales_of(scales, rows, end)
    if WHOLE:
        return value
    else:
        return gl.where(live, value, 0.0)


@gluon.jit
def _raw(x, rows, columns, live, stride_m, stride_k):
    at = rows.to(gl.int64)[:, None] * stride_m + columns.to(gl.int64)[None, :] * stride_k
    return gl.load(x + at, mask=live, other=0.0)


@gluon.constexpr_function
def _word(dtype):
    """How many elements a register holds."""
    return 32 // dtype.primitive_bitwidth


@gluon.jit
def _here(v):
    """v, computed no later than here: the compiler would move the computation to where v is used, and keep its wider
    inputs in registers until then."""
    pack: gl.constexpr = _word(v.dtype)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], dtype=v.dtype, is_pure=False, pack=pack)


@gluon.jit
def _added(v, bias, columns, limit, live):
    """float32 of v, the bias added; zero outside, as v is: the twin of activation.triton._values."""
    wide = v.to(gl.float32)
    if bias is not None:
        wide += gl.load(bias + columns, mask=columns < limit, other=0.0).to(gl.float32)[None, :]
        wide = gl.where(live, wide, 0.0)
    return wide


@gluon.jit
def _kept(v, seed, rows, columns, H, DROP: gl.constexpr, KEPT: gl.constexpr):
    """v where it stays, made larger, or zero: the twin of reference.kept, a counter for every element."""
    index = rows.to(gl.int64)[:, None] * gl.cdiv(H, 4) + (columns // 4)[None, :]
    low, high = index.to(gl.uint32), (index >> 32).to(gl.uint32)
    zero = low * 0
    step = gl.load(seed + 1).to(gl.uint32)
    a, b, c, d = triton.language.philox(gl.load(seed), low, high, zero + step, zero + _STREAM)
    word = (columns % 4)[None, :]
    drawn = gl.where(word < 2, gl.where(word == 0, a, b), gl.where(word == 2, c, d))
    return gl.where((drawn >> _UNUSED_BITS).to(gl.int32) >= DROP, v * KEPT, 0.0)


@gluon.jit
def _scales_of(scales, rows, end):
    return gl.load(scales + rows, mask=rows < end, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def _multiplier_of(inverse_scale, measured, g, RULE: gl.constexpr):
    """Asked for early, so that it comes while x does; 1 of a sink that finds its own."""
    if inverse_scale is not None:
        return gl.load(inverse_scale + g)
    elif measured is not None:
        s, _ = inverse_scale_from(gl.load(measured + g), RULE[1], RULE[2], RULE[3], RULE[4])
        return s
    else:
        return 1.0


@gluon.jit
def _store_group_scales(
    row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE: gl.constexpr, ROWS: gl.constexpr
):
    """A group without rows has a scale too, and no tile: the tiles share out the groups. Blocks store their own, and
    `store_given_scale` that of a given inverse scale outside of groups. Backward calls it just before a cast, one
    orientation at a time: without a branch between them, the compiler mixes the casts and keeps twice the values in
    registers."""
    if (inverse_scale is not None) or (measured is not None):
        if pk == 0:
            for i in range(pm, G, gl.maximum(gl.cdiv(M, ROWS), 1)):
                _, undo = multiplier(measured, inverse_scale, i, RULE[1], RULE[2], RULE[3], RULE[4])
                store_scale(row_scale, column_scale, i, undo)


@gluon.jit
def _finished(
    value, like, scales, seed, rows, columns, live, end, H,
    DROP: gl.constexpr, KEPT: gl.constexpr, AT_ZERO: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """y of the function's own value, as it would have been written; zero outside, where the function need not be."""
    if AT_ZERO:
        value = gl.where(live, value, 0.0)
    if scales is not None:
        value = _times_scales(value, scales, rows, live, end, WHOLE)
    if seed is not None:
        value = _kept(value, seed, rows, columns, H, DROP, KEPT)
    return value.to(like.dtype.element_ty)


@gluon.jit
def _begun(dy, seed, rows, columns, H, DROP: gl.constexpr, KEPT: gl.constexpr):
    """The gradient of the scaled value: zero outside, and so is all that is made of it."""
    g = dy.to(gl.float32)
    if seed is not None:
        g = _kept(g, seed, rows, columns, H, DROP, KEPT)
    return g


@gluon.jit
def _unscaled(g, scales, rows, live, end, WHOLE: gl.constexpr):
    """The gradient of the function's own value."""
    if scales is not None:
        g = _times_scales(g, scales, rows, live, end, WHOLE)
    return g


@gluon.jit
def _store_sums(parts, v, pm, columns, limit, N):
    """Sums of a tile down its columns, to a row of parts [tiles down, N]."""
    total = gl.sum(v.to(gl.float32), 0)
    gl.store(parts + pm.to(gl.int64) * N + columns, total, mask=columns < limit)


@gluon.jit
def _store_row_sums(parts, v, first_row, pk, M, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Sums of a tile along its rows, to a row of parts [tiles across, M]."""
    rows = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, dual.row_layout(C, W)))
    gl.store(parts + pk.to(gl.int64) * M + rows, gl.sum(v, 1), mask=rows < M)


@gluon.jit
def _forward_kernel(
    x, scales, bias, seed, row, column, row_scale, column_scale, inverse_scale,
    running_amax, measured,
    owner, source_row, used_rows,
    M, H, stride_m, stride_k, row_stride, row_block_stride, column_stride, column_block_stride, G,
    CURVE: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, GATE: gl.constexpr,
    BETA: gl.constexpr, OFFSET: gl.constexpr, INTERLEAVE: gl.constexpr, DROP: gl.constexpr, KEPT: gl.constexpr,
    AT_ZERO: gl.constexpr, PUT: gl.constexpr, RULE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    pm, pk = tile_index(H, COLUMNS)
    first, end, g = pm * ROWS, M, 0
    if owner is not None:
        _store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
        first, end, used = group_tile(source_row, used_rows, pm * ROWS, M)
        if used == 0:
            return
        g = group_of(owner, pm * ROWS)
        if running_amax is not None:
            running_amax += g
    elif measured is not None:
        _store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
    rows, columns = _places_of_tile(first, pk * COLUMNS, ROWS, COLUMNS, W)
    live = _live(rows, columns, end, H, WHOLE)
    s = _multiplier_of(inverse_scale, measured, g, RULE)
    if GATED:
        at_a, at_b = places(columns, H, INTERLEAVE)
        a, b = _raw(x, rows, at_a, live, stride_m, stride_k), _raw(x, rows, at_b, live, stride_m, stride_k)
        if owner is None:
            store_given_scale(row_scale, column_scale, inverse_scale, s)
        a, b = _added(a, bias, at_a, 2 * H, live), _added(b, bias, at_b, 2 * H, live)
        value, _ = CURVE(clamped_a(a, LIMIT), ALPHA)
        gate, _ = gate_of(b, LIMIT, GATE, BETA, OFFSET)
        value *= gate
    else:
        value, _ = CURVE(_added(_raw(x, rows, columns, live, stride_m, stride_k), bias, columns, H, live), ALPHA)
    y = _finished(value, x, scales, seed, rows, columns, live, end, H, DROP, KEPT, AT_ZERO, WHOLE)
    if (owner is None) and not GATED:
        y = _here(y)
        store_given_scale(row_scale, column_scale, inverse_scale, s)
    PUT(
        y, row, column, row_scale, column_scale, s, running_amax, M, H, H, pm * ROWS, pk * COLUMNS,
        row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
    )  # fmt: skip


@gluon.jit
def _backward_kernel(
    dy, x, scales, bias, seed, parts, ds_parts, row, column, row_scale, column_scale, inverse_scale,
    running_amax, measured,
    again, again_scale, again_inverse_scale, again_running_amax, again_measured, owner, source_row, used_rows,
    M, H, dy_stride_m, dy_stride_k, stride_m, stride_k,
    row_stride, row_block_stride, column_stride, column_block_stride, again_stride, again_block_stride, G,
    CURVE: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, GATE: gl.constexpr,
    BETA: gl.constexpr, OFFSET: gl.constexpr, INTERLEAVE: gl.constexpr, DROP: gl.constexpr, KEPT: gl.constexpr,
    AT_ZERO: gl.constexpr, PUT: gl.constexpr, RULE: gl.constexpr, AGAIN_PUT: gl.constexpr, AGAIN_RULE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """A tile of dy, and all that follows from it."""
    pm, pk = tile_index(H, COLUMNS)
    first, end, group = pm * ROWS, M, 0
    if owner is not None:
        first, end, used = group_tile(source_row, used_rows, pm * ROWS, M)
        if used == 0:
            _store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
            _store_group_scales(None, again_scale, again_inverse_scale, again_measured, pm, pk, M, G, AGAIN_RULE, ROWS)
            return
        group = group_of(owner, pm * ROWS)
        if running_amax is not None:
            running_amax += group
        if again_running_amax is not None:
            again_running_amax += group
    rows, columns = _places_of_tile(first, pk * COLUMNS, ROWS, COLUMNS, W)
    live = _live(rows, columns, end, H, WHOLE)
    s = _multiplier_of(inverse_scale, measured, group, RULE)
    again_s = _multiplier_of(again_inverse_scale, again_measured, group, AGAIN_RULE)
    g = _raw(dy, rows, columns, live, dy_stride_m, dy_stride_k)
    if GATED:
        a = _raw(x, rows, columns, live, stride_m, stride_k)
        b = _raw(x, rows, columns + H, live, stride_m, stride_k)
        if owner is None:
            store_given_scale(row_scale, column_scale, inverse_scale, s)
            store_given_scale(None, again_scale, again_inverse_scale, again_s)
        a, b = _added(a, bias, columns, H, live), _added(b, bias, columns + H, 2 * H, live)
        value, slope = CURVE(clamped_a(a, LIMIT), ALPHA)
        gate, gate_slope = gate_of(b, LIMIT, GATE, BETA, OFFSET)
        begun = _begun(g, seed, rows, columns, H, DROP, KEPT)
        g = _unscaled(begun, scales, rows, live, end, WHOLE)
        da, db = gated_slopes(g, a, b, value, slope, gate, gate_slope, LIMIT)
        value *= gate
        da, db = _here(da.to(dy.dtype.element_ty)), _here(db.to(dy.dtype.element_ty))
    else:
        if x is not None:
            v = _added(_raw(x, rows, columns, live, stride_m, stride_k), bias, columns, H, live)
        else:
            v = gl.zeros((ROWS, COLUMNS), gl.float32, dual.row_layout(COLUMNS, W))
        value, slope = CURVE(v, ALPHA)
        begun = _begun(g, seed, rows, columns, H, DROP, KEPT)
        g = _unscaled(begun, scales, rows, live, end, WHOLE)
        da = _here((g * slope).to(dy.dtype.element_ty))
    N = 2 * H if GATED else H
    if ds_parts is not None:
        _store_row_sums(ds_parts, begun * value, pm * ROWS, pk, M, ROWS, COLUMNS, W)
    if AGAIN_PUT is not None:
        y = _finished(value, x, scales, seed, rows, columns, live, end, H, DROP, KEPT, AT_ZERO, WHOLE)
        if (owner is not None) or (again_measured is not None):
            _store_group_scales(None, again_scale, again_inverse_scale, again_measured, pm, pk, M, G, AGAIN_RULE, ROWS)
        elif not GATED:
            store_given_scale(None, again_scale, again_inverse_scale, again_s)
        AGAIN_PUT(
            y, None, again, None, again_scale, again_s, again_running_amax, M, H, H, pm * ROWS, pk * COLUMNS,
            0, 0, again_stride, again_block_stride, AGAIN_RULE, ROWS, COLUMNS, W,
        )  # fmt: skip
    if parts is not None:
        _store_sums(parts, da, pm, columns, H, N)
    if PUT is not None:
        if (owner is not None) or (measured is not None):
            if GATED:
                _store_group_scales(row_scale, None, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
            else:
                _store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
        elif not GATED:
            store_given_scale(row_scale, column_scale, inverse_scale, s)
        PUT(
            da, row, column, row_scale, column_scale, s, running_amax, M, H, N, pm * ROWS, pk * COLUMNS,
            row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
        )  # fmt: skip
    if GATED:
        if parts is not None:
            _store_sums(parts, db, pm, columns + H, N, N)
        if PUT is not None:
            if (owner is not None) or (measured is not None):
                _store_group_scales(None, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
            PUT(
                db, row, column, row_scale, column_scale, s, running_amax, M, N, N, pm * ROWS, H + pk * COLUMNS,
                row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
            )  # fmt: skip


@gluon.jit
def _pairs_of(columns, H, INTERLEAVE: gl.constexpr):
    """Of columns of x: the column of dy that they belong to, where its a and b are, and whether they hold a."""
    if INTERLEAVE:
        pair, within = columns // (2 * INTERLEAVE), columns % INTERLEAVE
        a = pair * (2 * INTERLEAVE) + within
        return pair * INTERLEAVE + within, a, a + INTERLEAVE, columns - a < INTERLEAVE
    else:
        a = gl.where(columns < H, columns, columns - H)
        return a, a, a + H, columns < H


@gluon.jit
def _woven_kernel(
    dy, x, scales, bias, seed, parts, ds_parts, row, column, row_scale, column_scale, inverse_scale,
    running_amax, measured,
    owner, source_row, used_rows,
    M, H, dy_stride_m, dy_stride_k, stride_m, stride_k,
    row_stride, row_block_stride, column_stride, column_block_stride, G,
    CURVE: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr,
    OFFSET: gl.constexpr, INTERLEAVE: gl.constexpr, DROP: gl.constexpr, KEPT: gl.constexpr, AT_ZERO: gl.constexpr,
    PUT: gl.constexpr, RULE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """A tile of dx of a gated function, wherever its a and b are."""
    N = 2 * H
    pm, pk = tile_index(N, COLUMNS)
    first, end, group = pm * ROWS, M, 0
    if owner is not None:
        first, end, used = group_tile(source_row, used_rows, pm * ROWS, M)
        if used == 0:
            _store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
            return
        group = group_of(owner, pm * ROWS)
        if running_amax is not None:
            running_amax += group
    rows, columns = _places_of_tile(first, pk * COLUMNS, ROWS, COLUMNS, W)
    live = _live(rows, columns, end, N, WHOLE)
    s = _multiplier_of(inverse_scale, measured, group, RULE)
    of_y, at_a, at_b, is_a = _pairs_of(columns, H, INTERLEAVE)
    g = _raw(dy, rows, of_y, live, dy_stride_m, dy_stride_k)
    a, b = _raw(x, rows, at_a, live, stride_m, stride_k), _raw(x, rows, at_b, live, stride_m, stride_k)
    a, b = _added(a, bias, at_a, N, live), _added(b, bias, at_b, N, live)
    value, slope = CURVE(clamped_a(a, LIMIT), ALPHA)
    gate, gate_slope = gate_of(b, LIMIT, GATE, BETA, OFFSET)
    begun = _begun(g, seed, rows, of_y, H, DROP, KEPT)
    g = _unscaled(begun, scales, rows, live, end, WHOLE)
    da, db = gated_slopes(g, a, b, value, slope, gate, gate_slope, LIMIT)
    d = _here(gl.where(is_a[None, :], da, db).to(dy.dtype.element_ty))
    if ds_parts is not None:
        products = gl.where(is_a[None, :], begun * (value * gate), 0.0)  # a pair has two columns here, and counts once
        _store_row_sums(ds_parts, products, pm * ROWS, pk, M, ROWS, COLUMNS, W)
    if parts is not None:
        _store_sums(parts, d, pm, columns, N, N)
    if PUT is not None:
        if (owner is not None) or (measured is not None):
            _store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
        else:
            store_given_scale(row_scale, column_scale, inverse_scale, s)
        PUT(
            d, row, column, row_scale, column_scale, s, running_amax, M, N, N, pm * ROWS, pk * COLUMNS,
            row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
        )  # fmt: skip


# -- launches ----------------------------------------------------------------------------------------------------------

_WHAT = "the activation"
_ZERO_AT_ZERO = ("gelu", "swish", "relu", "srelu", "linear", "softcap", "situ")  # curves that are zero where x is
_NO_CAST: dict[str, Any] = {"PUT": None, "RULE": ()}
_Pointers = tuple[Tensor | None, ...]


class _Kind(NamedTuple):
    """The use that a kernel is compiled to make of the values of a tile."""

    spec: Quantizer
    dtype: torch.dtype
    way: str  # the inverse scale of a Tensorwise is "given" or follows from a "measured" amax; or "measure" that amax

    def constants(self, transpose_codes: bool) -> dict[str, Any]:
        if self.way == "measure":
            return tile_casts.MEASURE
        return tile_casts.constants(self.spec, self.dtype, transpose_codes, self.way == "given")


class _Cast(NamedTuple):
    """One pass over some values: what it does with them, and the pointers and strides for that."""

    kind: _Kind | None = None
    pointers: _Pointers = (None,) * 7  # row, column, row_scale, column_scale, encode, observed, measured
    strides: tuple[int, ...] = (0, 0, 0, 0)


_NO_PASS = _Cast()


def _passes(target: Target, dtype: torch.dtype) -> tuple[_Cast | None, _Cast]:
    """Returns the pass that measures first, None if scales or amaxes are given or scales follow from blocks; and the
    cast."""
    if target.pair == (None, None):
        return None, _NO_PASS
    spec, groups = tile_casts.spec_of(target.pair), target.cast_args.groups
    pointers, strides = tile_casts.pointers(*target), tile_casts.strides(target.pair)
    if not tile_casts.measures(*target):
        return None, _Cast(_Kind(spec, dtype, "given"), (*pointers, None), strides)
    given = target.cast_args.amax[target.pair[0] is None]
    if given is not None:
        return None, _Cast(_Kind(spec, dtype, "measured"), (*pointers, given), strides)
    amax = torch.zeros((1, 1) if groups is None else groups.number, dtype=torch.float32, device=_device(target.pair))
    before = _Cast(_Kind(spec, dtype, "measure"), (*(None,) * 5, amax, None))
    return before, _Cast(_Kind(spec, dtype, "measured"), (*pointers, amax), strides)


def _scales(groups: Groups | None) -> int:
    """Returns the number of scales of a Tensorwise: one, or one for each group."""
    return 1 if groups is None else groups.number


def _device(pair: tile_cast.QTensorPair) -> torch.device:
    lead = pair[1] if pair[0] is None else pair[0]
    assert lead is not None
    return lead.codes.device


def _is_whole(pair: tile_cast.QTensorPair, width: int) -> bool:
    """Whether the codes have no columns besides those of the values, which the kernels would not write."""
    row, column = pair
    return (row is None or row.columns == width) and (column is None or column.rows == width)


def forward(fn: Function, inputs: Inputs, y: Target, config: Config | None = None) -> Tensor | None:
    x, (pair, cast_args) = inputs.x, y
    assert x is not None
    m, width = x.shape[0], x.shape[1] // 2 if fn.gated else x.shape[1]
    refused = tile_cast.unsupported_reason(pair, cast_args, x.dtype, _WHAT, measures=True)
    if x.numel() == 0 or refused or not _is_whole(pair, width):
        return plain_forward(fn, inputs, y)
    if config is None:
        configs = CONFIGS if pair[1] is not None else (ROWS_ALONE, *CONFIGS)
        config = tile_casts.fitting(configs, tile_casts.spec_of(pair))
    groups = cast_args.groups
    passes = _passes(y, x.dtype)
    for cast in passes:
        if cast is not None:
            sizes = (m if groups is None else groups.padded, width, *x.stride(), *cast.strides, _scales(groups))
            launch = _forward_launch(fn, cast.kind, sizes, config, transposes_codes(config, x.device))
            launch(*inputs, *cast.pointers, *tile.pointers_of(groups))
    return passes[1].pointers[-1]


def backward(
    fn: Function,
    dy: Tensor,
    inputs: Inputs,
    dx: Target,
    y: Target,
    bias_grad: torch.dtype | None,
    scales_grad: torch.dtype | None,
    config: Config | None = None,
) -> VectorGradients:
    wanted = dx.pair != (None, None)
    spec, groups = tile_casts.spec_of(dx.pair) if wanted else None, dx.cast_args.groups
    woven = fn.gated and not _by_halves(fn, spec)
    # with blocks, write-then-cast is faster (0.53 ms against 0.59): a fused program computes da and db and keeps one
    apart = woven and (
        dy.dtype == torch.float32 or inputs.seed is not None or spec is None or tile_casts.is_block(spec)
    )
    height, n = dy.shape[0] if groups is None else groups.padded, dy.shape[1] * (2 if fn.gated else 1)
    refused = wanted and tile_cast.unsupported_reason(dx.pair, dx.cast_args, dy.dtype, _WHAT, measures=True)
    if dy.numel() == 0 or apart or refused or not _is_whole(dx.pair, n):
        return plain_backward(fn, dy, inputs, dx, y, bias_grad, scales_grad)
    if y.pair[1] is not None and (woven or not _beside(fn, inputs.x, y.pair[1], y.cast_args, dy.shape[1])):
        forward(fn, inputs, y)
        y = NOTHING
    if not wanted and y.pair[1] is None and bias_grad is None and scales_grad is None:
        return VectorGradients()
    if config is None:
        again = None if y.pair[1] is None else y.pair[1].spec
        measured = (wanted and tile_casts.measures(*dx)) or (again is not None and tile_casts.measures(*y))
        more = groups is not None or scales_grad is not None or measured
        config = tile_casts.fitting(_backward_configs(fn.gated and not woven, more, dy.dtype), spec, again)
    call = _Backward(fn, dy, inputs, groups, woven, config)
    before, cast = _passes(dx, dy.dtype)
    again_before, again_cast = _passes(y, dy.dtype if inputs.x is None else inputs.x.dtype)
    if before is not None or again_before is not None:
        measuring = call if woven else call._replace(config=MEASURING)
        measuring.launch(before or _NO_PASS, again_before or _NO_PASS)
    parts = ds_parts = None
    if bias_grad is not None:
        parts = torch.empty(-(-height // config.rows), n, dtype=torch.float32, device=dy.device)
    if scales_grad is not None:
        tiles = -(-(n if woven else dy.shape[1]) // config.columns)
        ds_parts = torch.empty(tiles, height, dtype=torch.float32, device=dy.device)
    call.launch(cast, again_cast, parts, ds_parts)
    if groups is None:
        return VectorGradients(
            None if parts is None or bias_grad is None else column_sums(parts, bias_grad),
            None if ds_parts is None or scales_grad is None else column_sums(ds_parts, scales_grad),
        )
    return VectorGradients(
        None if parts is None or bias_grad is None else group_sums(parts, groups, config.rows, bias_grad),
        None if ds_parts is None or scales_grad is None else row_sums(ds_parts, groups, scales_grad),
    )


class _Backward(NamedTuple):
    """A backward: all of it but what a pass does with its values."""

    fn: Function
    dy: Tensor
    inputs: Inputs
    groups: Groups | None
    woven: bool
    config: Config

    def launch(self, cast: _Cast, again: _Cast, parts: Tensor | None = None, ds_parts: Tensor | None = None) -> None:
        fn, dy, inputs, groups, woven, config = self
        height = dy.shape[0] if groups is None else groups.padded
        steps = (0, 0) if inputs.x is None else inputs.x.stride()
        sizes = (height, dy.shape[1], *dy.stride(), *steps, *cast.strides)
        first = (dy, *inputs, parts, ds_parts, *cast.pointers)
        where, number = tile.pointers_of(groups), _scales(groups)
        transpose_codes = transposes_codes(config, dy.device)
        if woven:
            _woven_launch(fn, cast.kind, (*sizes, number), config, transpose_codes)(*first, *where)
            return
        _, codes, _, scale, *rest = again.pointers
        sizes = (*sizes, *again.strides[2:], number)
        launch = _backward_launch(fn, cast.kind, again.kind, sizes, config, transpose_codes)
        launch(*first, codes, scale, *rest, *where)


def _backward_configs(by_halves: bool, more: bool, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the tiles to choose from. `more`: rows in groups, a measured scale, or the gradient of row scales."""
    if not by_halves:
        return CONFIGS
    return _gated_configs(dtype, GROUP_CONFIGS if more else GATED_CONFIGS)


def _gated_configs(dtype: torch.dtype, configs: tuple[Config, ...] = GATED_CONFIGS) -> tuple[Config, ...]:
    """Returns the tiles for this dtype. float32 skips those of more than 16 elements a thread, which may spill."""
    return tuple(c for c in configs if dtype != torch.float32 or c.rows * c.columns <= 512 * c.warps)


def _by_halves(fn: Function, spec: Quantizer | None) -> bool:
    """Whether one program writes both da and db of a gated function."""
    return not fn.interleave and (spec is None or not tile_casts.is_block(spec))


def _beside(fn: Function, x: Tensor | None, again: QTensor, cast_args: CastArgs, width: int) -> bool:
    """Whether the kernel that writes dx may write y too; otherwise y takes a pass of its own."""
    assert x is not None
    spills = tile_casts.is_block(again.spec) and (fn.gated or x.dtype == torch.float32)
    refused = tile_cast.unsupported_reason((None, again), cast_args, x.dtype, _WHAT, measures=True)
    return not spills and not refused and _is_whole((None, again), width)


def _constants(fn: Function) -> dict[str, Any]:
    """Returns the function's constants and AT_ZERO: whether y may be nonzero at x = 0, which masked loads return."""
    gate = not fn.gated or fn.offset != 0.0 or fn.gate not in _ZERO_AT_ZERO
    return {**constants(fn), "AT_ZERO": gate and fn.curve not in _ZERO_AT_ZERO}


def _tile(config: Config, width: int) -> dict[str, int]:
    return {
        "ROWS": config.rows, "COLUMNS": config.columns, "W": config.warps, "WHOLE": width % config.columns == 0,
    }  # fmt: skip


@lru_cache(maxsize=4096)
def _forward_launch(
    fn: Function, kind: _Kind | None, sizes: tuple[int, ...], config: Config, transpose_codes: bool
) -> Launch:
    return Launch(
        _forward_kernel, tile.tiles(sizes[:2], config), sizes, num_warps=config.warps,
        **_constants(fn), **_cast_constants(kind, transpose_codes), **_tile(config, sizes[1]),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _backward_launch(
    fn: Function, kind: _Kind | None, again: _Kind | None, sizes: tuple[int, ...], config: Config, transpose_codes: bool
) -> Launch:
    return Launch(
        _backward_kernel, tile.tiles(sizes[:2], config), sizes, num_warps=config.warps,
        **_constants(fn), **_cast_constants(kind, transpose_codes), **_again(again, transpose_codes),
        **_tile(config, sizes[1]),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _woven_launch(
    fn: Function, kind: _Kind | None, sizes: tuple[int, ...], config: Config, transpose_codes: bool
) -> Launch:
    own = {name: value for name, value in _constants(fn).items() if name != "GATED"}
    return Launch(
        _woven_kernel, tile.tiles((sizes[0], 2 * sizes[1]), config), sizes, num_warps=config.warps,
        **own, **_cast_constants(kind, transpose_codes), **_tile(config, 2 * sizes[1]),
    )  # fmt: skip


def _cast_constants(kind: _Kind | None, transpose_codes: bool) -> dict[str, Any]:
    return _NO_CAST if kind is None else kind.constants(transpose_codes)


def _again(kind: _Kind | None, transpose_codes: bool) -> dict[str, Any]:
    return {f"AGAIN_{name}": value for name, value in _cast_constants(kind, transpose_codes).items()}


# -- the record of compilations ----------------------------------------------------------------------------------------


def variants() -> list[Variant]:
    """Lists the compilations: every tile, every kind of cast, every activation and its optional inputs."""
    swiglu, clamped, gelu = (ACTIVATIONS[name] for name in ("swiglu", "clamped-swiglu", "gelu"))
    given, gradient, rows, square = Tensorwise(), Tensorwise(E5M2), Block1D(), Block2D(E4M3, "fp32")
    half = torch.bfloat16
    found = [_forward_variant("swiglu", swiglu, given, half, config=config) for config in CONFIGS]
    found += [_forward_variant(name, fn, given, half) for name, fn in ACTIVATIONS.items() if name != "swiglu"]
    found += [_forward_variant("swiglu", swiglu, spec, half) for spec in (rows, square)]
    found += [_forward_variant("swiglu", swiglu, spec, torch.float32) for spec in (given, rows, square)]
    found += [
        _forward_variant("swiglu", swiglu, given, torch.float16),
        _forward_variant("swiglu", swiglu, given, half, sides="row", config=ROWS_ALONE),
        _forward_variant("swiglu", swiglu, rows, half, sides="column"),
        _forward_variant("clamped-swiglu by 32", clamped._replace(interleave=32), rows, half, "scales"),
        _forward_variant("gelu", gelu, given, half, "bias"),
        _forward_variant("gelu with dropout", gelu._replace(drop=0.1), given, half, "seed"),
    ]
    found += [_backward_variant("swiglu", swiglu, gradient, half, config, again=given) for config in GATED_CONFIGS]
    found += [_backward_variant(name, fn, gradient, half) for name, fn in ACTIVATIONS.items()]
    found += [
        _backward_variant("swiglu", swiglu, gradient, half, extra="bias", again=given),
        _backward_variant("swiglu", swiglu, gradient, torch.float16, again=given),
        _backward_variant("swiglu", swiglu, gradient, torch.float32, again=given),
        _backward_variant("swiglu", swiglu, gradient, half, sides="row", again=given),
        _backward_variant("clamped-swiglu", clamped, gradient, half, extra="scales", again=given),
        _backward_variant("gelu with dropout", gelu._replace(drop=0.1), gradient, half, extra="seed"),
        _backward_variant("gelu", gelu, rows, half, extra="bias", again=rows),
        _backward_variant("gelu", gelu, square, half, extra="bias", again=square),
        _backward_variant("gelu", gelu, square, torch.float32, extra="bias"),
    ]
    by_32, situ = clamped._replace(interleave=32), ACTIVATIONS["situglu"]
    found += [
        _woven_variant("clamped-swiglu by 32", by_32, gradient, half),
        _woven_variant("clamped-swiglu by 32", by_32, gradient, half, "scales"),
        _woven_variant("clamped-swiglu by 32", by_32, gradient, torch.float16, "bias"),
        _woven_variant("situglu by 32", situ._replace(interleave=32), gradient, half, "scales"),
    ]
    # the curves that need the most registers, with the options that need the most
    found += [_backward_variant("situglu", situ, gradient, half, config, again=given) for config in GATED_CONFIGS]
    found += [_forward_variant("situglu", situ, spec, torch.float32) for spec in (given, rows, square)]
    found += [
        _forward_variant("situglu", situ, rows, half, "scales"),
        _backward_variant("situglu", situ, gradient, half, extra="bias", again=given),
        _backward_variant("situglu", situ, gradient, torch.float32, again=given),
    ]
    found += [
        variant for way in ("one measure", "one measured") for variant in (
            _forward_variant("swiglu", swiglu, given, half, way=way),
            _forward_variant("situglu", situ, given, torch.float32, way=way),
            _woven_variant("clamped-swiglu by 32", by_32, gradient, half, "scales", way),
        )
    ]  # fmt: skip
    for name, fn in (("swiglu", swiglu), ("situglu", situ), ("gelu", gelu)):
        found += [
            _backward_variant(name, fn, gradient, half, MEASURING, again=given, way="one measure"),
            _backward_variant(name, fn, gradient, half, MEASURING, way="one measure"),
            _backward_variant(name, fn, gradient, half, again=given, way="one measured"),
            _backward_variant(name, fn, gradient, torch.float32, again=given, way="one measured"),
        ]
    ragged = {"width": 72}  # of no tile
    found += [
        _forward_variant("swiglu, ragged", swiglu, given, half, "scales", **ragged),
        _backward_variant("swiglu, ragged", swiglu, gradient, half, again=given, **ragged),
        _backward_variant("situglu, ragged", situ, gradient, half, None, "scales, of scales", given, **ragged),
        _woven_variant("clamped-swiglu by 32, ragged", by_32, gradient, half, "scales", **ragged),
    ]
    return found + _group_variants()


def _group_variants() -> list[Variant]:
    """Lists the compilations for rows in groups, and for the gradient of row scales."""
    swiglu, clamped, situ, srelu = (ACTIVATIONS[name] for name in ("swiglu", "clamped-swiglu", "situglu", "srelu"))
    given, gradient, rows, square = Tensorwise(), Tensorwise(E5M2), Block1D(), Block2D(E4M3, "fp32")
    half, ways = torch.bfloat16, ("given", "measure", "measured")
    every, ragged = "scales, of scales, bias", {"way": "given", "width": 72}
    found = [_forward_variant("swiglu", swiglu, given, half, "scales", way=way) for way in ways]
    found += [_forward_variant("swiglu", swiglu, spec, half, "scales", way="given") for spec in (rows, square)]
    found += [_forward_variant("situglu", situ, spec, torch.float32, "scales", way="given") for spec in (given, rows)]
    found += [
        _forward_variant("swiglu", swiglu, given, half, sides="row", config=ROWS_ALONE, way="given"),
        _forward_variant("swiglu", swiglu, rows, half, sides="column", way="given"),
        _forward_variant("srelu", srelu, given, torch.float16, "scales", way="measured"),
        _forward_variant("clamped-swiglu by 32", clamped._replace(interleave=32), rows, half, "scales", way="given"),
    ]
    for name, fn in (("swiglu", swiglu), ("situglu", situ)):
        found += [
            _backward_variant(name, fn, gradient, half, config, every, given, way="given") for config in GROUP_CONFIGS
        ]
        found += [
            _backward_variant(name, fn, gradient, half, MEASURING, "scales", given, way="measure"),
            _backward_variant(name, fn, gradient, half, None, every, given, way="measured"),
            _backward_variant(name, fn, gradient, torch.float32, None, every, given, way="given"),
            _backward_variant(name, fn, gradient, half, None, "scales, of scales", given),
        ]
    found += [
        _backward_variant("clamped-swiglu", clamped, gradient, torch.float16, None, every, given, way="given"),
        _backward_variant("swiglu", swiglu, gradient, half, None, "", given, way="given"),
        _backward_variant("swiglu", swiglu, given, half, None, every, given, way="measured"),
        _backward_variant("srelu", srelu, gradient, half, None, every, given, way="given"),
        _backward_variant("srelu", srelu, gradient, half, None, every, given, way="measured"),
        _backward_variant("srelu", srelu, rows, half, None, every, rows, way="given"),
        _backward_variant("srelu", srelu, rows, torch.float32, None, every, way="given"),
        _backward_variant("srelu", srelu, square, half, None, every, square, way="given"),
    ]
    found += [
        _forward_variant("situglu, ragged", situ, given, half, "scales", **ragged),
        _backward_variant("swiglu, ragged", swiglu, gradient, half, None, every, given, **ragged),
        _backward_variant("situglu, ragged", situ, gradient, half, None, every, given, **ragged),
        _backward_variant("situglu, ragged", situ, gradient, torch.float32, None, every, given, **ragged),
    ]
    by_32, situ_by_32 = clamped._replace(interleave=32), situ._replace(interleave=32)
    found += [_woven_variant("clamped-swiglu by 32", by_32, gradient, half, every, way) for way in ways[::2]]
    found += [_woven_variant("clamped-swiglu by 32", by_32, gradient, half, "scales", "measure")]
    found += [_woven_variant("situglu by 32", situ_by_32, gradient, half, every, way) for way in ways[::2]]
    found += [_woven_variant("clamped-swiglu by 32", by_32, gradient, torch.float16, every)]
    return found


def _variant(title: str, kernel: Any, kinds: dict[str, Any], fixed: dict[str, Any], config: Config) -> Variant:
    signature = {name: kinds[name] for name in kernel.arg_names if kinds.get(name) is not None}
    own = {name: fixed.get(name) for name in kernel.arg_names if name not in signature}
    return Variant(f"{title} {config}", kernel, signature, own, config.warps)


def _kinds(
    fn: Function, spec: Quantizer, dtype: torch.dtype, extra: str, sides: str, way: str, config: Config
) -> tuple[Any, Any]:
    """Returns (signature, constants) of the parameters that all kernels share."""
    pointer = tile.POINTERS[dtype]
    there, fixed = _cast_signature(spec, sides != "column", sides != "row", way)
    numbers = dict.fromkeys(("M", "H", "stride_m", "dy_stride_m"), "i32")
    signature = there | numbers | {
        "dy": pointer, "x": pointer, "scales": "*fp32" if "scales" in extra else None,
        "bias": pointer if extra == "bias" else None, "parts": "*fp32" if "bias" in extra else None,
        "seed": "*i64" if extra == "seed" else None, "ds_parts": "*fp32" if "of scales" in extra else None,
    }  # fmt: skip
    if _in_groups(way):
        signature |= {**dict.fromkeys(("owner", "source_row", "used_rows"), "*i32"), "G": "i32"}
    constants = _kind(spec, dtype, way).constants(is_transposable(config))
    return signature, fixed | {"stride_k": 1, "dy_stride_k": 1, "G": 1, **_constants(fn), **constants}


def _in_groups(way: str) -> bool:
    """Whether rows are in groups: `way` is how a group's inverse scale is found, or "one " and how that of all rows is;
    "" is given, for all rows."""
    return way != "" and not way.startswith("one ")


def _kind(spec: Quantizer, dtype: torch.dtype, way: str) -> _Kind:
    return _Kind(spec, dtype, way.removeprefix("one ") or "given")


def _cast_signature(spec: Quantizer, row: bool, column: bool, way: str) -> tuple[dict[str, Any], dict[str, Any]]:
    there, fixed = tile_casts.signature(spec, row, column)
    way = way.removeprefix("one ")
    if way == "measure":
        return {"running_amax": "*fp32"}, dict.fromkeys((*fixed, *there), 0) | dict.fromkeys(_POINTERS)
    if way == "measured":
        return there | {"inverse_scale": None, "running_amax": None, "measured": "*fp32"}, fixed
    return there, fixed


_POINTERS = ("row", "column", "row_scale", "column_scale", "inverse_scale")


def _title(what: str, spec: Quantizer, dtype: torch.dtype, extra: str, sides: str, way: str) -> str:
    groups = f"groups {way}" if _in_groups(way) else way
    return ", ".join(filter(None, (f"{what} {dtype} to {spec}", extra, sides and f"{sides} alone", groups)))


def _forward_variant(name, fn, spec, dtype, extra="", config=None, sides="", way="", width=0):
    config = config or tile_casts.fitting(CONFIGS, spec)
    kinds, fixed = _kinds(fn, spec, dtype, extra, sides, way, config)
    title = _title(f"activation quantize {name}", spec, dtype, extra, sides, way)
    return _variant(title, _forward_kernel, kinds, fixed | _tile(config, width or config.columns), config)


def _backward_variant(name, fn, spec, dtype, config=None, extra="", again=None, sides="", way="", width=0):
    more = way != "" or "of scales" in extra
    config = config or tile_casts.fitting(_backward_configs(fn.gated, more, dtype), spec, again)
    kinds, fixed = _kinds(fn, spec, dtype, extra, sides, way, config)
    title = _title(f"activation quantize backward {name}", spec, dtype, extra, sides, way)
    fixed |= _again(None if again is None else _kind(again, dtype, way), is_transposable(config))
    fixed |= {"again_stride": 0, "again_block_stride": 0}
    if again is not None:
        title += f", again {again.fmt}"
        there, steps = _cast_signature(again, False, True, way)
        kinds |= {"again": there.get("column"), "again_scale": there.get("column_scale")}
        kinds |= {f"again_{n}": there.get(n) for n in ("inverse_scale", "running_amax", "measured")}
        kinds |= {f"again{n[6:]}": there.get(n) for n in tile_casts.STRIDES[2:]}
        fixed |= {f"again{n[6:]}": steps.get(n) for n in tile_casts.STRIDES[2:]}
    return _variant(title, _backward_kernel, kinds, fixed | _tile(config, width or config.columns), config)


def _woven_variant(name, fn, spec, dtype, extra="", way="", width=0):
    config = tile_casts.fitting(CONFIGS, spec)
    kinds, fixed = _kinds(fn, spec, dtype, extra, "", way, config)
    title = _title(f"activation quantize backward, woven {name}", spec, dtype, extra, "", way)
    return _variant(title, _woven_kernel, kinds, fixed | _tile(config, width or config.columns), config)
