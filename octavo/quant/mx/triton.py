"""MX on the GPU, in one pass over tiles whose sides are multiples of 32."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.formats import E4M3, E5M2
from octavo.quant import tile, turned
from octavo.quant.mx import MANTISSA_BITS, MX
from octavo.quant.mx.reference import amax as amax
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Given
from octavo.quant.tile import Config, Variant, float_bits, load_tile, magnitude_bits, store_codes, tile_index

CONFIGS = (Config(128, 128, 8), Config(64, 128, 4), Config(256, 64, 4))


@triton.jit
def _scale_byte(bits, MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr):
    """E8M0 byte, as int32, of an amax given by its float32 bits: the twin of reference.scale_byte."""
    if ROUNDING == "rceil":
        v = (bits.to(tl.float32, bitcast=True) * (1 / MAX)).to(tl.int32, bitcast=True)
        # any mantissa carries into the exponent; below it, where 2^-127 is the mantissa 0x400000, one above that
        byte = (v + tl.where(v < 0x800000, 0x3FFFFF, 0x7FFFFF)) >> 23
    else:
        exponent = bits >> 23
        if ROUNDING == "even":
            exponent = (bits + (1 << (22 - MANTISSA))) >> 23
        if ROUNDING == "ceil":
            exponent = (bits + 0x7FFFFF) >> 23
        byte = tl.where(bits == 0x7F800000, 254, tl.maximum(exponent - EMAX, 0))
    return tl.where(bits > 0x7F800000, 255, tl.minimum(byte, 254))


@triton.jit
def _multiplier(byte):
    """2^(127-byte): a subnormal for 254, NaN for 255."""
    bits = tl.maximum((254 - byte) << 23, 0x400000)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _scales(
    bits, scale, given_amax, rows, groups, down, across, row_stride, group_stride,
    MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Multipliers of the blocks whose largest magnitudes are `bits`, block (rows, groups) of a grid [down, across];
    their bytes are stored with the strides given. A given amax is a contiguous [down, across]."""
    at = rows.to(tl.int64) * row_stride + groups.to(tl.int64) * group_stride
    live = (rows < down) & (groups < across)
    if given_amax is not None:
        bits = magnitude_bits(tl.load(given_amax + rows.to(tl.int64) * across + groups, mask=live, other=0.0))
    byte = _scale_byte(bits, MAX, EMAX, MANTISSA, ROUNDING)
    tl.store(scale + at, byte.to(tl.uint8), mask=live)
    return _multiplier(byte)


@gluon.jit
def _orientation(
    v, codes, scale, given_amax, M, K, first_row, first_column,
    MAX: gl.constexpr, EMAX: gl.constexpr, MANTISSA: gl.constexpr, ROUNDING: gl.constexpr,
    R: gl.constexpr, C: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """v [R, C] of an [M, K] orientation -> its codes, and a scale byte for every 32 of a row."""
    groups: gl.constexpr = C // 32
    blocks = gl.reshape(v, (R, groups, 32))
    bits = float_bits(gl.max(magnitude_bits(blocks), 2), v)
    layout: gl.constexpr = bits.type.layout
    rows = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    group = first_column // 32 + gl.arange(0, groups, layout=gl.SliceLayout(0, layout))
    across = gl.cdiv(K, 32)
    s = _scales(
        bits, scale, given_amax, rows[:, None], group[None, :], M, across, 1, M, MAX, EMAX, MANTISSA, ROUNDING
    )  # fmt: skip
    scaled = gl.reshape(blocks.to(gl.float32) * s[:, :, None], (R, C))
    turned.store_codes(codes, scaled, M, K, first_row, first_column, R, C, W)


@gluon.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, row_amax, column_amax, skip, M, K, stride_m, stride_k,
    MAX: gl.constexpr, EMAX: gl.constexpr, MANTISSA: gl.constexpr, ROUNDING: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    v = turned.load_tile(x, M, K, stride_m, stride_k, pm * ROWS, pk * COLUMNS, ROWS, COLUMNS, W)
    if row is not None:
        _orientation(
            v, row, row_scale, row_amax, M, K, pm * ROWS, pk * COLUMNS,
            MAX, EMAX, MANTISSA, ROUNDING, ROWS, COLUMNS, W,
        )  # fmt: skip
    if column is not None:
        _orientation(
            turned.turn(v, ROWS, W), column, column_scale, column_amax, K, M, pk * COLUMNS, pm * ROWS,
            MAX, EMAX, MANTISSA, ROUNDING, COLUMNS, ROWS, W,
        )  # fmt: skip


@triton.jit
def _cast_square_kernel(
    x, row, column, row_scale, column_scale, amax, skip, M, K, stride_m, stride_k,
    MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if skip is not None:
        if tl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    rows, columns = pm * ROWS + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    v = load_tile(x, M, K, stride_m, stride_k, rows, columns)
    down: tl.constexpr = ROWS // 32
    across: tl.constexpr = COLUMNS // 32
    blocks = tl.reshape(v, (down, 32, across, 32))
    bits = float_bits(tl.max(tl.max(magnitude_bits(blocks), 3), 1), v)
    block_rows, block_columns = (pm * down + tl.arange(0, down))[:, None], (pk * across + tl.arange(0, across))[None, :]
    count_m, count_k = tl.cdiv(M, 32), tl.cdiv(K, 32)
    if column is not None:
        s = _scales(
            bits, column_scale, amax, block_rows, block_columns, count_m, count_k, 1, count_m,
            MAX, EMAX, MANTISSA, ROUNDING,
        )  # fmt: skip
    if row is not None:
        s = _scales(
            bits, row_scale, amax, block_rows, block_columns, count_m, count_k, count_k, 1,
            MAX, EMAX, MANTISSA, ROUNDING,
        )  # fmt: skip
    codes = tl.reshape(blocks.to(tl.float32) * s[:, None, :, None], (ROWS, COLUMNS))
    if row is not None:
        store_codes(row, codes.to(row.dtype.element_ty), M, K, rows, columns)
    if column is not None:
        store_codes(column, tl.trans(codes.to(column.dtype.element_ty)), K, M, columns, rows)


def cast(x: Tensor, row: QTensor | None, column: QTensor | None, given: Given, config: Config | None = None) -> None:
    spec = tile.spec_of(MX, row, column)
    config = config or CONFIGS[1 if spec.square else 0]  # the fastest of each on an H200
    outputs = tile.bytes_of(row), tile.bytes_of(column), tile.scales_of(row), tile.scales_of(column)
    settings = {
        "MAX": spec.fmt.max, "EMAX": spec.fmt.emax, "MANTISSA": MANTISSA_BITS[spec.fmt.name],
        "ROUNDING": spec.rounding, "ROWS": config.rows, "COLUMNS": config.columns, "num_warps": config.warps,
    }  # fmt: skip
    if spec.square:
        found = given.amax[0] if row is not None else given.amax[1]
        if row is None and found is not None:
            found = found.T.contiguous()  # the kernel reads it in x's own orientation
        _cast_square_kernel[tile.tiles(x, config)](
            x, *outputs, found, given.skip, *x.shape, *x.stride(), **settings
        )  # fmt: skip
        return
    _cast_kernel[tile.tiles(x, config)](
        x, *outputs, *given.amax, given.skip, *x.shape, *x.stride(), **settings, W=config.warps
    )


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
            _cast_square_kernel if square else _cast_kernel,
            {
                "x": tile.POINTERS[dtype], "row": tile.POINTERS[fmt.dtype], "column": tile.POINTERS[fmt.dtype],
                "row_scale": "*u8", "column_scale": "*u8", **tile.SIZES,
            },
            {
                **dict.fromkeys(("amax",) if square else ("row_amax", "column_amax")), "skip": None, **tile.CONTIGUOUS,
                "MAX": fmt.max, "EMAX": fmt.emax, "MANTISSA": MANTISSA_BITS[fmt.name], "ROUNDING": rounding,
                "ROWS": config.rows, "COLUMNS": config.columns, **({} if square else {"W": config.warps}),
            },
            config.warps,
        )
        for config in CONFIGS
        for dtype, fmt, rounding, square in cases
    ]  # fmt: skip
