"""MX on the GPU, in one pass over tiles whose sides are multiples of 32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.quant import tile
from octavo.quant.mx import MANTISSA_BITS, MX
from octavo.quant.mx.reference import amax as amax
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Given
from octavo.quant.tile import Config, Variant, load_tile, magnitude_bits, store_codes, tile_index

CONFIGS = (Config(128, 128, 8), Config(64, 128, 4), Config(128, 64, 4), Config(64, 64, 4), Config(32, 128, 4))


@triton.jit
def _scale_byte(bits, MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr):
    """E8M0 byte, as int32, of an amax given by its float32 bits: the twin of reference.scale_byte."""
    if ROUNDING == "rceil":
        v = (bits.to(tl.float32, bitcast=True) * (1 / MAX)).to(tl.int32, bitcast=True)
        exponent, mantissa = v >> 23, v & 0x7FFFFF
        up = tl.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
        byte = exponent + up.to(tl.int32)
    else:
        if ROUNDING == "even":
            exponent = (bits + (1 << (22 - MANTISSA))) >> 23
        else:
            exponent = bits >> 23
        if ROUNDING == "ceil":
            exponent += ((bits & 0x7FFFFF) > 0).to(tl.int32)
        byte = tl.maximum(exponent - EMAX, 0)
    byte = tl.minimum(byte, 254)
    byte = tl.where(bits == 0x7F800000, 254, byte)
    return tl.where(bits > 0x7F800000, 255, byte)


@triton.jit
def _multiplier(byte):
    """2^(127-byte): a subnormal for 254, NaN for 255."""
    bits = tl.where(byte == 254, 0x400000, (254 - byte) << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _cast(
    v, codes, scale, given_amax, M, K, rows, first_column,
    MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr, SQUARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """v [ROWS, COLUMNS] -> codes and a scale byte for every 32 columns of a row, or of 32 rows."""
    groups: tl.constexpr = COLUMNS // 32
    columns = first_column + tl.arange(0, COLUMNS)
    group = first_column // 32 + tl.arange(0, groups)
    across = tl.cdiv(K, 32)
    if SQUARE:
        down: tl.constexpr = ROWS // 32
        scale_rows, scale_count = tl.min(rows, 0) // 32 + tl.arange(0, down), tl.cdiv(M, 32)
    else:
        down: tl.constexpr = ROWS
        scale_rows, scale_count = rows, M
    at = scale_rows.to(tl.int64)[:, None] * across + group[None, :]
    live = (scale_rows < scale_count)[:, None] & (group < across)[None, :]
    blocks = tl.reshape(v, (down, ROWS // down, groups, 32))
    if given_amax is not None:
        bits = magnitude_bits(tl.load(given_amax + at, mask=live, other=0.0))
    else:
        bits = tl.max(tl.max(magnitude_bits(blocks), 3), 1)
    byte = _scale_byte(bits, MAX, EMAX, MANTISSA, ROUNDING)
    tl.store(scale + at, byte.to(tl.uint8), mask=live)
    scaled = tl.reshape(blocks * _multiplier(byte)[:, None, :, None], (ROWS, COLUMNS))
    store_codes(codes, scaled.to(codes.dtype.element_ty), M, K, rows, columns)


@triton.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, row_amax, column_amax, skip, M, K, stride_m, stride_k,
    MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr, SQUARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if skip is not None:
        if tl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    rows, columns = pm * ROWS + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    v = load_tile(x, M, K, stride_m, stride_k, rows, columns).to(tl.float32)
    if row is not None:
        _cast(
            v, row, row_scale, row_amax, M, K, rows, pk * COLUMNS,
            MAX, EMAX, MANTISSA, ROUNDING, SQUARE, ROWS, COLUMNS,
        )  # fmt: skip
    if column is not None:
        _cast(
            tl.trans(v), column, column_scale, column_amax, K, M, columns, pm * ROWS,
            MAX, EMAX, MANTISSA, ROUNDING, SQUARE, COLUMNS, ROWS,
        )  # fmt: skip


def cast(x: Tensor, row: QTensor | None, column: QTensor | None, given: Given, config: Config = CONFIGS[0]) -> None:
    spec = tile.spec_of(MX, row, column)
    _cast_kernel[tile.tiles(x, config)](
        x, tile.bytes_of(row), tile.bytes_of(column), tile.scales_of(row), tile.scales_of(column),
        *given.amax, given.skip, *x.shape, *x.stride(),
        MAX=spec.fmt.max, EMAX=spec.fmt.emax, MANTISSA=MANTISSA_BITS[spec.fmt.name], ROUNDING=spec.rounding,
        SQUARE=spec.square, ROWS=config.rows, COLUMNS=config.columns, num_warps=config.warps,
    )  # fmt: skip


def variants() -> list[Variant]:
    cases = (
        (torch.bfloat16, E4M3, "rceil", False),
        (torch.bfloat16, E4M3, "rceil", True),
        (torch.float16, E4M3, "even", False),
        (torch.float32, E5M2, "floor", False),
        (torch.float32, E5M2, "ceil", True),
    )
    return [
        Variant(
            f"mx {dtype} {fmt} {rounding} {'32x32' if square else '1x32'} {config}",
            _cast_kernel,
            {
                "x": tile.POINTERS[dtype], "row": tile.POINTERS[fmt.dtype], "column": tile.POINTERS[fmt.dtype],
                "row_scale": "*u8", "column_scale": "*u8", **tile.SIZES,
            },
            {
                "row_amax": None, "column_amax": None, "skip": None, **tile.CONTIGUOUS,
                "MAX": fmt.max, "EMAX": fmt.emax, "MANTISSA": MANTISSA_BITS[fmt.name], "ROUNDING": rounding,
                "SQUARE": square, "ROWS": config.rows, "COLUMNS": config.columns,
            },
            config.warps,
        )
        for config in CONFIGS
        for dtype, fmt, rounding, square in cases
    ]  # fmt: skip
