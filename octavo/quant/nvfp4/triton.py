"""NVFP4 on the GPU: one pass for the tensor's amax in each orientation, one for the cast.

No chip below SM100 converts to E2M1 in hardware, and the cast is bound by arithmetic. So codes are made two or four to
an instruction, from the bytes of float16 (`octavo.quant.nvfp4.codes`), and a matrix of whole tiles has kernels without
masks. The Hadamard rotation adds in the order of the reference. The result has the same bits on every device.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.formats import E2M1, E4M3
from octavo.launch import Launch
from octavo.quant import dual, tile
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.nvfp4 import NVFP4
from octavo.quant.nvfp4.codes import nearest_codes, random_codes, random_words
from octavo.quant.nvfp4.hadamard import NEGATIVE
from octavo.quant.nvfp4.rotation import turn, turned_magnitudes, within_block
from octavo.quant.nvfp4.scales import block_amax, block_scales, global_scale, inverse_scale_from
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer
from octavo.quant.scale import FLOAT32_MAX
from octavo.quant.tile import (
    Config,
    Sizes,
    amax_along,
    amax_bits,
    divide,
    group_of,
    group_tile,
    tile_index,
)

CONFIGS = (Config(64, 64, 4), Config(64, 128, 4))  # fastest first, measured on an H200: nvfp4-casts-h200.json
PROGRAMS = 2048  # the fewest programs of a launch of strips


@gluon.jit
def _random_bytes(key, step, row, block, across, like, STREAM: gl.constexpr, FAR: gl.constexpr):
    """Return uint32 [R, G, 16]: the bytes of the first four elements of every eight, and those of the other four. The
    blocks begin at `row` and `block` of rows of so many; FAR says that an index may not fit 32 bits."""
    inner: gl.constexpr = gl.SliceLayout(2, like.type.layout)
    rows = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, inner))
    blocks = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, inner))
    first = row.to(gl.int64) * across + block
    if FAR:
        index = first + rows.to(gl.int64)[:, None] * across + blocks[None, :]
        w0, w1, w2, w3 = random_words(key, step, index.to(gl.uint32), (index >> 32).to(gl.uint32), STREAM)
    else:
        index = first.to(gl.uint32) + (rows[:, None] * across + blocks[None, :]).to(gl.uint32)
        w0, w1, w2, w3 = random_words(key, step, index, 0, STREAM)
    low = within_block(like) < 8
    first = gl.where(low, gl.expand_dims(w0, 2), gl.expand_dims(w2, 2))
    return first, gl.where(low, gl.expand_dims(w1, 2), gl.expand_dims(w3, 2))


@gluon.constexpr_function
def _tile_layout(columns, warps, square):
    """Return a layout with sixteen neighbours of a row per thread, and all rows of a square block in one warp."""
    across = min(columns // 16, 32)
    down = 32 // across
    return gl.BlockedLayout([16 // down if square else 1, 16], [down, across], [warps, 1], [1, 0])


@gluon.jit
def _places(first_row, first_column, row_step, column_step, R: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Return (where a tile begins, where its elements are from there, its rows, its columns). The second does not
    change from tile to tile, and a loop over tiles computes it once."""
    rows = gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    start = first_row.to(gl.int64) * row_step + first_column.to(gl.int64) * column_step
    at = rows.to(gl.int64)[:, None] * row_step + columns.to(gl.int64)[None, :] * column_step
    return start, at, first_row + rows, first_column + columns


@gluon.jit
def _load_tile(
    x, M, K, stride_m, stride_k, first_row, first_column,
    R: gl.constexpr, C: gl.constexpr, W: gl.constexpr, SQUARE: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Return x[first_row:, first_column:] as [R, C] in its own dtype; zero outside, where nothing is if the tile is
    whole."""
    start, at, rows, columns = _places(first_row, first_column, stride_m, stride_k, R, C, _tile_layout(C, W, SQUARE))
    if WHOLE:
        return gl.load(x + start + at)
    else:
        return gl.load(x + start + at, mask=(rows < M)[:, None] & (columns < K)[None, :], other=0.0)


@gluon.jit
def _store(out, values, M, K, first_row, first_column, row_step, column_step, WHOLE: gl.constexpr):
    """Store values to out[first_row:, first_column:] of [M, K] with these strides."""
    layout: gl.constexpr = values.type.layout
    R: gl.constexpr = values.shape[0]
    C: gl.constexpr = values.shape[1]
    start, at, rows, columns = _places(first_row, first_column, row_step, column_step, R, C, layout)
    if WHOLE:
        gl.store(out + start + at, values)
    else:
        gl.store(out + start + at, values, mask=(rows < M)[:, None] & (columns < K)[None, :])


@gluon.jit
def _store_scales(scale, s_b, M, K, first_row, first_column, SQUARE: gl.constexpr, WHOLE: gl.constexpr):
    """Store scales of the blocks of a tile that begins at first_row and first_column of [M, K]."""
    across = gl.cdiv(K, 16)
    if SQUARE:
        _store(scale, s_b, gl.cdiv(M, 16), across, first_row // 16, first_column // 16, across, 1, WHOLE)
    else:
        _store(scale, s_b, M, across, first_row, first_column // 16, 1, M, WHOLE)


@gluon.jit
def _orientation(
    v, a, codes, scale, s_enc, undo, key, step, M, K, first_row, first_column, height, width, row, column,
    SQUARE: gl.constexpr, RHT: gl.constexpr, STOCHASTIC: gl.constexpr, STREAM: gl.constexpr, NEGATIVE: gl.constexpr,
    LARGEST: gl.constexpr, GROUPED: gl.constexpr, FAR: gl.constexpr, WHOLE: gl.constexpr,
    R: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Write the packed codes of v [R, C] of an [M, K] orientation, and an E4M3 scale for every 16 of a row, or of 16
    rows. It is written at first_row and first_column; what it is part of is [height, width], and there it begins at row
    and column: the same without groups, and a group's own otherwise. `a` has the maxima of its blocks, or is None.
    Return them."""
    groups: gl.constexpr = C // 16
    if RHT:
        v = turn(v, R, C, NEGATIVE)
    v = gl.reshape(v, (R, groups, 16))
    if a is None:
        a = block_amax(v)
        if SQUARE:
            a = amax_along(gl.reshape(a, (R // 16, 16, groups)), 1)
    s_b, e = block_scales(a, s_enc, undo, LARGEST, not STOCHASTIC and v.dtype == gl.bfloat16)
    _store_scales(scale, s_b, M, K, first_row, first_column, SQUARE, WHOLE)
    inner: gl.constexpr = gl.SliceLayout(2, v.type.layout)
    if SQUARE:
        spread = gl.reshape(gl.zeros((R, groups), gl.float32, layout=inner), (R // 16, 16, groups))
        e = gl.expand_dims(gl.convert_layout(e, gl.SliceLayout(1, spread.type.layout)), 1) + spread
        e = gl.reshape(e, (R, groups))
    e = gl.expand_dims(gl.convert_layout(e, inner), 2).broadcast_to((R, groups, 16))
    if STOCHASTIC:
        first, second = _random_bytes(key, step, row, column // 16, gl.cdiv(width, 16), v, STREAM, FAR)
        packed = random_codes(v, e, first, second)
    else:
        packed = nearest_codes(v, e)
    packed, _ = gl.split(gl.permute(gl.reshape(packed, (R, C // 8, 2, 4)), (0, 1, 3, 2)))
    packed = gl.reshape(packed, (R, C // 2))
    if GROUPED:  # what is nobody's is zero, though turned zeros may be negative
        if (row + R > height) | (column + C > width):
            packed = _only(packed, height - row, gl.cdiv(width, 16) * 16 - column if RHT else width - column)
    elif not (RHT or WHOLE):  # turned padding holds values; otherwise it is zero, in a block of NaN too
        if column + C > width:
            packed = _only(packed, R, width - column)
    row_bytes = gl.cdiv(K, 16) * 8
    _store(codes, packed, M, row_bytes, first_row, first_column // 2, row_bytes, 1, WHOLE)
    return a


@gluon.jit
def _only(packed, rows, columns):
    """Return codes [R, C/2] of the first so many rows and columns, an odd number perhaps; zero elsewhere."""
    layout: gl.constexpr = packed.type.layout
    is_row = gl.arange(0, packed.shape[0], layout=gl.SliceLayout(1, layout)) < rows
    column = 2 * gl.arange(0, packed.shape[1], layout=gl.SliceLayout(0, layout))
    kept = gl.where(column + 1 < columns, 0xFF, gl.where(column < columns, 0x0F, 0)).to(gl.uint8)
    return gl.where(is_row[:, None], packed & kept[None, :], 0)


@gluon.constexpr_function
def _maxima_layout(rows, columns, warps):
    across = min(columns // 16, 32)
    return gl.BlockedLayout([1, 1], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _nothing(R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Return maxima [R, C/16] before the first tile: zeros."""
    return gl.zeros((R, C // 16), gl.int32, layout=_maxima_layout(R, C, W))


@gluon.jit
def _maxima(v, R: gl.constexpr, C: gl.constexpr, RHT: gl.constexpr, NEGATIVE: gl.constexpr, like):
    """Return float32 bits [R, C/16] of the largest magnitudes in v [R, C]; if turned, as `turned_magnitudes` has them.
    Laid out like those."""
    if RHT:
        found = turned_magnitudes(v, R, C, NEGATIVE)
    else:
        found = block_amax(gl.reshape(v, (R, C // 16, 16))).to(gl.int32, bitcast=True)
    return gl.convert_layout(found, like.type.layout, assert_trivial=True)


@gluon.jit
def _quarter(bits):
    """Return the float32 bits of a fourth of a float32, rounded to bfloat16."""
    value = bits.to(gl.float32, bitcast=True) * 0.25
    return value.to(gl.bfloat16).to(gl.float32).to(gl.int32, bitcast=True)


@gluon.jit
def _amax_kernel(
    x, row, column, skip, owner, source, live, M, K, stride_m, stride_k,
    RHT_ROW: gl.constexpr, RHT_COLUMN: gl.constexpr, NEGATIVE: gl.constexpr,
    STRIP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, strip = tile_index(K, COLUMNS * STRIP)
    first, end, g = pm * ROWS, M, 0
    if owner is not None:
        first, end, _ = group_tile(source, live, pm * ROWS, M)
        if first >= end:
            return
        g = group_of(owner, pm * ROWS)
    begin = strip * STRIP
    until = gl.minimum(begin + STRIP, gl.cdiv(K, COLUMNS))
    of_rows, of_columns = _nothing(ROWS, COLUMNS, W), _nothing(COLUMNS, ROWS, W)
    for pk in range(begin, until):
        v = dual.load_tile(x, end, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W)
        if row is not None or not RHT_COLUMN:
            of_rows = gl.maximum(of_rows, _maxima(v, ROWS, COLUMNS, RHT_ROW, NEGATIVE, of_rows))
        if column is not None and (RHT_COLUMN or RHT_ROW):
            down = dual.transpose(v, ROWS, W)
            of_columns = gl.maximum(of_columns, _maxima(down, COLUMNS, ROWS, RHT_COLUMN, NEGATIVE, of_columns))
    bits = gl.max(gl.max(of_rows, 1), 0)
    if row is not None:
        if RHT_ROW:
            found = _quarter(bits)
            if bits == 0x7F800000:
                for pk in range(begin, until):
                    v = dual.load_tile(x, end, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W)
                    found = gl.maximum(found, amax_bits(turn(v, ROWS, COLUMNS, NEGATIVE)))
            gl.atomic_max(row + g, found, sem="relaxed")
        else:
            gl.atomic_max(row + g, bits, sem="relaxed")
    if column is not None:
        if RHT_COLUMN or RHT_ROW:
            bits = gl.max(gl.max(of_columns, 1), 0)
        if RHT_COLUMN:
            found = _quarter(bits)
            if bits == 0x7F800000:
                for pk in range(begin, until):
                    v = dual.load_tile(x, end, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W)
                    turned = turn(dual.transpose(v, ROWS, W), COLUMNS, ROWS, NEGATIVE)
                    found = gl.maximum(found, amax_bits(turned))
            gl.atomic_max(column + g, found, sem="relaxed")
        else:
            gl.atomic_max(column + g, bits, sem="relaxed")


@gluon.jit
def _store_globals(
    scales, amax, M, pm, TOP: gl.constexpr, LARGEST: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr
):
    """Store the global scales of all groups, between the rows of tiles: a group without rows has a global scale too,
    and no tile."""
    for g in range(pm, GROUPS, gl.maximum(gl.cdiv(M, ROWS), 1)):
        gl.store(scales + g, global_scale(gl.load(amax + g), TOP, LARGEST))


@gluon.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, row_global, column_global, row_amax, column_amax, seed, skip,
    start, block, owner, source, live,
    M, K, stride_m, stride_k,
    SQUARE: gl.constexpr, RHT_ROW: gl.constexpr, RHT_COLUMN: gl.constexpr,
    SR_ROW: gl.constexpr, SR_COLUMN: gl.constexpr, NEGATIVE: gl.constexpr, TOP: gl.constexpr, LARGEST: gl.constexpr,
    GROUPS: gl.constexpr, SIZE: gl.constexpr, FAR: gl.constexpr, WHOLE: gl.constexpr,
    STRIP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, strip = tile_index(K, COLUMNS * STRIP)
    # a tile begins at `first` in x and at `within` in what it is part of, which has `height` rows
    first, end, within, height, g = pm * ROWS, M, pm * ROWS, M, 0
    if owner is not None:
        if strip == 0:
            if row is not None:
                _store_globals(row_global, row_amax, M, pm, TOP, LARGEST, GROUPS, ROWS)
            if column is not None:
                _store_globals(column_global, column_amax, M, pm, TOP, LARGEST, GROUPS, ROWS)
        first, end, used = group_tile(source, live, pm * ROWS, M)
        if used == 0:
            return
        g = group_of(owner, pm * ROWS)
        within = pm * ROWS - gl.load(block + g) * SIZE
        height = gl.load(start + g + 1) - gl.load(start + g)
    elif gl.program_id(0) == 0:
        if row is not None:
            gl.store(row_global, global_scale(gl.load(row_amax), TOP, LARGEST))
        if column is not None:
            gl.store(column_global, global_scale(gl.load(column_amax), TOP, LARGEST))
    key, step = 0, 0
    if row is not None:
        row_enc = inverse_scale_from(gl.load(row_amax + g), TOP, LARGEST)
        row_undo = divide(1.0, row_enc)
    if column is not None:
        column_enc = inverse_scale_from(gl.load(column_amax + g), TOP, LARGEST)
        column_undo = divide(1.0, column_enc)
    if SR_ROW or SR_COLUMN:
        key, step = gl.load(seed), gl.load(seed + 1)
    for pk in range(strip * STRIP, gl.minimum((strip + 1) * STRIP, gl.cdiv(K, COLUMNS))):
        v = _load_tile(x, end, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W, SQUARE, WHOLE)
        a = None
        if row is not None:
            a = _orientation(
                v, None, row, row_scale, row_enc, row_undo, key, step, M, K, pm * ROWS, pk * COLUMNS,
                height, K, within, pk * COLUMNS,
                SQUARE, RHT_ROW, SR_ROW, 0, NEGATIVE, LARGEST, GROUPS > 0, FAR, WHOLE, ROWS, COLUMNS,
            )  # fmt: skip
        if column is not None:
            if SQUARE and row is not None:  # the blocks are the same ones
                a = gl.permute(a, (1, 0))
            else:
                a = None
            down = gl.convert_layout(gl.permute(v, (1, 0)), _tile_layout(ROWS, W, SQUARE))
            _orientation(
                down, a, column, column_scale, column_enc, column_undo, key, step, K, M, pk * COLUMNS, pm * ROWS,
                K, height, pk * COLUMNS, within,
                SQUARE, RHT_COLUMN, SR_COLUMN, 1, NEGATIVE, LARGEST, GROUPS > 0, FAR, WHOLE, COLUMNS, ROWS,
            )  # fmt: skip


def _strip(shape: Sizes, config: Config) -> int:
    """Return how many tiles beside each other one program takes: what it computes once, scales above all, is as long
    as a tile. One each if there would be too few programs for the chip otherwise."""
    return next((n for n in (8, 4, 2) if tile.tiles(shape, config) >= n * PROGRAMS), 1)


def _is_far(shape: Sizes) -> bool:
    """Return whether the index of a block may not fit 32 bits."""
    m, k = shape
    return max(m * -(-k // 16), k * -(-m // 16)) >= 2**32


def _is_whole(shape: Sizes, config: Config) -> bool:
    """Return whether no tile ends outside: the kernel masks nothing then, a tenth of its instructions."""
    m, k = shape
    return m > 0 and k > 0 and m % config.rows == 0 and k % config.columns == 0


def _config(spec: NVFP4) -> Config:
    """Return the fastest tile."""
    return CONFIGS[1] if spec.square else CONFIGS[0]


def _options(row: Quantizer | None, column: Quantizer | None) -> tuple[NVFP4, NVFP4]:
    """Return the settings of both orientations; those of an absent orientation do not matter."""
    first, second = row or column, column or row
    assert isinstance(first, NVFP4) and isinstance(second, NVFP4)
    return first, second


def amax(
    x: Tensor,
    row: Quantizer | None,
    column: Quantizer | None,
    skip: Tensor | None,
    groups: Groups | None = None,
    config: Config | None = None,
) -> AmaxPair:
    first, second = _options(row, column)
    config = config or _config(first)
    found = torch.zeros(2, max(tile.number_of(groups), 1), dtype=torch.int32, device=x.device)
    _amax_launch(first.rht, second.rht, tile.shape_inside(x, groups), x.stride(), config)(
        x, found[0] if row else None, found[1] if column else None, skip, *tile.pointers_of(groups)
    )
    values = found.view(torch.float32)
    return (values[0] if row else None), (values[1] if column else None)


def cast(
    x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs, config: Config | None = None
) -> None:
    first, second = _options(*(None if q is None else q.spec for q in (row, column)))
    config = config or _config(first)
    groups = cast_args.groups
    _cast_launch(first, second, tile.shape_inside(x, groups), x.stride(), tile.number_of(groups), config)(
        x, *tile.codes_and_scales(row, column),
        None if row is None else row.global_scale, None if column is None else column.global_scale,
        *cast_args.amax, cast_args.seed, cast_args.skip, *((None,) * 5 if groups is None else groups.tensors()),
    )  # fmt: skip


def _launch(kernel: Any, shape: Sizes, strides: Sizes, config: Config, **constants: Any) -> Launch:
    """Return the launch of programs that each take a strip of tiles."""
    strip, own = _strip(shape, config), {"ROWS": config.rows, "COLUMNS": config.columns, "W": config.warps}
    grid = tile.tiles(shape, config._replace(columns=config.columns * strip))
    return Launch(kernel, grid, (*shape, *strides), num_warps=config.warps, **constants, STRIP=strip, **own)


@lru_cache(maxsize=4096)
def _amax_launch(row_rht: bool, column_rht: bool, shape: Sizes, strides: Sizes, config: Config) -> Launch:
    return _launch(_amax_kernel, shape, strides, config, RHT_ROW=row_rht, RHT_COLUMN=column_rht, NEGATIVE=NEGATIVE)


@lru_cache(maxsize=4096)
def _cast_launch(first: NVFP4, second: NVFP4, shape: Sizes, strides: Sizes, groups: int, config: Config) -> Launch:
    return _launch(
        _cast_kernel, shape, strides, config,
        SQUARE=first.square, RHT_ROW=first.rht, RHT_COLUMN=second.rht,
        SR_ROW=first.stochastic, SR_COLUMN=second.stochastic,
        NEGATIVE=NEGATIVE, TOP=E2M1.max * E4M3.max, LARGEST=FLOAT32_MAX, GROUPS=groups, SIZE=BLOCK,
        FAR=_is_far(shape), WHOLE=groups == 0 and _is_whole(shape, config),
    )  # fmt: skip
