"""Rowwise on the GPU: one pass for the amax of every row and column together, one for the cast."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.quant import tile
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Given, Pair, Quantizer
from octavo.quant.rowwise import Rowwise
from octavo.quant.scale import FLOAT32_MAX
from octavo.quant.tile import (
    Config,
    Variant,
    encode_scale,
    load_tile,
    magnitude_bits,
    reciprocal,
    store_codes,
    tile_index,
)

CONFIGS = (Config(128, 128, 8), Config(64, 128, 4), Config(128, 64, 4))
AMAX_CONFIGS = (Config(128, 128, 8), Config(64, 256, 8), Config(128, 256, 8))


@triton.jit
def _amax_kernel(x, row, column, skip, M, K, stride_m, stride_k, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if skip is not None:
        if tl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    rows, columns = pm * ROWS + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    bits = magnitude_bits(load_tile(x, M, K, stride_m, stride_k, rows, columns))
    # integer maxima commute, so atomics give the same bits in any order
    if row is not None:
        tl.atomic_max(row + rows, tl.max(bits, 1), mask=rows < M, sem="relaxed")
    if column is not None:
        tl.atomic_max(column + columns, tl.max(bits, 0), mask=columns < K, sem="relaxed")


@triton.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, row_amax, column_amax, skip,
    M, K, stride_m, stride_k,
    MAX: tl.constexpr, EPS: tl.constexpr, CEILING: tl.constexpr, POW2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if skip is not None:
        if tl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    rows, columns = pm * ROWS + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    v = load_tile(x, M, K, stride_m, stride_k, rows, columns).to(tl.float32)
    if row is not None:
        s = encode_scale(tl.load(row_amax + rows, mask=rows < M, other=0.0), MAX, EPS, CEILING, POW2)
        tl.store(row_scale + rows, reciprocal(s), mask=(rows < M) & (pk == 0))
        store_codes(row, (v * s[:, None]).to(row.dtype.element_ty), M, K, rows, columns)
    if column is not None:
        s = encode_scale(tl.load(column_amax + columns, mask=columns < K, other=0.0), MAX, EPS, CEILING, POW2)
        tl.store(column_scale + columns, reciprocal(s), mask=(columns < K) & (pm == 0))
        store_codes(column, tl.trans((v * s[None, :]).to(column.dtype.element_ty)), K, M, columns, rows)


def amax(
    x: Tensor,
    row: Quantizer | None,
    column: Quantizer | None,
    skip: Tensor | None,
    config: Config = AMAX_CONFIGS[0],
) -> Pair:
    m, k = x.shape
    # one zeroed buffer for both, one launch to zero it
    found = torch.zeros((m if row else 0) + (k if column else 0), dtype=torch.int32, device=x.device)
    row_bits = found[:m] if row else None
    column_bits = found[-k:] if column and k else (found[:0] if column else None)
    _amax_kernel[tile.tiles(x, config)](
        x, row_bits, column_bits, skip, m, k, *x.stride(),
        ROWS=config.rows, COLUMNS=config.columns, num_warps=config.warps,
    )  # fmt: skip
    views = [None if bits is None else bits.view(torch.float32)[:, None] for bits in (row_bits, column_bits)]
    return views[0], views[1]


def cast(x: Tensor, row: QTensor | None, column: QTensor | None, given: Given, config: Config = CONFIGS[0]) -> None:
    spec = tile.spec_of(Rowwise, row, column)
    _cast_kernel[tile.tiles(x, config)](
        x, tile.bytes_of(row), tile.bytes_of(column), tile.scales_of(row), tile.scales_of(column),
        *given.amax, given.skip, *x.shape, *x.stride(),
        MAX=spec.fmt.max, EPS=spec.eps, CEILING=FLOAT32_MAX, POW2=spec.pow2,
        ROWS=config.rows, COLUMNS=config.columns, num_warps=config.warps,
    )  # fmt: skip


def variants() -> list[Variant]:
    casts = [
        Variant(
            f"rowwise {dtype} {fmt} {config}",
            _cast_kernel,
            {
                "x": tile.POINTERS[dtype], "row": tile.POINTERS[fmt.dtype], "column": tile.POINTERS[fmt.dtype],
                "row_scale": "*fp32", "column_scale": "*fp32", "row_amax": "*fp32", "column_amax": "*fp32", **tile.SIZES,
            },
            {
                "skip": None, **tile.CONTIGUOUS, "MAX": fmt.max, "EPS": 1e-12, "CEILING": FLOAT32_MAX, "POW2": True,
                "ROWS": config.rows, "COLUMNS": config.columns,
            },
            config.warps,
        )
        for config in CONFIGS
        for dtype, fmt in ((torch.bfloat16, E4M3), (torch.float16, E4M3), (torch.float32, E5M2))
    ]  # fmt: skip
    maxima = [
        Variant(
            f"rowwise amax {dtype} {config}",
            _amax_kernel,
            {"x": tile.POINTERS[dtype], "row": "*i32", "column": "*i32", **tile.SIZES},
            {"skip": None, **tile.CONTIGUOUS, "ROWS": config.rows, "COLUMNS": config.columns},
            config.warps,
        )
        for config in AMAX_CONFIGS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    return casts + maxima
