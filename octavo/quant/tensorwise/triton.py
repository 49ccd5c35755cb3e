"""Tensorwise on the GPU: one pass for the amax when the scale comes from the data, one for the cast."""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.formats import E4M3, E5M2
from octavo.launch import Launch
from octavo.quant import dual, tile
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
    raise_amax,
    tile_index,
)

CONFIGS = (Config(128, 128, 8), Config(64, 128, 4))


@gluon.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, amax, encode, observed, skip,
    M, K, stride_m, stride_k,
    MAX: gl.constexpr, EPS: gl.constexpr, CEILING: gl.constexpr, POW2: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    v = dual.load_tile(x, M, K, stride_m, stride_k, pm * ROWS, pk * COLUMNS, ROWS, COLUMNS, W)
    if encode is not None:
        s = gl.load(encode)
        undo = divide(1.0, s)
    else:
        s, undo = encode_scale(gl.load(amax), MAX, EPS, CEILING, POW2)
    if observed is not None:
        raise_amax(observed, amax_bits(v))
    if gl.program_id(0) == 0:
        if row is not None:
            gl.store(row_scale, undo)
        if column is not None:
            gl.store(column_scale, undo)
    if row is not None:
        dual.store_codes(row, v.to(gl.float32) * s, M, K, pm * ROWS, pk * COLUMNS, ROWS, COLUMNS, W)
    if column is not None:
        # turned around before the cast: plain Triton, turning the codes, wrote wrong bytes for float32 tiles
        down = dual.transpose(v, ROWS, W).to(gl.float32) * s
        dual.store_codes(column, down, K, M, pk * COLUMNS, pm * ROWS, COLUMNS, ROWS, W)


def amax(x: Tensor, row: Quantizer | None, column: Quantizer | None, skip: Tensor | None) -> Pair:
    found = tile.tensor_amax(x, skip)
    return (None if row is None else found), (None if column is None else found)


def cast(x: Tensor, row: QTensor | None, column: QTensor | None, given: Given, config: Config = CONFIGS[0]) -> None:
    lead = column if row is None else row
    assert lead is not None
    found = None if given.encode is not None else given.amax[0] if row is not None else given.amax[1]
    if row is not None and column is not None and found is not None and found is not given.amax[1]:
        # the caller reduced the two on its own: each orientation keeps its scale
        cast(x, row, None, given, config)
        cast(x, None, column, given, config)
        return
    _cast_launch(lead.spec, x.shape, x.stride(), config)(
        x, None if row is None else row.codes, None if column is None else column.codes,
        None if row is None else row.scale, None if column is None else column.scale,
        found, given.encode, given.observed, given.skip,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _cast_launch(spec: Quantizer, shape: tuple[int, ...], strides: tuple[int, ...], config: Config) -> Launch:
    assert isinstance(spec, Tensorwise)
    return Launch(
        _cast_kernel, tile.tiles(shape, config), (*shape, *strides), num_warps=config.warps,
        MAX=spec.fmt.max, EPS=spec.eps, CEILING=FLOAT32_MAX, POW2=spec.pow2,
        ROWS=config.rows, COLUMNS=config.columns, W=config.warps,
    )  # fmt: skip


def variants() -> list[Variant]:
    return [
        Variant(
            f"tensorwise {dtype} {fmt} {'given' if given else 'current'} {config}",
            _cast_kernel,
            {
                "x": tile.POINTERS[dtype], "row": tile.POINTERS[fmt.dtype], "column": tile.POINTERS[fmt.dtype],
                "row_scale": "*fp32", "column_scale": "*fp32",
                **({"encode": "*fp32", "observed": "*fp32"} if given else {"amax": "*fp32"}), **tile.SIZES,
            },
            {
                **({"amax": None} if given else {"encode": None, "observed": None}), "skip": None, **tile.CONTIGUOUS,
                "MAX": fmt.max, "EPS": 0.0, "CEILING": FLOAT32_MAX, "POW2": False,
                "ROWS": config.rows, "COLUMNS": config.columns, "W": config.warps,
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
