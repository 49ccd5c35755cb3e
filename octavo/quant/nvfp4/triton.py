"""NVFP4 on the GPU: one pass for the tensor's amax in each orientation, one for the cast.

No chip below SM100 converts to E2M1 in hardware, so the kernel extracts codes from a float32's bits. The Hadamard
rotation adds in the order of the reference. The result has the same bits on every device.
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
from octavo.quant.nvfp4.hadamard import NEGATIVE
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer
from octavo.quant.scale import FLOAT32_MAX
from octavo.quant.tile import Config, Variant, amax_along, amax_bits, divide, group_of, group_tile, tile_index

CONFIGS = (Config(64, 64, 4), Config(64, 128, 4))


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


@gluon.jit
def _turn(v, R: gl.constexpr, C: gl.constexpr, NEGATIVE: gl.constexpr):
    """v [R, C] turned, float32: the twin of hadamard.turn."""
    layout: gl.constexpr = v.type.layout
    groups: gl.constexpr = C // 16
    t = gl.reshape(v.to(gl.float32), (R, groups, 16))
    t = t * (1.0 - 2.0 * ((NEGATIVE >> _within_block(t)) & 1).to(gl.float32))
    t = _sums_and_differences(t, R, groups, 1)
    t = _sums_and_differences(t, R, groups, 2)
    t = _sums_and_differences(t, R, groups, 4)
    t = _sums_and_differences(t, R, groups, 8)
    return gl.convert_layout(gl.reshape((t * 0.25).to(gl.bfloat16).to(gl.float32), (R, C)), layout)


@triton.jit
def _code(x):
    """E2M1 code, as int32, of x, |x| <= 6, rounded to nearest even; NaN gives +6."""
    a = tl.abs(x)
    bits = a.to(tl.int32, bitcast=True)
    # from 1 on a code is the exponent and the first mantissa bit; the rest is rounded off
    large = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    # below 1 the codes are multiples of 1/2, which is the last place of a float32 near 2^22
    small = (a + 4194304.0).to(tl.int32, bitcast=True) & 3
    return tl.where(x != x, 7, tl.where(a < 1.0, small, large) | _sign(x))


@triton.jit
def _sign(x):
    """The sign bit where an E2M1 code has it. Read off the bits: Triton's -x is 0 - x, which loses the sign of zero."""
    return (x.to(tl.int32, bitcast=True) >> 28) & 8


@triton.jit
def _step(a):
    return tl.where(a < 2.0, 0.5, tl.where(a < 4.0, 1.0, 2.0))


@triton.jit
def _round_up_by(x, r):
    """x, |x| <= 6, as an E2M1 code rounded up where the random byte r carries it over: round_stochastically's twin."""
    a = tl.abs(x)
    t = a + r * (_step(a) * (1 / 256))
    # downwards, to a multiple of the step: from 1 on that is the first mantissa bit again
    large = tl.minimum((t.to(tl.int32, bitcast=True) >> 22) - 252, 7)
    code = tl.where(t < 1.0, (t >= 0.5).to(tl.int32), large)
    return tl.where(x != x, 7, code | _sign(x))


@triton.jit
def _random_words(seed, block_index, STREAM: tl.constexpr):
    """Sixteen random bytes for each block, as four words (see philox.py)."""
    low, high = block_index.to(tl.uint32), (block_index >> 32).to(tl.uint32)
    zero = low * 0
    return tl.philox(tl.load(seed), low, high, zero + tl.load(seed + 1).to(tl.uint32), zero + STREAM)


@gluon.jit
def _random_bytes(seed, block_index, like, STREAM: gl.constexpr):
    """float32 [R, G, 16]: r of every element."""
    w0, w1, w2, w3 = _random_words(seed, block_index, STREAM)
    j = _within_block(like)
    first = gl.where(j < 4, gl.expand_dims(w0, 2), gl.expand_dims(w1, 2))
    second = gl.where(j < 12, gl.expand_dims(w2, 2), gl.expand_dims(w3, 2))
    word = gl.where(j < 8, first, second)
    return ((word >> ((j % 4) * 8).to(gl.uint32)) & 0xFF).to(gl.float32)


@triton.jit
def _tensor_scales(g, TOP: tl.constexpr, LARGEST: tl.constexpr):
    """(S_enc, global_scale): the twin of reference.tensor_scales."""
    quotient = divide(TOP, g)
    bad = (g == float("inf")) | (g != g)
    s_enc = tl.where((g == 0) | bad, 1.0, tl.where(quotient > LARGEST, LARGEST, quotient))
    undo = divide(1.0, s_enc)
    plain = tl.div_rn(g, tl.where(g == g, TOP, TOP))
    global_scale = tl.where(quotient > LARGEST, undo, plain)
    return s_enc, tl.where(bad, float("nan"), tl.where(g == 0, 0.0, global_scale))


@gluon.jit
def _orientation(
    v, codes, scale, s_enc, seed, M, K, first_row, first_column, height, width, row, column,
    SQUARE: gl.constexpr, RHT: gl.constexpr, STOCHASTIC: gl.constexpr, STREAM: gl.constexpr, NEGATIVE: gl.constexpr,
    LARGEST: gl.constexpr, GROUPED: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """v [R, C] of an [M, K] orientation -> packed codes, and an E4M3 scale for every 16 of a row, or of 16 rows. It is
    written at first_row and first_column; what it is part of is [height, width], and there it begins at row and column:
    the same without groups, and a group's own otherwise."""
    groups: gl.constexpr = C // 16
    down: gl.constexpr = R // 16 if SQUARE else R
    across = gl.cdiv(K, 16)
    if RHT:
        v = _turn(v, R, C, NEGATIVE)
    v = v.to(gl.float32)
    blocks = gl.reshape(v, (down, R // down, groups, 16))
    a = amax_along(amax_along(blocks, 3), 1)  # [down, groups]
    a = gl.where(a == float("inf"), float("nan"), a)  # the hardware's cast would saturate
    s_b = (a * (s_enc * (1 / 6))).to(gl.float8e4nv)
    layout: gl.constexpr = a.type.layout
    scale_rows = first_row // (R // down) + gl.arange(0, down, layout=gl.SliceLayout(1, layout))
    group = first_column // 16 + gl.arange(0, groups, layout=gl.SliceLayout(0, layout))
    live = (scale_rows < gl.cdiv(M, R // down))[:, None] & (group < across)[None, :]
    if SQUARE:
        at = scale_rows.to(gl.int64)[:, None] * across + group[None, :]
    else:
        at = scale_rows[:, None] + group.to(gl.int64)[None, :] * M
    gl.store(scale + at, s_b.to(gl.uint8, bitcast=True), mask=live)
    decoded = s_b.to(gl.float32) * divide(1.0, s_enc)
    e = divide(1.0, decoded)
    e = gl.where(e > LARGEST, LARGEST, e)
    scaled = gl.reshape(blocks * gl.expand_dims(gl.expand_dims(e, 1), 3), (R, groups, 16))
    scaled = gl.where(scaled > 6.0, 6.0, gl.where(scaled < -6.0, -6.0, scaled))
    if STOCHASTIC:
        inner: gl.constexpr = gl.SliceLayout(2, scaled.type.layout)
        rows = row + gl.arange(0, R, layout=gl.SliceLayout(1, inner))
        block = column // 16 + gl.arange(0, groups, layout=gl.SliceLayout(0, inner))
        index = rows.to(gl.int64)[:, None] * gl.cdiv(width, 16) + block[None, :]
        quantized = _round_up_by(scaled, _random_bytes(seed, index, scaled, STREAM))
    else:
        quantized = _code(scaled)
    along: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, quantized.type.layout))
    block_start = gl.expand_dims(gl.expand_dims(column + gl.arange(0, groups, layout=along) * 16, 0), 2)
    if not RHT:  # turned padding holds values; otherwise it is zero, in a block of NaN too
        quantized = gl.where(block_start + _within_block(quantized) < width, quantized, 0)
    if GROUPED:  # what is nobody's is zero, though turned zeros may be negative
        down_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, quantized.type.layout))
        at_row = gl.expand_dims(gl.expand_dims(row + gl.arange(0, R, layout=down_rows), 1), 2)
        quantized = gl.where((at_row < height) & (block_start < width), quantized, 0)
    _store_packed(codes, quantized, M, across * 8, first_row, first_column // 2, R, C)


@gluon.jit
def _store_packed(codes, quantized, M, row_bytes, first_row, first_byte, R: gl.constexpr, C: gl.constexpr):
    """Codes [R, C/16, 16] -> bytes of a contiguous [M, row_bytes], two to a byte."""
    low, high = gl.split(gl.reshape(quantized, (R, C // 2, 2)))
    packed = (low | (high << 4)).to(gl.uint8)
    layout: gl.constexpr = packed.type.layout
    rows = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    columns = first_byte + gl.arange(0, C // 2, layout=gl.SliceLayout(0, layout))
    at = rows.to(gl.int64)[:, None] * row_bytes + columns[None, :]
    gl.store(codes + at, packed, mask=(rows < M)[:, None] & (columns < row_bytes)[None, :])


@gluon.jit
def _amax_kernel(
    x, row, column, skip, owner, source, live, M, K, stride_m, stride_k,
    RHT_ROW: gl.constexpr, RHT_COLUMN: gl.constexpr,
    NEGATIVE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    first, end, g = pm * ROWS, M, 0
    if owner is not None:
        first, end, _ = group_tile(source, live, pm * ROWS, M)
        if first >= end:
            return
        g = group_of(owner, pm * ROWS)
    v = dual.load_tile(x, end, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W)
    if row is not None:
        along = v
        if RHT_ROW:
            along = _turn(v, ROWS, COLUMNS, NEGATIVE)
        gl.atomic_max(row + g, amax_bits(along), sem="relaxed")
    if column is not None:
        down = v
        if RHT_COLUMN:
            down = _turn(dual.transpose(v, ROWS, W), COLUMNS, ROWS, NEGATIVE)
        gl.atomic_max(column + g, amax_bits(down), sem="relaxed")


@gluon.jit
def _store_globals(
    scales, amax, M, pm, TOP: gl.constexpr, LARGEST: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr
):
    """Of all groups, between the rows of tiles: a group without rows has a global scale too, and no tile."""
    for g in range(pm, GROUPS, gl.maximum(gl.cdiv(M, ROWS), 1)):
        _, global_scale = _tensor_scales(gl.load(amax + g), TOP, LARGEST)
        gl.store(scales + g, global_scale)


@gluon.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, row_global, column_global, row_amax, column_amax, seed, skip,
    start, block, owner, source, live,
    M, K, stride_m, stride_k,
    SQUARE: gl.constexpr, RHT_ROW: gl.constexpr, RHT_COLUMN: gl.constexpr,
    SR_ROW: gl.constexpr, SR_COLUMN: gl.constexpr, NEGATIVE: gl.constexpr, TOP: gl.constexpr, LARGEST: gl.constexpr,
    GROUPS: gl.constexpr, SIZE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    # a tile begins at `first` in x and at `within` in what it is part of, which has `height` rows
    first, end, within, height, g = pm * ROWS, M, pm * ROWS, M, 0
    if owner is not None:
        if pk == 0:
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
    v = dual.load_tile(x, end, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W)
    if row is not None:
        s_enc, global_scale = _tensor_scales(gl.load(row_amax + g), TOP, LARGEST)
        if owner is None:
            if gl.program_id(0) == 0:
                gl.store(row_global, global_scale)
        _orientation(
            v, row, row_scale, s_enc, seed, M, K, pm * ROWS, pk * COLUMNS, height, K, within, pk * COLUMNS,
            SQUARE, RHT_ROW, SR_ROW, 0, NEGATIVE, LARGEST, GROUPS > 0, ROWS, COLUMNS,
        )  # fmt: skip
    if column is not None:
        s_enc, global_scale = _tensor_scales(gl.load(column_amax + g), TOP, LARGEST)
        if owner is None:
            if gl.program_id(0) == 0:
                gl.store(column_global, global_scale)
        _orientation(
            dual.transpose(v, ROWS, W), column, column_scale, s_enc, seed, K, M, pk * COLUMNS, pm * ROWS,
            K, height, pk * COLUMNS, within,
            SQUARE, RHT_COLUMN, SR_COLUMN, 1, NEGATIVE, LARGEST, GROUPS > 0, COLUMNS, ROWS,
        )  # fmt: skip


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
    config: Config = CONFIGS[0],
) -> AmaxPair:
    first, second = _options(row, column)
    found = torch.zeros(2, max(tile.number_of(groups), 1), dtype=torch.int32, device=x.device)
    _amax_launch(first.rht, second.rht, tile.shape_inside(x, groups), x.stride(), config)(
        x, found[0] if row else None, found[1] if column else None, skip, *tile.pointers_of(groups)
    )
    values = found.view(torch.float32)
    return (values[0] if row else None), (values[1] if column else None)


def cast(
    x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs, config: Config = CONFIGS[0]
) -> None:
    first, second = _options(*(None if q is None else q.spec for q in (row, column)))
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
        _amax_kernel, tile.tiles(shape, config), (*shape, *strides), num_warps=config.warps,
        RHT_ROW=row_rht, RHT_COLUMN=column_rht, NEGATIVE=NEGATIVE,
        ROWS=config.rows, COLUMNS=config.columns, W=config.warps,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _cast_launch(
    first: NVFP4, second: NVFP4, shape: tuple[int, ...], strides: tuple[int, ...], groups: int, config: Config
) -> Launch:
    return Launch(
        _cast_kernel, tile.tiles(shape, config), (*shape, *strides), num_warps=config.warps,
        SQUARE=first.square, RHT_ROW=first.rht, RHT_COLUMN=second.rht,
        SR_ROW=first.stochastic, SR_COLUMN=second.stochastic,
        NEGATIVE=NEGATIVE, TOP=E2M1.max * E4M3.max, LARGEST=FLOAT32_MAX, GROUPS=groups, SIZE=BLOCK,
        ROWS=config.rows, COLUMNS=config.columns, W=config.warps,
    )  # fmt: skip


def variants() -> list[Variant]:
    cases = (  # dtype, square, (rht row, rht column), (stochastic row, stochastic column)
        (torch.bfloat16, False, (False, True), (False, False)),
        (torch.bfloat16, False, (False, True), (True, True)),
        (torch.float32, True, (False, False), (False, False)),
    )
    found = []
    for config in CONFIGS:
        sizes = {"W": config.warps, "ROWS": config.rows, "COLUMNS": config.columns, "NEGATIVE": NEGATIVE}
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
