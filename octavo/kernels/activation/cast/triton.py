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
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.kernels import tile_cast
from octavo.kernels.activation import Function, Inputs
from octavo.kernels.activation.cast import VectorGradients, plain_backward, plain_forward
from octavo.kernels.activation.cast.elements import (
    begin_gradient,
    compute_here,
    finish_value,
    live_mask,
    load_raw,
    multiplier_of,
    places_of_tile,
    store_group_scales,
    store_row_sums,
    store_sums,
    unscale_gradient,
    with_bias,
)
from octavo.kernels.activation.cast.group_sums import group_sums, row_sums
from octavo.kernels.activation.cast.passes import NO_PASS, Cast, Kind, constants_of, passes
from octavo.kernels.activation.triton import clamped_a, constants, gate_of, gated_slopes, places
from octavo.kernels.column_sums import column_sums
from octavo.kernels.tile_cast import NOTHING, TileCast
from octavo.kernels.tile_cast import triton as tile_casts
from octavo.launch import Launch
from octavo.quant import dual, tile
from octavo.quant.groups import Groups
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.tensorwise.triton import store_given_scale, transposes_codes
from octavo.quant.tile import Config, group_of, group_tile, tile_index

# fastest first, measured on an H200 with [8192, 28672] into both orientations; blocks take the first of 128 x 128
CONFIGS = (Config(64, 64, 4), Config(128, 128, 16), Config(64, 128, 8))  # forward, and backward of one tile
GATED_CONFIGS = (Config(64, 64, 4), Config(64, 64, 8), Config(64, 128, 8))  # backward of da and db
# backward of da and db in groups, by measured scales, or with the gradient of scales, all of which take registers; of
# [16384, 28672] in 8 groups on an H200: 0.88 ms, 1.00, 1.03; a small tile leaves
# room for more programs, which wait in turn
GROUP_CONFIGS = (Config(32, 64, 4), Config(64, 64, 4), Config(64, 64, 8))
MEASURING = Config(64, 64, 8)  # the pass before that: on four warps it would spill for situglu
ROWS_ALONE = Config(64, 128, 8)  # forward into row codes only: 0.164 ms, against 0.172 with the first of 128 x 128


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
    # blocks that pad a group's rows have a tile too, and nothing in it
    if owner is not None:
        store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
        first, end, used = group_tile(source_row, used_rows, pm * ROWS, M)
        if used == 0:
            return
        g = group_of(owner, pm * ROWS)
        running_amax = running_amax if running_amax is None else running_amax + g
    elif measured is not None:
        store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
    rows, columns = places_of_tile(first, pk * COLUMNS, ROWS, COLUMNS, W)
    live = live_mask(rows, columns, end, H, WHOLE)
    # asked for before x: ptxas would move the load down to the cast, and wait for memory once more
    s = multiplier_of(inverse_scale, measured, g, RULE)
    if GATED:
        at_a, at_b = places(columns, H, INTERLEAVE)
        a, b = load_raw(x, rows, at_a, live, stride_m, stride_k), load_raw(x, rows, at_b, live, stride_m, stride_k)
        if owner is None:
            # a branch between loads and arithmetic, past which ptxas moves no load: everything is on its way before any
            # is waited for
            store_given_scale(row_scale, column_scale, inverse_scale, s)
        a, b = with_bias(a, bias, at_a, 2 * H, live), with_bias(b, bias, at_b, 2 * H, live)
        value, _ = CURVE(clamped_a(a, LIMIT), ALPHA)
        gate, _ = gate_of(b, LIMIT, GATE, BETA, OFFSET)
        value *= gate
    else:
        value, _ = CURVE(with_bias(load_raw(x, rows, columns, live, stride_m, stride_k), bias, columns, H, live), ALPHA)
    y = finish_value(value, x, scales, seed, rows, columns, live, end, H, DROP, KEPT, AT_ZERO, WHOLE)
    if (owner is None) and not GATED:
        # without a gate there is one load; the branch then stands after it
        y = compute_here(y)
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
    """Compute a tile of dy, and all that follows from it."""
    pm, pk = tile_index(H, COLUMNS)
    first, end, group = pm * ROWS, M, 0
    if owner is not None:
        first, end, used = group_tile(source_row, used_rows, pm * ROWS, M)
        # a group without rows has a scale all the same
        if used == 0:
            store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
            store_group_scales(None, again_scale, again_inverse_scale, again_measured, pm, pk, M, G, AGAIN_RULE, ROWS)
            return
        group = group_of(owner, pm * ROWS)
        running_amax = running_amax if running_amax is None else running_amax + group
        again_running_amax = again_running_amax if again_running_amax is None else again_running_amax + group
    rows, columns = places_of_tile(first, pk * COLUMNS, ROWS, COLUMNS, W)
    live = live_mask(rows, columns, end, H, WHOLE)
    s = multiplier_of(inverse_scale, measured, group, RULE)
    again_s = multiplier_of(again_inverse_scale, again_measured, group, AGAIN_RULE)
    g = load_raw(dy, rows, columns, live, dy_stride_m, dy_stride_k)
    if GATED:
        a = load_raw(x, rows, columns, live, stride_m, stride_k)
        b = load_raw(x, rows, columns + H, live, stride_m, stride_k)
        if owner is None:
            store_given_scale(row_scale, column_scale, inverse_scale, s)
            store_given_scale(None, again_scale, again_inverse_scale, again_s)
        a, b = with_bias(a, bias, columns, H, live), with_bias(b, bias, columns + H, 2 * H, live)
        value, slope = CURVE(clamped_a(a, LIMIT), ALPHA)
        gate, gate_slope = gate_of(b, LIMIT, GATE, BETA, OFFSET)
        begun = begin_gradient(g, seed, rows, columns, H, DROP, KEPT)
        g = unscale_gradient(begun, scales, rows, live, end, WHOLE)
        da, db = gated_slopes(g, a, b, value, slope, gate, gate_slope, LIMIT)
        value *= gate
        # rounded here, their wider inputs free their registers: 80 in place of 128 for SwiGLU, and six programs share a
        # multiprocessor in place of four
        da, db = compute_here(da.to(dy.dtype.element_ty)), compute_here(db.to(dy.dtype.element_ty))
    else:
        if x is not None:
            v = with_bias(load_raw(x, rows, columns, live, stride_m, stride_k), bias, columns, H, live)
        else:
            # the slope of such a curve is the same everywhere, and x was not kept
            v = gl.zeros((ROWS, COLUMNS), gl.float32, dual.row_layout(COLUMNS, W))
        value, slope = CURVE(v, ALPHA)
        begun = begin_gradient(g, seed, rows, columns, H, DROP, KEPT)
        g = unscale_gradient(begun, scales, rows, live, end, WHOLE)
        da = compute_here((g * slope).to(dy.dtype.element_ty))
    N = 2 * H if GATED else H
    if ds_parts is not None:
        # sums of a tile go to a row of their own, and are added in a pass after: atomics would add in an order that
        # changes
        store_row_sums(ds_parts, begun * value, pm * ROWS, pk, M, ROWS, COLUMNS, W)
    if AGAIN_PUT is not None:
        y = finish_value(value, x, scales, seed, rows, columns, live, end, H, DROP, KEPT, AT_ZERO, WHOLE)
        if (owner is not None) or (again_measured is not None):
            store_group_scales(None, again_scale, again_inverse_scale, again_measured, pm, pk, M, G, AGAIN_RULE, ROWS)
        elif not GATED:
            store_given_scale(None, again_scale, again_inverse_scale, again_s)
        AGAIN_PUT(
            y, None, again, None, again_scale, again_s, again_running_amax, M, H, H, pm * ROWS, pk * COLUMNS,
            0, 0, again_stride, again_block_stride, AGAIN_RULE, ROWS, COLUMNS, W,
        )  # fmt: skip
    if parts is not None:
        store_sums(parts, da, pm, columns, H, N)
    if PUT is not None:
        if (owner is not None) or (measured is not None):
            # da's cast takes the row scales and db's the column scales: see `store_group_scales`
            if GATED:
                store_group_scales(row_scale, None, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
            else:
                store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
        elif not GATED:
            store_given_scale(row_scale, column_scale, inverse_scale, s)
        PUT(
            da, row, column, row_scale, column_scale, s, running_amax, M, H, N, pm * ROWS, pk * COLUMNS,
            row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
        )  # fmt: skip
    if GATED:
        if parts is not None:
            store_sums(parts, db, pm, columns + H, N, N)
        if PUT is not None:
            if (owner is not None) or (measured is not None):
                store_group_scales(None, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
            PUT(
                db, row, column, row_scale, column_scale, s, running_amax, M, N, N, pm * ROWS, H + pk * COLUMNS,
                row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
            )  # fmt: skip


@gluon.jit
def _pairs_of(columns, H, INTERLEAVE: gl.constexpr):
    """Return, for columns of x, the column of dy that they belong to, where its a and b are, and whether they hold
    a."""
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
    """Compute a tile of dx of a gated function, wherever its a and b are."""
    N = 2 * H
    pm, pk = tile_index(N, COLUMNS)
    first, end, group = pm * ROWS, M, 0
    if owner is not None:
        first, end, used = group_tile(source_row, used_rows, pm * ROWS, M)
        if used == 0:
            store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
            return
        group = group_of(owner, pm * ROWS)
        running_amax = running_amax if running_amax is None else running_amax + group
    rows, columns = places_of_tile(first, pk * COLUMNS, ROWS, COLUMNS, W)
    live = live_mask(rows, columns, end, N, WHOLE)
    s = multiplier_of(inverse_scale, measured, group, RULE)
    of_y, at_a, at_b, is_a = _pairs_of(columns, H, INTERLEAVE)
    g = load_raw(dy, rows, of_y, live, dy_stride_m, dy_stride_k)
    a, b = load_raw(x, rows, at_a, live, stride_m, stride_k), load_raw(x, rows, at_b, live, stride_m, stride_k)
    a, b = with_bias(a, bias, at_a, N, live), with_bias(b, bias, at_b, N, live)
    value, slope = CURVE(clamped_a(a, LIMIT), ALPHA)
    gate, gate_slope = gate_of(b, LIMIT, GATE, BETA, OFFSET)
    begun = begin_gradient(g, seed, rows, of_y, H, DROP, KEPT)
    g = unscale_gradient(begun, scales, rows, live, end, WHOLE)
    da, db = gated_slopes(g, a, b, value, slope, gate, gate_slope, LIMIT)
    # a pair is computed twice, once for each of its columns: its second reads hit the cache
    d = compute_here(gl.where(is_a[None, :], da, db).to(dy.dtype.element_ty))
    if ds_parts is not None:
        products = gl.where(is_a[None, :], begun * (value * gate), 0.0)  # a pair has two columns here, and counts once
        store_row_sums(ds_parts, products, pm * ROWS, pk, M, ROWS, COLUMNS, W)
    if parts is not None:
        store_sums(parts, d, pm, columns, N, N)
    if PUT is not None:
        if (owner is not None) or (measured is not None):
            store_group_scales(row_scale, column_scale, inverse_scale, measured, pm, pk, M, G, RULE, ROWS)
        else:
            store_given_scale(row_scale, column_scale, inverse_scale, s)
        PUT(
            d, row, column, row_scale, column_scale, s, running_amax, M, N, N, pm * ROWS, pk * COLUMNS,
            row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
        )  # fmt: skip


# -- launches ----------------------------------------------------------------------------------------------------------

_WHAT = "the activation"
_ZERO_AT_ZERO = ("gelu", "swish", "relu", "srelu", "linear", "softcap", "situ")  # curves that are zero where x is


def _is_whole(pair: tile_cast.QTensorPair, width: int) -> bool:
    """Return whether the codes have no columns besides those of the values, which the kernels would not write."""
    row, column = pair
    return (row is None or row.columns == width) and (column is None or column.rows == width)


def forward(fn: Function, inputs: Inputs, y: TileCast, config: Config | None = None) -> Tensor | None:
    x, (pair, cast_args) = inputs.x, y
    assert x is not None
    m, width = x.shape[0], x.shape[1] // 2 if fn.gated else x.shape[1]
    refused = tile_cast.unsupported_reason(pair, cast_args, x.dtype, _WHAT, measures=True)
    # a kernel writes no columns that its values do not have: then the value is written first, and cast
    if x.numel() == 0 or refused or not _is_whole(pair, width):
        return plain_forward(fn, inputs, y)
    if config is None:
        configs = CONFIGS if pair[1] is not None else (ROWS_ALONE, *CONFIGS)
        config = tile_casts.fitting(configs, tile_casts.spec_of(pair))
    groups = cast_args.groups
    before, last = passes(y, x.dtype)
    for cast in (before, last):
        if cast is not None:
            sizes = (
                m if groups is None else groups.padded,
                width,
                *x.stride(),
                *cast.strides,
                1 if groups is None else groups.number,
            )
            launch = _launch("forward", fn, cast.kind, None, sizes, config, transposes_codes(config, x.device))
            launch(*inputs, *cast.pointers, *tile.pointers_of(groups))
    return last.pointers[-1]


def writes_dx(fn: Function, dy: Tensor, inputs: Inputs, spec: Quantizer | None) -> bool:
    # with blocks, write-then-cast is faster (0.53 ms against 0.59): a fused program computes da and db and keeps one
    return (
        fn.gated
        and not _by_halves(fn, spec)
        and (dy.dtype == torch.float32 or inputs.seed is not None or spec is None or tile_casts.is_block(spec))
    )


def backward(
    fn: Function,
    dy: Tensor,
    inputs: Inputs,
    dx: TileCast,
    y: TileCast,
    bias_grad: torch.dtype | None,
    scales_grad: torch.dtype | None,
    config: Config | None = None,
) -> VectorGradients:
    wanted = dx.pair != (None, None)
    spec, groups = tile_casts.spec_of(dx.pair) if wanted else None, dx.cast_args.groups
    woven = fn.gated and not _by_halves(fn, spec)
    apart = writes_dx(fn, dy, inputs, spec)
    height, n = dy.shape[0] if groups is None else groups.padded, dy.shape[1] * (2 if fn.gated else 1)
    refused = wanted and tile_cast.unsupported_reason(dx.pair, dx.cast_args, dy.dtype, _WHAT, measures=True)
    if dy.numel() == 0 or apart or refused or not _is_whole(dx.pair, n):
        return plain_backward(fn, dy, inputs, dx, y, bias_grad, scales_grad)
    if y.pair[1] is not None and (woven or not _beside(fn, inputs.x, y.pair[1], y.cast_args, dy.shape[1])):
        # a woven program sees a pair twice, and would write y twice; and some tiles would spill
        forward(fn, inputs, y)
        y = NOTHING
    if not wanted and y.pair[1] is None and bias_grad is None and scales_grad is None:
        return VectorGradients()
    if config is None:
        again = None if y.pair[1] is None else y.pair[1].spec
        measured = (wanted and tile_casts.measures(*dx)) or (again is not None and tile_casts.measures(*y))
        more = groups is not None or scales_grad is not None or measured
        config = tile_casts.fitting(backward_configs(fn.gated and not woven, more, dy.dtype), spec, again)
    call = _Backward(fn, dy, inputs, groups, woven, config)
    before, cast = passes(dx, dy.dtype)
    again_before, again_cast = passes(y, dy.dtype if inputs.x is None else inputs.x.dtype)
    if before is not None or again_before is not None:
        # both tensors are measured in one pass, which reads x and dy once
        measuring = call if woven else call._replace(config=MEASURING)
        measuring.launch(before or NO_PASS, again_before or NO_PASS)
    parts = ds_parts = None
    if bias_grad is not None:
        # a row for each tile down, so that the order of additions is fixed
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

    def launch(self, cast: Cast, again: Cast, parts: Tensor | None = None, ds_parts: Tensor | None = None) -> None:
        fn, dy, inputs, groups, woven, config = self
        height = dy.shape[0] if groups is None else groups.padded
        # a curve whose gradient does not depend on x keeps none
        steps = (0, 0) if inputs.x is None else inputs.x.stride()
        sizes = (height, dy.shape[1], *dy.stride(), *steps, *cast.strides)
        first = (dy, *inputs, parts, ds_parts, *cast.pointers)
        where, number = tile.pointers_of(groups), 1 if groups is None else groups.number
        transpose_codes = transposes_codes(config, dy.device)
        if woven:
            _launch("woven", fn, cast.kind, None, (*sizes, number), config, transpose_codes)(*first, *where)
            return
        _, codes, _, scale, *rest = again.pointers
        sizes = (*sizes, *again.strides[2:], number)
        launch = _launch("backward", fn, cast.kind, again.kind, sizes, config, transpose_codes)
        launch(*first, codes, scale, *rest, *where)


def backward_configs(by_halves: bool, more: bool, dtype: torch.dtype) -> tuple[Config, ...]:
    """Return the tiles to choose from. `more`: rows in groups, a measured scale, or the gradient of row scales."""
    if not by_halves:
        return CONFIGS
    return _gated_configs(dtype, GROUP_CONFIGS if more else GATED_CONFIGS)


def _gated_configs(dtype: torch.dtype, configs: tuple[Config, ...] = GATED_CONFIGS) -> tuple[Config, ...]:
    """Return the tiles for this dtype. float32 skips those of more than 16 elements a thread, which may spill."""
    return tuple(c for c in configs if dtype != torch.float32 or c.rows * c.columns <= 512 * c.warps)


def _by_halves(fn: Function, spec: Quantizer | None) -> bool:
    """Return whether one program writes both da and db of a gated function."""
    return not fn.interleave and (spec is None or not tile_casts.is_block(spec))


def _beside(fn: Function, x: Tensor | None, again: QTensor, cast_args: CastArgs, width: int) -> bool:
    """Return whether the kernel that writes dx may write y too; otherwise y takes a pass of its own."""
    assert x is not None
    spills = tile_casts.is_block(again.spec) and (fn.gated or x.dtype == torch.float32)
    refused = tile_cast.unsupported_reason((None, again), cast_args, x.dtype, _WHAT, measures=True)
    return not spills and not refused and _is_whole((None, again), width)


def function_constants(fn: Function) -> dict[str, Any]:
    """Return the function's constants and AT_ZERO: whether y may be nonzero at x = 0, which masked loads return."""
    gate = not fn.gated or fn.offset != 0.0 or fn.gate not in _ZERO_AT_ZERO
    return {**constants(fn), "AT_ZERO": gate and fn.curve not in _ZERO_AT_ZERO}


def tile_constants(config: Config, width: int) -> dict[str, int]:
    return {
        "ROWS": config.rows, "COLUMNS": config.columns, "W": config.warps, "WHOLE": width % config.columns == 0,
    }  # fmt: skip


@lru_cache(maxsize=4096)
def _launch(
    kernel: str, fn: Function, kind: Kind | None, again: Kind | None, sizes: tuple[int, ...], config: Config,
    transpose_codes: bool,
) -> Launch:  # fmt: skip
    width = sizes[1] * (2 if kernel == "woven" else 1)
    own = {**function_constants(fn), **constants_of(kind, transpose_codes), **tile_constants(config, width)}
    if kernel == "woven":
        del own["GATED"]
    if kernel == "backward":
        own |= again_constants(again, transpose_codes)
    return Launch(_KERNELS[kernel], tile.tiles((sizes[0], width), config), sizes, num_warps=config.warps, **own)


_KERNELS = {"forward": _forward_kernel, "backward": _backward_kernel, "woven": _woven_kernel}


def again_constants(kind: Kind | None, transpose_codes: bool) -> dict[str, Any]:
    return {f"AGAIN_{name}": value for name, value in constants_of(kind, transpose_codes).items()}
