"""Block scaling on the GPU, in one pass: a tile is a block both ways, so every amax is known once it is loaded."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.formats import E4M3, E5M2
from octavo.quant import tile, turned
from octavo.quant.block import BLOCK, _Blocks
from octavo.quant.block.reference import amax as amax
from octavo.quant.blocks import is_square
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Given
from octavo.quant.tile import (
    Config,
    Variant,
    amax_along,
    amax_bits,
    encode_scale,
    load_tile,
    store_codes,
    tile_index,
)

CONFIGS = (Config(BLOCK, BLOCK, 8), Config(BLOCK, BLOCK, 4))


@gluon.jit
def _orientation(
    v, codes, scale, given_amax, M, K, first_row, block, stride_row, stride_block,
    MAX: gl.constexpr, EPS: gl.constexpr, CEILING: gl.constexpr, POW2: gl.constexpr,
    TILE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """v, one block of 128 columns of an [M, K] orientation -> its codes, and a scale for each row."""
    rows = first_row + gl.arange(0, TILE, layout=gl.SliceLayout(1, turned.row_layout(TILE, W)))
    blocks = gl.cdiv(K, TILE)
    live = (rows < M) & (block < blocks)
    if given_amax is not None:
        a = gl.load(given_amax + rows.to(gl.int64) * blocks + block, mask=live, other=0.0)
    else:
        a = amax_along(v, 1)
    s, undo = encode_scale(a, MAX, EPS, CEILING, POW2)
    gl.store(scale + rows.to(gl.int64) * stride_row + block.to(gl.int64) * stride_block, undo, mask=live)
    turned.store_codes(codes, v.to(gl.float32) * s[:, None], M, K, first_row, block * TILE, TILE, TILE, W)


@gluon.jit
def _cast_1d_kernel(
    x, row, column, row_scale, column_scale, row_amax, column_amax, skip,
    M, K, stride_m, stride_k, row_stride, row_block_stride, column_stride, column_block_stride,
    MAX: gl.constexpr, EPS: gl.constexpr, CEILING: gl.constexpr, POW2: gl.constexpr,
    TILE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, pk = tile_index(K, TILE)
    v = turned.load_tile(x, M, K, stride_m, stride_k, pm * TILE, pk * TILE, TILE, TILE, W)
    if row is not None:
        _orientation(
            v, row, row_scale, row_amax, M, K, pm * TILE, pk, row_stride, row_block_stride,
            MAX, EPS, CEILING, POW2, TILE, W,
        )  # fmt: skip
    if column is not None:
        _orientation(
            turned.turn(v, TILE, W), column, column_scale, column_amax, K, M, pk * TILE, pm,
            column_stride, column_block_stride, MAX, EPS, CEILING, POW2, TILE, W,
        )  # fmt: skip


@triton.jit
def _cast_2d_kernel(
    x, row, column, row_scale, column_scale, amax, skip, M, K, stride_m, stride_k,
    MAX: tl.constexpr, EPS: tl.constexpr, CEILING: tl.constexpr, POW2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if skip is not None:
        if tl.load(skip) != 0:
            return
    pm, pk = tile_index(K, TILE)
    down, across = tl.cdiv(M, TILE), tl.cdiv(K, TILE)
    rows, columns = pm * TILE + tl.arange(0, TILE), pk * TILE + tl.arange(0, TILE)
    v = load_tile(x, M, K, stride_m, stride_k, rows, columns)
    live = (pm < down) & (pk < across)
    if amax is not None:
        a = tl.load(amax + pm.to(tl.int64) * across + pk, mask=live, other=0.0)
    else:
        a = amax_bits(v).to(tl.float32, bitcast=True)
    s, undo = encode_scale(a, MAX, EPS, CEILING, POW2)
    scaled = v.to(tl.float32) * s
    if row is not None:
        tl.store(row_scale + pm.to(tl.int64) * across + pk, undo, mask=live)
        store_codes(row, scaled.to(row.dtype.element_ty), M, K, rows, columns)
    if column is not None:
        tl.store(column_scale + pk.to(tl.int64) * down + pm, undo, mask=live)
        store_codes(column, tl.trans(scaled.to(column.dtype.element_ty)), K, M, columns, rows)


def cast(x: Tensor, row: QTensor | None, column: QTensor | None, given: Given, config: Config = CONFIGS[0]) -> None:
    spec = tile.spec_of(_Blocks, row, column)
    outputs = tile.bytes_of(row), tile.bytes_of(column), tile.scales_of(row), tile.scales_of(column)
    settings = {
        "MAX": spec.fmt.max, "EPS": spec.eps, "CEILING": torch.finfo(x.dtype).max, "POW2": spec.pow2,
        "TILE": BLOCK, "num_warps": config.warps,
    }  # fmt: skip
    grid = tile.tiles(x, config)
    if is_square(spec.block):
        found = given.amax[0] if row is not None else given.amax[1]
        if row is None and found is not None:
            found = found.T.contiguous()  # the kernel reads it in x's own orientation
        _cast_2d_kernel[grid](x, *outputs, found, given.skip, *x.shape, *x.stride(), **settings)
        return
    strides = [(0, 0) if q is None else q.scale.stride() for q in (row, column)]
    _cast_1d_kernel[grid](
        x,
        *outputs,
        *given.amax,
        given.skip,
        *x.shape,
        *x.stride(),
        *strides[0],
        *strides[1],
        **settings,
        W=config.warps,
    )


def variants() -> list[Variant]:
    cases = ((torch.bfloat16, E4M3, True), (torch.float16, E4M3, False), (torch.float32, E5M2, True))
    found = []
    for config in CONFIGS:
        for dtype, fmt, pow2 in cases:
            codes = tile.POINTERS[fmt.dtype]
            signature = {
                "x": tile.POINTERS[dtype], "row": codes, "column": codes, "row_scale": "*fp32", "column_scale": "*fp32",
                **tile.SIZES,
            }  # fmt: skip
            constants = {
                "skip": None, **tile.CONTIGUOUS, "MAX": fmt.max, "EPS": 0.0,
                "CEILING": torch.finfo(dtype).max, "POW2": pow2, "TILE": BLOCK,
            }  # fmt: skip
            by_row = {"W": config.warps, "row_stride": 1, "column_stride": 1, "row_amax": None, "column_amax": None}
            strides = {"row_block_stride": "i32", "column_block_stride": "i32"}
            found += [
                Variant(f"block-1d {dtype} {fmt} {config}", _cast_1d_kernel, signature | strides,
                        constants | by_row, config.warps),
                Variant(f"block-2d {dtype} {fmt} {config}", _cast_2d_kernel, signature,
                        constants | {"amax": None}, config.warps),
            ]  # fmt: skip
    return found
