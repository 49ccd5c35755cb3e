"""Rowwise on the GPU: one pass for the amax of every row and column together, one for the cast."""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.launch import Launch
from octavo.quant import dual, tile
from octavo.quant.groups import Groups
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer
from octavo.quant.rowwise import Rowwise
from octavo.quant.tile import (
    Config,
    Sizes,
    float_bits,
    group_of,
    group_tile,
    inverse_scale_from,
    magnitude_bits,
    tile_index,
)

CONFIGS = (Config(128, 128, 8), Config(64, 128, 4))
AMAX_CONFIGS = (Config(128, 128, 4), Config(64, 256, 8))


@gluon.jit
def _amax_kernel(
    x, row, column, skip, owner, source, live, M, K, stride_m, stride_k,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    first, end = pm * ROWS, M
    if owner is not None:
        first, end, _ = group_tile(source, live, pm * ROWS, M)
        if first >= end:
            return
        if column is not None:
            column += group_of(owner, pm * ROWS).to(gl.int64) * K
    v = dual.load_tile(x, end, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W)
    # integer maxima commute, so atomics give the same bits in any order
    if row is not None:
        bits = float_bits(gl.max(magnitude_bits(v), 1), v)
        rows = pm * ROWS + gl.arange(0, ROWS, layout=bits.type.layout)
        gl.atomic_max(row + rows, bits, mask=rows < M, sem="relaxed")
    if column is not None:
        bits = float_bits(gl.max(magnitude_bits(dual.transpose(v, ROWS, W)), 1), v)
        columns = pk * COLUMNS + gl.arange(0, COLUMNS, layout=bits.type.layout)
        gl.atomic_max(column + columns, bits, mask=columns < K, sem="relaxed")


@gluon.jit
def _orientation(
    v, codes, scale, amax, M, K, first_row, first_column, is_first,
    MAX: gl.constexpr, EPS: gl.constexpr, CEILING: gl.constexpr, POW2: gl.constexpr,
    R: gl.constexpr, C: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Write the codes of v, [R, C] of an [M, K] orientation; whoever holds the first columns writes the rows' scales,
    if not somebody else does."""
    rows = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, dual.row_layout(C, W)))
    s, undo = inverse_scale_from(gl.load(amax + rows, mask=rows < M, other=0.0), MAX, EPS, CEILING, POW2)
    if scale is not None:
        gl.store(scale + rows, undo, mask=(rows < M) & is_first)
    dual.store_codes(codes, v.to(gl.float32) * s[:, None], M, K, first_row, first_column, R, C, W)


@gluon.jit
def _store_column_scales(
    scale, amax, M, K, pm, first_column,
    MAX: gl.constexpr, EPS: gl.constexpr, CEILING: gl.constexpr, POW2: gl.constexpr, GROUPS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Store the column scales of all groups, between the tiles that hold the same columns: a group without rows has
    scales too, and no tile."""
    columns = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, dual.row_layout(ROWS, W)))
    for g in range(pm, GROUPS, gl.maximum(gl.cdiv(M, ROWS), 1)):
        at = g.to(gl.int64) * K + columns  # type: ignore[attr-defined]
        _, undo = inverse_scale_from(gl.load(amax + at, mask=columns < K, other=0.0), MAX, EPS, CEILING, POW2)
        gl.store(scale + at, undo, mask=columns < K)


@gluon.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, row_amax, column_amax, skip, owner, source, live,
    M, K, stride_m, stride_k,
    MAX: gl.constexpr, EPS: gl.constexpr, CEILING: gl.constexpr, POW2: gl.constexpr, GROUPS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    first, end = pm * ROWS, M
    if owner is not None:
        if column is not None:
            _store_column_scales(
                column_scale, column_amax, M, K, pm, pk * COLUMNS,
                MAX, EPS, CEILING, POW2, GROUPS, ROWS, COLUMNS, W,
            )  # fmt: skip
        first, end, used = group_tile(source, live, pm * ROWS, M)
        if used == 0:
            return
        if column is not None:
            column_scale = None
            column_amax += group_of(owner, pm * ROWS).to(gl.int64) * K
    v = dual.load_tile(x, end, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W)
    if row is not None:
        _orientation(
            v, row, row_scale, row_amax, M, K, pm * ROWS, pk * COLUMNS, pk == 0,
            MAX, EPS, CEILING, POW2, ROWS, COLUMNS, W,
        )  # fmt: skip
    if column is not None:
        _orientation(
            dual.transpose(v, ROWS, W), column, column_scale, column_amax, K, M, pk * COLUMNS, pm * ROWS, pm == 0,
            MAX, EPS, CEILING, POW2, COLUMNS, ROWS, W,
        )  # fmt: skip


def amax(
    x: Tensor,
    row: Quantizer | None,
    column: Quantizer | None,
    skip: Tensor | None,
    groups: Groups | None = None,
    config: Config = AMAX_CONFIGS[0],
) -> AmaxPair:
    m, k = tile.shape_inside(x, groups)
    wide = k if groups is None else k * groups.number
    # one zeroed buffer for both, one launch to zero it
    found = torch.zeros((m if row else 0) + (wide if column else 0), dtype=torch.int32, device=x.device)
    row_bits = found[:m] if row else None
    column_bits = found[-wide:] if column and wide else (found[:0] if column else None)
    _amax_launch((m, k), x.stride(), config)(x, row_bits, column_bits, skip, *tile.pointers_of(groups))
    row_amax, column_amax = (None if bits is None else bits.view(torch.float32) for bits in (row_bits, column_bits))
    if groups is not None:
        return row_amax, None if column_amax is None else column_amax.view(groups.number, k)
    return None if row_amax is None else row_amax[:, None], None if column_amax is None else column_amax[:, None]


def cast(
    x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs, config: Config = CONFIGS[0]
) -> None:
    spec, groups = tile.spec_of(Rowwise, row, column), cast_args.groups
    _cast_launch(spec, tile.shape_inside(x, groups), x.stride(), tile.number_of(groups), config)(
        x, *tile.codes_and_scales(row, column), *cast_args.amax, cast_args.skip, *tile.pointers_of(groups)
    )


@lru_cache(maxsize=4096)
def _amax_launch(shape: Sizes, strides: Sizes, config: Config) -> Launch:
    return tile.launch(_amax_kernel, shape, strides, config)


@lru_cache(maxsize=4096)
def _cast_launch(spec: Rowwise, shape: Sizes, strides: Sizes, groups: int, config: Config) -> Launch:
    return tile.launch(_cast_kernel, shape, strides, config, **tile.rule(spec), GROUPS=groups)
