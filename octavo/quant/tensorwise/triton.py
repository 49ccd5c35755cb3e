"""Tensorwise on the GPU: one pass for the amax when the scale comes from the data, one for the cast."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.launch import Launch
from octavo.quant import tile
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Given, Pair, Quantizer
from octavo.quant.scale import FLOAT32_MAX
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.tile import (
    Config,
    Variant,
    amax_bits,
    divide,
    encode_scale,
    load_tile,
    store_codes,
    tile_index,
)

CONFIGS = (Config(256, 64, 8), Config(64, 128, 4))


@triton.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, amax, encode, observed, skip,
    M, K, stride_m, stride_k,
    MAX: tl.constexpr, EPS: tl.constexpr, CEILING: tl.constexpr, POW2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if skip is not None:
        if tl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    rows, columns = pm * ROWS + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    v = load_tile(x, M, K, stride_m, stride_k, rows, columns)
    if encode is not None:
        s = tl.load(encode)
        undo = divide(1.0, s)
    else:
        s, undo = encode_scale(tl.load(amax), MAX, EPS, CEILING, POW2)
    if observed is not None:
        tl.atomic_max(observed, amax_bits(v), sem="relaxed")
    if tl.program_id(0) == 0:
        if row is not None:
            tl.store(row_scale, undo)
        if column is not None:
            tl.store(column_scale, undo)
    scaled = v.to(tl.float32) * s
    if row is not None:
        store_codes(row, scaled.to(row.dtype.element_ty), M, K, rows, columns)
    if column is not None:
        store_codes(column, tl.trans(scaled.to(column.dtype.element_ty)), K, M, columns, rows)


def amax(x: Tensor, row: Quantizer | None, column: Quantizer | None, skip: Tensor | None) -> Pair:
    found = tile.tensor_amax(x, skip).view(1, 1)
    return (None if row is None else found), (None if column is None else found)


def cast(x: Tensor, row: QTensor | None, column: QTensor | None, given: Given, config: Config = CONFIGS[0]) -> None:
    spec = tile.spec_of(Tensorwise, row, column)
    found = given.amax[0] if row is not None else given.amax[1]
    if row is not None and column is not None and given.encode is None and given.amax[0] is not given.amax[1]:
        # the caller reduced the two on its own: each orientation keeps its scale
        cast(x, row, None, given, config)
        cast(x, None, column, given, config)
        return
    observed = None if given.observed is None else given.observed.view(torch.int32)
    _cast_launch(spec, x.shape, x.stride(), config)(
        x, tile.codes_of(row), tile.codes_of(column), tile.scales_of(row), tile.scales_of(column),
        None if given.encode is not None else found, given.encode, observed, given.skip,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _cast_launch(spec: Tensorwise, shape: tuple[int, ...], strides: tuple[int, ...], config: Config) -> Launch:
    return Launch(
        _cast_kernel, tile.tiles(shape, config), (*shape, *strides), num_warps=config.warps,
        MAX=spec.fmt.max, EPS=spec.eps, CEILING=FLOAT32_MAX, POW2=spec.pow2, ROWS=config.rows, COLUMNS=config.columns,
    )  # fmt: skip


def variants() -> list[Variant]:
    return [
        Variant(
            f"tensorwise {dtype} {fmt} {'given' if given else 'current'} {config}",
            _cast_kernel,
            {
                "x": tile.POINTERS[dtype], "row": tile.POINTERS[fmt.dtype], "column": tile.POINTERS[fmt.dtype],
                "row_scale": "*fp32", "column_scale": "*fp32",
                **({"encode": "*fp32", "observed": "*i32"} if given else {"amax": "*fp32"}), **tile.SIZES,
            },
            {
                **({"amax": None} if given else {"encode": None, "observed": None}), "skip": None, **tile.CONTIGUOUS,
                "MAX": fmt.max, "EPS": 0.0, "CEILING": FLOAT32_MAX, "POW2": False,
                "ROWS": config.rows, "COLUMNS": config.columns,
            },
            config.warps,
        )
        for config in CONFIGS
        for dtype, fmt, given in (
            (torch.bfloat16, E4M3, False),
            (torch.bfloat16, E5M2, True),
            (torch.float16, E4M3, True),
            (torch.float32, E5M2, False),
        )
    ]  # fmt: skip
