"""Block scaling on the GPU, in one pass: a tile is a block both ways, so every amax is known once it is loaded."""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.launch import Launch
from octavo.quant import dual, tile
from octavo.quant.block import BLOCK, _Blocks
from octavo.quant.maxima import amax as amax
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs
from octavo.quant.scale_blocks import is_square
from octavo.quant.tile import Config, Sizes, amax_along, amax_bits, group_tile, inverse_scale_from, tile_index

CONFIGS = (Config(BLOCK, BLOCK, 8), Config(BLOCK, BLOCK, 4))


@gluon.jit
def _orientation(
    v, codes, scale, given_amax, M, K, pitch, first_row, block, stride_row, stride_block,
    MAX: gl.constexpr, EPS: gl.constexpr, CEILING: gl.constexpr, POW2: gl.constexpr, SQUARE: gl.constexpr,
    TILE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Write the codes of v, one block of 128 columns of an [M, K] orientation, and a scale for each row, or for the
    block. Rows of codes are `pitch` apart, of which only the first K are written."""
    layout: gl.constexpr = gl.SliceLayout(1, dual.row_layout(TILE, W))
    rows = first_row + gl.arange(0, TILE, layout=layout)
    blocks = gl.cdiv(K, TILE)
    if SQUARE:
        rows = rows * 0 + first_row // TILE  # one scale, held and stored alike by all
        live = (rows < gl.cdiv(M, TILE)) & (block < blocks)
    else:
        live = (rows < M) & (block < blocks)
    if given_amax is not None:
        a = gl.load(given_amax + rows.to(gl.int64) * blocks + block, mask=live, other=0.0)
    elif SQUARE:
        a = (rows * 0 + amax_bits(v)).to(gl.float32, bitcast=True)
    else:
        a = amax_along(v, 1)
    s, undo = inverse_scale_from(a, MAX, EPS, CEILING, POW2)
    gl.store(scale + rows.to(gl.int64) * stride_row + block.to(gl.int64) * stride_block, undo, mask=live)
    dual.store_codes_inside(codes, v.to(gl.float32) * s[:, None], M, K, pitch, first_row, block * TILE, TILE, TILE, W)


@gluon.jit
def _store_tile(
    v, row, column, row_scale, column_scale, row_amax, column_amax, M, K, pitch, pm, pk,
    row_stride, row_block_stride, column_stride, column_block_stride,
    MAX: gl.constexpr, EPS: gl.constexpr, CEILING: gl.constexpr, POW2: gl.constexpr, SQUARE: gl.constexpr,
    TILE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Store codes and scales of v, the block (pm, pk), in the orientations that are there."""
    if row is not None:
        _orientation(
            v, row, row_scale, row_amax, M, K, pitch, pm * TILE, pk, row_stride, row_block_stride,
            MAX, EPS, CEILING, POW2, SQUARE, TILE, W,
        )  # fmt: skip
    if column is not None:
        _orientation(
            dual.transpose(v, TILE, W), column, column_scale, column_amax, K, M, M, pk * TILE, pm,
            column_stride, column_block_stride, MAX, EPS, CEILING, POW2, SQUARE, TILE, W,
        )  # fmt: skip


@gluon.jit
def put(
    v, row, column, row_scale, column_scale, s, running_amax, M, K, pitch, first_row, first_column,
    row_stride, row_block_stride, column_stride, column_block_stride,
    RULE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Cast a tile (`octavo.kernels.tile_cast`) as `_cast_kernel` does: a tile is a block, so that it finds its own
    inverse scales."""
    gl.static_assert(ROWS == COLUMNS, "a tile is one block")
    _store_tile(
        v, row, column, row_scale, column_scale, None, None, M, K, pitch, first_row // ROWS, first_column // COLUMNS,
        row_stride, row_block_stride, column_stride, column_block_stride,
        RULE[0], RULE[1], RULE[2], RULE[3], RULE[4], COLUMNS, W,
    )  # fmt: skip


@gluon.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, row_amax, column_amax, skip, source, live, gather,
    M, K, stride_m, stride_k, row_stride, row_block_stride, column_stride, column_block_stride, height,
    MAX: gl.constexpr, EPS: gl.constexpr, CEILING: gl.constexpr, POW2: gl.constexpr, SQUARE: gl.constexpr,
    TILE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, pk = tile_index(K, TILE)
    first, end = pm * TILE, M
    if source is not None:
        first, end, used = group_tile(source, live, pm * TILE, M)
        if used == 0:
            return
    if gather is None:
        v = dual.load_tile(x, end, K, stride_m, stride_k, first, pk * TILE, TILE, TILE, W)
    else:
        v = dual.gather_tile(x, gather, end, height, K, stride_m, stride_k, first, pk * TILE, TILE, TILE, W)
    _store_tile(
        v, row, column, row_scale, column_scale, row_amax, column_amax, M, K, K, pm, pk,
        row_stride, row_block_stride, column_stride, column_block_stride,
        MAX, EPS, CEILING, POW2, SQUARE, TILE, W,
    )  # fmt: skip


def cast(
    x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs, config: Config = CONFIGS[0]
) -> None:
    spec = tile.spec_of(_Blocks, row, column)
    groups, source = cast_args.groups, cast_args.source
    strides = (*x.stride(), *tile.scale_strides(row), *tile.scale_strides(column))
    _, *where = tile.pointers_of(groups)
    _cast_launch(spec, tile.shape_inside(x, groups), strides, tile.height_of(x, source), x.dtype, config)(
        x, *tile.codes_and_scales(row, column), *cast_args.amax, cast_args.skip, *where, source
    )


@lru_cache(maxsize=4096)
def _cast_launch(
    spec: _Blocks, shape: Sizes, strides: Sizes, height: int | None, dtype: torch.dtype, config: Config
) -> Launch:
    constants = {**tile.rule(spec, torch.finfo(dtype).max), "SQUARE": is_square(spec.block)}
    return tile.launch(_cast_kernel, shape, (*strides, height), config, **constants)
