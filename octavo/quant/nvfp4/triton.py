"""NVFP4 on the GPU: one pass for the tensor's amax in each orientation, one for the cast.

No chip below SM100 converts to E2M1 in hardware. Chips do arithmetic on floats twice as fast as on bits, so a code is a
sum of saturated floats (`octavo.quant.nvfp4.codes`): about ten instructions. The Hadamard rotation adds in the order of
the reference. The result has the same bits on every device.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
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
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer
from octavo.quant.scale import FLOAT32_MAX
from octavo.quant.tile import (
    Config,
    Variant,
    amax_along,
    amax_bits,
    divide,
    float_bits,
    group_of,
    group_tile,
    magnitude_bits,
    tile_index,
)

# [16384, 8192] in bfloat16 on an H200, amax and cast in ms (`python3 -m benchmarks.nvfp4_casts`): activations 0.243 and
# 0.256, gradients 0.337 and 0.360, square blocks of weights 0.234 and 0.226
CONFIGS = (Config(64, 64, 4), Config(64, 128, 4))
PROGRAMS = 2048  # the fewest programs of a launch of strips; strips of 8 tiles take 0.243 ms, single tiles 0.305


@gluon.jit
def _sums_and_differences(v, R: gl.constexpr, G: gl.constexpr, DISTANCE: gl.constexpr):
    """One round of the butterfly over v [R, G, 16]; sixteen neighbours are one thread's, so nothing moves."""
    pairs = gl.reshape(v, (R, G, 8 // DISTANCE, 2, DISTANCE))
    a, b = gl.split(gl.permute(pairs, (0, 1, 2, 4, 3)))
    mixed = gl.permute(gl.join(a + b, a - b), (0, 1, 2, 4, 3))
    return gl.reshape(mixed, (R, G, 16))


@gluon.jit
def _within_block(v):
    """0...15 along the last dim of v [R, G, 16], as [1, 1, 16]."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, v.type.layout))
    return gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=layout), 0), 0)


_WIDEN = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")


@triton.jit
def _widened(v):
    """v as float32. Triton itself takes three instructions for two bfloat16."""
    if v.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [v], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return v.to(tl.float32)


@gluon.jit
def _signed(v, R: gl.constexpr, C: gl.constexpr, NEGATIVE: gl.constexpr):
    """v [R, C] as float32 [R, C/16, 16], by the signs of the rotation: it begins with these."""
    t = gl.reshape(_widened(v), (R, C // 16, 16))
    return t * (1.0 - 2.0 * ((NEGATIVE >> _within_block(t)) & 1).to(gl.float32))


@gluon.jit
def _turn(v, R: gl.constexpr, C: gl.constexpr, NEGATIVE: gl.constexpr):
    """v [R, C] turned, bfloat16: the twin of hadamard.turn."""
    layout: gl.constexpr = v.type.layout
    groups: gl.constexpr = C // 16
    t = _signed(v, R, C, NEGATIVE)
    t = _sums_and_differences(t, R, groups, 1)
    t = _sums_and_differences(t, R, groups, 2)
    t = _sums_and_differences(t, R, groups, 4)
    t = _sums_and_differences(t, R, groups, 8)
    return gl.convert_layout(gl.reshape((t * 0.25).to(gl.bfloat16), (R, C)), layout)


@gluon.jit
def _halves(v, S: gl.constexpr):
    """v [..., 2 S], as its first S and its last S."""
    parts = gl.reshape(v, (v.shape[0], v.shape[1], 2, S))
    return gl.split(gl.permute(parts, (0, 1, 3, 2)))


@gluon.jit
def _turned_magnitudes(v, R: gl.constexpr, C: gl.constexpr, NEGATIVE: gl.constexpr):
    """float32 bits [R, C/16] whose maximum is that of |v turned|, four times as large and not rounded. The last round
    makes a + b and a - b; the larger magnitude is |a| + |b|. Where both are infinite it is infinite, and not NaN."""
    groups: gl.constexpr = C // 16
    t = _signed(v, R, C, NEGATIVE)
    t = _sums_and_differences(t, R, groups, 1)
    t = _sums_and_differences(t, R, groups, 2)
    t = _sums_and_differences(t, R, groups, 4)
    a, b = _halves(t, 8)
    return gl.max((gl.abs(a) + gl.abs(b)).to(gl.int32, bitcast=True), 2)


_LARGER_OF_PAIRS = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
_RECIPROCAL = tl.constexpr("rcp.rn.f32 $0, $1;")


@triton.jit
def _larger(a, b):
    """The larger magnitude of two bfloat16, of any sign; NaN if either is."""
    return tl.inline_asm_elementwise(_LARGER_OF_PAIRS, "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _reciprocal(x):
    """1 / x, correctly rounded."""
    return tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@gluon.jit
def _random_bytes(seed, block_index, like, STREAM: gl.constexpr):
    """uint32 [R, G, 16]: the bytes of the first four elements of every eight, and those of the other four."""
    w0, w1, w2, w3 = random_words(seed, block_index, STREAM)
    low = _within_block(like) < 8
    first = gl.where(low, gl.expand_dims(w0, 2), gl.expand_dims(w2, 2))
    return first, gl.where(low, gl.expand_dims(w1, 2), gl.expand_dims(w3, 2))


@triton.jit
def _encode_scale(g, TOP: tl.constexpr, LARGEST: tl.constexpr):
    """S_enc: the twin of reference.tensor_scales, whose other result is `_global_scale`."""
    quotient = divide(TOP, g)
    bad = (g == float("inf")) | (g != g)
    return tl.where((g == 0) | bad, 1.0, tl.where(quotient > LARGEST, LARGEST, quotient))


@triton.jit
def _global_scale(g, TOP: tl.constexpr, LARGEST: tl.constexpr):
    plain = tl.div_rn(g, tl.where(g == g, TOP, TOP))
    scale = tl.where(divide(TOP, g) > LARGEST, divide(1.0, _encode_scale(g, TOP, LARGEST)), plain)
    bad = (g == float("inf")) | (g != g)
    return tl.where(bad, float("nan"), tl.where(g == 0, 0.0, scale))


@gluon.jit
def _block_amax(v):
    """Largest magnitude of v [R, G, 16] along the last dim, float32, NaN kept."""
    if v.dtype == gl.bfloat16:
        a, b = _halves(v, 8)
        a, b = _halves(_larger(a, b), 4)
        a, b = _halves(_larger(a, b), 2)
        a, b = gl.split(_larger(a, b))
        return float_bits(gl.maximum(magnitude_bits(a), magnitude_bits(b)), a).to(gl.float32, bitcast=True)
    else:
        return amax_along(v, 2)


@triton.jit
def _block_scales(a, s_enc, undo, LARGEST: tl.constexpr):
    """(E4M3 scale, multiplier into codes) of blocks with these maxima: the twin of reference.block_scales."""
    a = tl.where(a == float("inf"), float("nan"), a)  # the hardware's cast would saturate
    s_b = (a * (s_enc * (1 / 6))).to(tl.float8e4nv)
    e = _reciprocal(s_b.to(tl.float32) * undo)
    return s_b.to(tl.uint8, bitcast=True), tl.where(e > LARGEST, LARGEST, e)


@gluon.jit
def _store_scales(scale, s_b, M, K, first_row, first_column, SQUARE: gl.constexpr):
    """Scales of the blocks of a tile that begins at first_row and first_column of [M, K]."""
    layout: gl.constexpr = s_b.type.layout
    TALL: gl.constexpr = 16 if SQUARE else 1
    across = gl.cdiv(K, 16)
    row = first_row // TALL + gl.arange(0, s_b.shape[0], layout=gl.SliceLayout(1, layout))
    group = first_column // 16 + gl.arange(0, s_b.shape[1], layout=gl.SliceLayout(0, layout))
    live = (row < gl.cdiv(M, TALL))[:, None] & (group < across)[None, :]
    if SQUARE:
        at = row.to(gl.int64)[:, None] * across + group[None, :]
    else:
        at = row[:, None] + group.to(gl.int64)[None, :] * M
    gl.store(scale + at, s_b, mask=live)


@gluon.jit
def _orientation(
    v, a, codes, scale, s_enc, undo, seed, M, K, first_row, first_column, height, width, row, column,
    SQUARE: gl.constexpr, RHT: gl.constexpr, STOCHASTIC: gl.constexpr, STREAM: gl.constexpr, NEGATIVE: gl.constexpr,
    LARGEST: gl.constexpr, GROUPED: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """v [R, C] of an [M, K] orientation -> packed codes, and an E4M3 scale for every 16 of a row, or of 16 rows. It is
    written at first_row and first_column; what it is part of is [height, width], and there it begins at row and column:
    the same without groups, and a group's own otherwise. `a` has the maxima of its blocks, or is None. Returns them."""
    groups: gl.constexpr = C // 16
    if RHT:
        v = _turn(v, R, C, NEGATIVE)
    v = gl.reshape(v, (R, groups, 16))
    if a is None:
        a = _block_amax(v)
        if SQUARE:
            a = amax_along(gl.reshape(a, (R // 16, 16, groups)), 1)
    s_b, e = _block_scales(a, s_enc, undo, LARGEST)
    _store_scales(scale, s_b, M, K, first_row, first_column, SQUARE)
    inner: gl.constexpr = gl.SliceLayout(2, v.type.layout)
    if SQUARE:
        spread = gl.reshape(gl.zeros((R, groups), gl.float32, layout=inner), (R // 16, 16, groups))
        e = gl.expand_dims(gl.convert_layout(e, gl.SliceLayout(1, spread.type.layout)), 1) + spread
        e = gl.reshape(e, (R, groups))
    e = gl.expand_dims(gl.convert_layout(e, inner), 2).broadcast_to((R, groups, 16))
    if STOCHASTIC:
        rows = row + gl.arange(0, R, layout=gl.SliceLayout(1, inner))
        block = column // 16 + gl.arange(0, groups, layout=gl.SliceLayout(0, inner))
        index = rows.to(gl.int64)[:, None] * gl.cdiv(width, 16) + block[None, :]
        first, second = _random_bytes(seed, index, v, STREAM)
        packed = random_codes(v, e, first, second)
    else:
        packed = nearest_codes(v, e)
    packed, _ = gl.split(gl.permute(gl.reshape(packed, (R, C // 8, 2, 4)), (0, 1, 3, 2)))
    packed = gl.reshape(packed, (R, C // 2))
    if GROUPED:  # what is nobody's is zero, though turned zeros may be negative
        if (row + R > height) | (column + C > width):
            packed = _only(packed, height - row, gl.cdiv(width, 16) * 16 - column if RHT else width - column)
    elif not RHT:  # turned padding holds values; otherwise it is zero, in a block of NaN too
        if column + C > width:
            packed = _only(packed, R, width - column)
    _store_packed(codes, packed, M, gl.cdiv(K, 16) * 8, first_row, first_column // 2)
    return a


@gluon.jit
def _only(packed, rows, columns):
    """Codes [R, C/2] of the first so many rows and columns, an odd number perhaps; zero elsewhere."""
    layout: gl.constexpr = packed.type.layout
    is_row = gl.arange(0, packed.shape[0], layout=gl.SliceLayout(1, layout)) < rows
    column = 2 * gl.arange(0, packed.shape[1], layout=gl.SliceLayout(0, layout))
    kept = gl.where(column + 1 < columns, 0xFF, gl.where(column < columns, 0x0F, 0)).to(gl.uint8)
    return gl.where(is_row[:, None], packed & kept[None, :], 0)


@gluon.jit
def _store_packed(codes, packed, M, row_bytes, first_row, first_byte):
    """Bytes [R, C/2] -> those of a contiguous [M, row_bytes]."""
    layout: gl.constexpr = packed.type.layout
    rows = first_row + gl.arange(0, packed.shape[0], layout=gl.SliceLayout(1, layout))
    columns = first_byte + gl.arange(0, packed.shape[1], layout=gl.SliceLayout(0, layout))
    at = rows.to(gl.int64)[:, None] * row_bytes + columns[None, :]
    gl.store(codes + at, packed, mask=(rows < M)[:, None] & (columns < row_bytes)[None, :])


@gluon.constexpr_function
def _maxima_layout(rows, columns, warps):
    across = min(columns // 16, 32)
    return gl.BlockedLayout([1, 1], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _nothing(R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """The maxima of no tiles [R, C/16]."""
    return gl.zeros((R, C // 16), gl.int32, layout=_maxima_layout(R, C, W))


@gluon.jit
def _maxima(v, R: gl.constexpr, C: gl.constexpr, RHT: gl.constexpr, NEGATIVE: gl.constexpr, like):
    """float32 bits [R, C/16] of the largest magnitudes in v [R, C]; if turned, as `_turned_magnitudes` has them. Laid
    out like those."""
    if RHT:
        found = _turned_magnitudes(v, R, C, NEGATIVE)
    else:
        found = _block_amax(gl.reshape(v, (R, C // 16, 16))).to(gl.int32, bitcast=True)
    return gl.convert_layout(found, like.type.layout, assert_trivial=True)


@gluon.jit
def _quarter(bits):
    """The float32 bits of a fourth of a float32, rounded to bfloat16."""
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
                    found = gl.maximum(found, amax_bits(_turn(v, ROWS, COLUMNS, NEGATIVE)))
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
                    turned = _turn(dual.transpose(v, ROWS, W), COLUMNS, ROWS, NEGATIVE)
                    found = gl.maximum(found, amax_bits(turned))
            gl.atomic_max(column + g, found, sem="relaxed")
        else:
            gl.atomic_max(column + g, bits, sem="relaxed")


@gluon.jit
def _store_globals(
    scales, amax, M, pm, TOP: gl.constexpr, LARGEST: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr
):
    """Of all groups, between the rows of tiles: a group without rows has a global scale too, and no tile."""
    for g in range(pm, GROUPS, gl.maximum(gl.cdiv(M, ROWS), 1)):
        gl.store(scales + g, _global_scale(gl.load(amax + g), TOP, LARGEST))


@gluon.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, row_global, column_global, row_amax, column_amax, seed, skip,
    start, block, owner, source, live,
    M, K, stride_m, stride_k,
    SQUARE: gl.constexpr, RHT_ROW: gl.constexpr, RHT_COLUMN: gl.constexpr,
    SR_ROW: gl.constexpr, SR_COLUMN: gl.constexpr, NEGATIVE: gl.constexpr, TOP: gl.constexpr, LARGEST: gl.constexpr,
    GROUPS: gl.constexpr, SIZE: gl.constexpr,
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
            gl.store(row_global, _global_scale(gl.load(row_amax), TOP, LARGEST))
        if column is not None:
            gl.store(column_global, _global_scale(gl.load(column_amax), TOP, LARGEST))
    if row is not None:
        row_enc = _encode_scale(gl.load(row_amax + g), TOP, LARGEST)
        row_undo = divide(1.0, row_enc)
    if column is not None:
        column_enc = _encode_scale(gl.load(column_amax + g), TOP, LARGEST)
        column_undo = divide(1.0, column_enc)
    for pk in range(strip * STRIP, gl.minimum((strip + 1) * STRIP, gl.cdiv(K, COLUMNS))):
        v = dual.load_tile(x, end, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W)
        a = None
        if row is not None:
            a = _orientation(
                v, None, row, row_scale, row_enc, row_undo, seed, M, K, pm * ROWS, pk * COLUMNS,
                height, K, within, pk * COLUMNS,
                SQUARE, RHT_ROW, SR_ROW, 0, NEGATIVE, LARGEST, GROUPS > 0, ROWS, COLUMNS,
            )  # fmt: skip
        if column is not None:
            if SQUARE and row is not None:  # the blocks are the same ones
                a = gl.permute(a, (1, 0))
            else:
                a = None
            _orientation(
                dual.transpose(v, ROWS, W), a, column, column_scale, column_enc, column_undo, seed, K, M,
                pk * COLUMNS, pm * ROWS, K, height, pk * COLUMNS, within,
                SQUARE, RHT_COLUMN, SR_COLUMN, 1, NEGATIVE, LARGEST, GROUPS > 0, COLUMNS, ROWS,
            )  # fmt: skip


def _strip(shape: tuple[int, ...], config: Config) -> int:
    """Returns how many tiles beside each other one program takes: what it computes once, scales above all, is as long
    as a tile. One each if there would be too few programs for the chip otherwise."""
    return next((n for n in (8, 4, 2) if tile.tiles(shape, config) >= n * PROGRAMS), 1)


def _wide(shape: tuple[int, ...], config: Config) -> Config:
    """Returns the part of a matrix that one program takes."""
    return config._replace(columns=config.columns * _strip(shape, config))


def _config(spec: NVFP4) -> Config:
    """Returns the fastest tile."""
    return CONFIGS[1] if spec.square else CONFIGS[0]


def _options(row: Quantizer | None, column: Quantizer | None) -> tuple[NVFP4, NVFP4]:
    """Returns the settings of both orientations; those of an absent orientation do not matter."""
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
        x, tile.codes_of(row), tile.codes_of(column), tile.scales_of(row), tile.scales_of(column),
        None if row is None else row.global_scale, None if column is None else column.global_scale,
        *cast_args.amax, cast_args.seed, cast_args.skip, *((None,) * 5 if groups is None else groups.tensors()),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _amax_launch(
    row_rht: bool, column_rht: bool, shape: tuple[int, ...], strides: tuple[int, ...], config: Config
) -> Launch:
    return Launch(
        _amax_kernel, tile.tiles(shape, _wide(shape, config)), (*shape, *strides), num_warps=config.warps,
        RHT_ROW=row_rht, RHT_COLUMN=column_rht, NEGATIVE=NEGATIVE, STRIP=_strip(shape, config),
        ROWS=config.rows, COLUMNS=config.columns, W=config.warps,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _cast_launch(
    first: NVFP4, second: NVFP4, shape: tuple[int, ...], strides: tuple[int, ...], groups: int, config: Config
) -> Launch:
    return Launch(
        _cast_kernel, tile.tiles(shape, _wide(shape, config)), (*shape, *strides), num_warps=config.warps,
        SQUARE=first.square, RHT_ROW=first.rht, RHT_COLUMN=second.rht,
        SR_ROW=first.stochastic, SR_COLUMN=second.stochastic,
        NEGATIVE=NEGATIVE, TOP=E2M1.max * E4M3.max, LARGEST=FLOAT32_MAX, GROUPS=groups, SIZE=BLOCK,
        STRIP=_strip(shape, config), ROWS=config.rows, COLUMNS=config.columns, W=config.warps,
    )  # fmt: skip


def variants() -> list[Variant]:
    cases = (  # dtype, square, (rht row, rht column), (stochastic row, stochastic column)
        (torch.bfloat16, False, (False, True), (False, False)),
        (torch.bfloat16, False, (False, True), (True, True)),
        (torch.float32, True, (False, False), (False, False)),
        (torch.bfloat16, True, (False, False), (False, False)),
    )
    found = []
    for config in CONFIGS:
        sizes = {"W": config.warps, "ROWS": config.rows, "COLUMNS": config.columns, "STRIP": 8}
        sizes["NEGATIVE"] = NEGATIVE
        for dtype, square, rht, random in cases:
            turned_by = {"RHT_ROW": rht[0], "RHT_COLUMN": rht[1], "skip": None, **tile.NO_GROUPS, **tile.CONTIGUOUS}
            turned_by |= sizes
            seed: dict[str, str] = {"seed": "*i64"} if any(random) else {}
            if not any(random):
                found.append(
                    Variant(
                        f"nvfp4 amax {dtype} rht={rht} {config}", _amax_kernel,
                        {"x": tile.POINTERS[dtype], "row": "*i32", "column": "*i32", **tile.SIZES},
                        turned_by, config.warps,
                    )
                )  # fmt: skip
            found.append(
                Variant(
                    f"nvfp4 {dtype} {'16x16' if square else '1x16'} rht={rht} stochastic={random} {config}",
                    _cast_kernel,
                    {
                        "x": tile.POINTERS[dtype], "row": "*u8", "column": "*u8", "row_scale": "*u8",
                        "column_scale": "*u8", "row_global": "*fp32", "column_global": "*fp32",
                        "row_amax": "*fp32", "column_amax": "*fp32", **seed, **tile.SIZES,
                    },
                    {
                        **turned_by, "SQUARE": square, "SR_ROW": random[0], "SR_COLUMN": random[1],
                        "TOP": E2M1.max * E4M3.max, "LARGEST": FLOAT32_MAX, **({} if seed else {"seed": None}),
                        "start": None, "block": None, "GROUPS": 0, "SIZE": BLOCK,
                    },
                    config.warps,
                )
            )  # fmt: skip
    return found
