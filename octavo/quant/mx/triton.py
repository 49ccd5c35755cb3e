"""MX on the GPU, in one pass over tiles whose sides are multiples of 32."""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.launch import Launch
from octavo.quant import dual, tile
from octavo.quant.maxima import amax as amax
from octavo.quant.mx import MANTISSA_BITS, MX
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs
from octavo.quant.tile import Config, Sizes, float_bits, group_tile, magnitude_bits, tile_index

CONFIGS = (Config(128, 128, 8), Config(64, 128, 4))


@triton.jit
def _scale_byte(bits, MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the E8M0 byte, as int32, of an amax given by its float32 bits, as reference.scale_byte computes it."""
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
        byte = tl.maximum(exponent - EMAX, 0)
    return tl.where(bits >= 0x7F800000, 255, tl.minimum(byte, 254))  # Inf or NaN


@triton.jit
def _multiplier(byte):
    """Return 2^(127-byte): a subnormal for 254, NaN for 255."""
    bits = tl.maximum((254 - byte) << 23, 0x400000)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@gluon.jit
def _orientation(
    v, codes, scale, given_amax, M, K, first_row, first_column, live_rows, live_columns,
    scale_row_stride, scale_group_stride,
    MAX: gl.constexpr, EMAX: gl.constexpr, MANTISSA: gl.constexpr, ROUNDING: gl.constexpr, SQUARE: gl.constexpr,
    R: gl.constexpr, C: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Write the codes of v [R, C] of an [M, K] orientation, and a scale byte for every 32 of a row, or of 32 rows. Of
    rows in groups, so many rows and columns of v are alive."""
    height: gl.constexpr = 32 if SQUARE else 1
    blocks = gl.reshape(v, (R // height, height, C // 32, 32))
    bits = float_bits(gl.max(gl.max(magnitude_bits(blocks), 3), 1), v)
    layout: gl.constexpr = bits.type.layout
    rows = first_row // height + gl.arange(0, R // height, layout=gl.SliceLayout(1, layout))
    groups = first_column // 32 + gl.arange(0, C // 32, layout=gl.SliceLayout(0, layout))
    down, across = gl.cdiv(M, height), gl.cdiv(K, 32)
    live = (rows < down)[:, None] & (groups < across)[None, :]
    if given_amax is not None:
        at = rows.to(gl.int64)[:, None] * across + groups[None, :]
        bits = magnitude_bits(gl.load(given_amax + at, mask=live, other=0.0))
    byte = _scale_byte(bits, MAX, EMAX, MANTISSA, ROUNDING)
    at = rows.to(gl.int64)[:, None] * scale_row_stride + groups.to(gl.int64)[None, :] * scale_group_stride
    gl.store(scale + at, byte.to(gl.uint8), mask=live)
    s = gl.expand_dims(gl.expand_dims(_multiplier(byte), 1), 3)
    values = gl.reshape(blocks.to(gl.float32) * s, (R, C))
    if live_rows is not None:
        values = dual.only(values, live_rows, live_columns)
    dual.store_codes(codes, values, M, K, first_row, first_column, R, C, W)


@gluon.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, row_amax, column_amax, skip, source, live,
    M, K, stride_m, stride_k, row_scale_stride, row_group_stride, column_scale_stride, column_group_stride,
    MAX: gl.constexpr, EMAX: gl.constexpr, MANTISSA: gl.constexpr, ROUNDING: gl.constexpr, SQUARE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    first, end, alive, whole = pm * ROWS, M, None, None
    if source is not None:
        first, end, used = group_tile(source, live, pm * ROWS, M)
        if used == 0:
            return
        alive, whole = end - first, COLUMNS
    v = dual.load_tile(x, end, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W)
    if row is not None:
        _orientation(
            v, row, row_scale, row_amax, M, K, pm * ROWS, pk * COLUMNS, alive, whole,
            row_scale_stride, row_group_stride, MAX, EMAX, MANTISSA, ROUNDING, SQUARE, ROWS, COLUMNS, W,
        )  # fmt: skip
    if column is not None:
        _orientation(
            dual.transpose(v, ROWS, W), column, column_scale, column_amax, K, M, pk * COLUMNS, pm * ROWS, whole, alive,
            column_scale_stride, column_group_stride, MAX, EMAX, MANTISSA, ROUNDING, SQUARE, COLUMNS, ROWS, W,
        )  # fmt: skip


def cast(
    x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs, config: Config = CONFIGS[0]
) -> None:
    spec = tile.spec_of(MX, row, column)
    strides = (*x.stride(), *tile.scale_strides(row), *tile.scale_strides(column))
    _, *where = tile.pointers_of(cast_args.groups)
    _cast_launch(spec, tile.shape_inside(x, cast_args.groups), strides, config)(
        x, *tile.codes_and_scales(row, column), *cast_args.amax, cast_args.skip, *where
    )


@lru_cache(maxsize=4096)
def _cast_launch(spec: MX, shape: Sizes, strides: Sizes, config: Config) -> Launch:
    return tile.launch(
        _cast_kernel, shape, strides, config,
        MAX=spec.fmt.max, EMAX=spec.fmt.emax, MANTISSA=MANTISSA_BITS[spec.fmt.name], ROUNDING=spec.rounding,
        SQUARE=spec.square,
    )  # fmt: skip
