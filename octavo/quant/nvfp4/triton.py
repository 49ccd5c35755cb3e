"""NVFP4 on the GPU: one pass for the tensor's amax in each orientation, one for the cast.

No chip below SM100 converts to E2M1 in hardware, so the code of a value is counted from the midpoints it crosses, and
the Hadamard turn is the reference's own sequence of additions: the bits do not depend on where it runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E2M1, E4M3
from octavo.quant import tile
from octavo.quant.nvfp4 import NVFP4, needs_seed
from octavo.quant.nvfp4.hadamard import NEGATIVE
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Given, Pair, Quantizer
from octavo.quant.scale import FLOAT32_MAX
from octavo.quant.tile import Config, Variant, amax_along, load_tile, magnitude_bits, tile_index

CONFIGS = (Config(64, 64, 4), Config(32, 64, 4), Config(64, 64, 8))


@triton.jit
def _sums_and_differences(v, N: tl.constexpr, DISTANCE: tl.constexpr):
    """One round of the butterfly over v [N, 16]."""
    pairs = tl.reshape(v, (N, 8 // DISTANCE, 2, DISTANCE))
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    mixed = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(mixed, (N, 16))


@triton.jit
def _turn(v, R: tl.constexpr, C: tl.constexpr, NEGATIVE: tl.constexpr):
    """The twin of hadamard.turn."""
    n: tl.constexpr = R * C // 16
    sign = 1.0 - 2.0 * ((NEGATIVE >> tl.arange(0, 16)) & 1).to(tl.float32)
    v = tl.reshape(v, (n, 16)) * sign[None, :]
    v = _sums_and_differences(v, n, 1)
    v = _sums_and_differences(v, n, 2)
    v = _sums_and_differences(v, n, 4)
    v = _sums_and_differences(v, n, 8)
    return tl.reshape((v * 0.25).to(tl.bfloat16).to(tl.float32), (R, C))


@triton.jit
def _code(x):
    """E2M1 code, as int32, of x rounded to nearest even; NaN gives +6."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    code |= (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(x != x, 7, code)


@triton.jit
def _step(a):
    return tl.where(a < 2.0, 0.5, tl.where(a < 4.0, 1.0, 2.0))


@triton.jit
def _stochastic(x, block_index, seed, STREAM: tl.constexpr, R: tl.constexpr, G: tl.constexpr):
    """x [R, G, 16] rounded with the 16 random bytes of each block [R, G] (see philox.py), still as a value."""
    zero = (block_index * 0).to(tl.uint32)
    low, high = block_index.to(tl.uint32), (block_index >> 32).to(tl.uint32)
    step = zero + tl.load(seed + 1).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed), low, high, step, zero + STREAM)
    j = tl.arange(0, 16)[None, None, :]
    word = tl.where(j < 8, tl.where(j < 4, w0[:, :, None], w1[:, :, None]),
                    tl.where(j < 12, w2[:, :, None], w3[:, :, None]))  # fmt: skip
    r = ((word >> ((j % 4) * 8).to(tl.uint32)) & 0xFF).to(tl.float32)
    a = tl.abs(x)
    t = a + r * (_step(a) * (1 / 256))
    per_step = tl.where(t < 2.0, 2.0, tl.where(t < 4.0, 1.0, 0.5))  # a power of two: the product is the quotient
    magnitude = tl.minimum(tl.floor(t * per_step) * _step(t), 6.0)
    signed = tl.where(x.to(tl.int32, bitcast=True) < 0, -magnitude, magnitude)
    return tl.where(x != x, x, signed)


@triton.jit
def _tensor_scales(g, TOP: tl.constexpr, LARGEST: tl.constexpr):
    """(S_enc, global_scale): the twin of reference.tensor_scales."""
    quotient = tl.div_rn(tl.zeros_like(g) + TOP, g)
    odd = (g == 0) | (g == float("inf")) | (g != g)
    s_enc = tl.where(odd, 1.0, tl.where(quotient > LARGEST, LARGEST, quotient))
    undo = tl.div_rn(tl.zeros_like(g) + 1.0, s_enc)
    plain = tl.div_rn(g, tl.zeros_like(g) + TOP)
    global_scale = tl.where(odd | (quotient > LARGEST), undo, plain)
    return s_enc, tl.where(g != g, g, tl.where(g == 0, 0.0, global_scale))


@triton.jit
def _cast(
    v, codes, scale, s_enc, seed, M, K, rows, first_row, first_column,
    SQUARE: tl.constexpr, RHT: tl.constexpr, STOCHASTIC: tl.constexpr, STREAM: tl.constexpr, NEGATIVE: tl.constexpr,
    LARGEST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """v [R, C] -> packed codes and an E4M3 scale for every 16 columns of a row, or of 16 rows."""
    groups: tl.constexpr = C // 16
    across = tl.cdiv(K, 16)
    group = first_column // 16 + tl.arange(0, groups)
    if SQUARE:
        down: tl.constexpr = R // 16
        scale_rows, scale_count = first_row // 16 + tl.arange(0, down), tl.cdiv(M, 16)
    else:
        down: tl.constexpr = R
        scale_rows, scale_count = rows, M
    if RHT:
        v = _turn(v, R, C, NEGATIVE)
    blocks = tl.reshape(v, (down, R // down, groups, 16))
    a = amax_along(amax_along(blocks, 3), 1)
    s_b = (a * (s_enc * (1 / 6))).to(tl.float8e4nv)
    live = (scale_rows < scale_count)[:, None] & (group < across)[None, :]
    at = scale_rows.to(tl.int64)[:, None] * across + group[None, :]
    tl.store(scale + at, s_b.to(tl.uint8, bitcast=True), mask=live)
    undo = tl.div_rn(tl.zeros_like(s_enc) + 1.0, s_enc)
    decoded = s_b.to(tl.float32) * undo
    e = tl.div_rn(tl.zeros_like(decoded) + 1.0, decoded)
    e = tl.where(e > LARGEST, LARGEST, e)
    x = blocks * e[:, None, :, None]
    x = tl.where(x > 6.0, 6.0, tl.where(x < -6.0, -6.0, x))
    if STOCHASTIC:
        index = rows.to(tl.int64)[:, None] * across + group[None, :]
        x = _stochastic(tl.reshape(x, (R, groups, 16)), index, seed, STREAM, R, groups)
    low, high = tl.split(tl.reshape(_code(x), (R, C // 2, 2)))
    bytes_across = across * 8
    column = first_column // 2 + tl.arange(0, C // 2)
    tl.store(
        codes + rows.to(tl.int64)[:, None] * bytes_across + column[None, :],
        (low | (high << 4)).to(tl.uint8),
        mask=(rows < M)[:, None] & (column < bytes_across)[None, :],
    )


@triton.jit
def _amax_kernel(
    x, row, column, skip, M, K, stride_m, stride_k, RHT_ROW: tl.constexpr, RHT_COLUMN: tl.constexpr,
    NEGATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if skip is not None:
        if tl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    rows, columns = pm * ROWS + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    v = load_tile(x, M, K, stride_m, stride_k, rows, columns).to(tl.float32)
    if row is not None:
        turned = v
        if RHT_ROW:
            turned = _turn(v, ROWS, COLUMNS, NEGATIVE)
        tl.atomic_max(row, tl.max(tl.max(magnitude_bits(turned), 1), 0), sem="relaxed")
    if column is not None:
        turned = tl.trans(v)
        if RHT_COLUMN:
            turned = _turn(turned, COLUMNS, ROWS, NEGATIVE)
        tl.atomic_max(column, tl.max(tl.max(magnitude_bits(turned), 1), 0), sem="relaxed")


@triton.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, row_global, column_global, row_amax, column_amax, seed, skip,
    M, K, stride_m, stride_k,
    SQUARE: tl.constexpr, RHT_ROW: tl.constexpr, RHT_COLUMN: tl.constexpr, SR_ROW: tl.constexpr, SR_COLUMN: tl.constexpr,
    NEGATIVE: tl.constexpr, TOP: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if skip is not None:
        if tl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    rows, columns = pm * ROWS + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    v = load_tile(x, M, K, stride_m, stride_k, rows, columns).to(tl.float32)
    if row is not None:
        s_enc, global_scale = _tensor_scales(tl.load(row_amax), TOP, LARGEST)
        if tl.program_id(0) == 0:
            tl.store(row_global, global_scale)
        _cast(
            v, row, row_scale, s_enc, seed, M, K, rows, pm * ROWS, pk * COLUMNS,
            SQUARE, RHT_ROW, SR_ROW, 0, NEGATIVE, LARGEST, ROWS, COLUMNS,
        )  # fmt: skip
    if column is not None:
        s_enc, global_scale = _tensor_scales(tl.load(column_amax), TOP, LARGEST)
        if tl.program_id(0) == 0:
            tl.store(column_global, global_scale)
        _cast(
            tl.trans(v), column, column_scale, s_enc, seed, K, M, columns, pk * COLUMNS, pm * ROWS,
            SQUARE, RHT_COLUMN, SR_COLUMN, 1, NEGATIVE, LARGEST, COLUMNS, ROWS,
        )  # fmt: skip


def _options(row: Quantizer | None, column: Quantizer | None) -> tuple[NVFP4, NVFP4]:
    """Settings of both orientations; those of one that is not wanted do not matter."""
    first, second = row or column, column or row
    assert isinstance(first, NVFP4) and isinstance(second, NVFP4)
    return first, second


def amax(
    x: Tensor, row: Quantizer | None, column: Quantizer | None, skip: Tensor | None, config: Config = CONFIGS[0]
) -> Pair:
    first, second = _options(row, column)
    found = torch.zeros(2, 1, dtype=torch.int32, device=x.device)
    _amax_kernel[tile.tiles(x, config)](
        x, found[0] if row else None, found[1] if column else None, skip, *x.shape, *x.stride(),
        RHT_ROW=first.rht, RHT_COLUMN=second.rht, NEGATIVE=NEGATIVE,
        ROWS=config.rows, COLUMNS=config.columns, num_warps=config.warps,
    )  # fmt: skip
    values = found.view(torch.float32)
    return (values[0] if row else None), (values[1] if column else None)


def cast(x: Tensor, row: QTensor | None, column: QTensor | None, given: Given, config: Config = CONFIGS[0]) -> None:
    first, second = _options(row and row.spec, column and column.spec)
    drawing = next((q for q in (row, column) if q is not None and _options(q.spec, None)[0].stochastic), None)
    _cast_kernel[tile.tiles(x, config)](
        x, tile.bytes_of(row), tile.bytes_of(column), tile.scales_of(row), tile.scales_of(column),
        row and row.global_scale, column and column.global_scale, *given.amax,
        None if drawing is None else needs_seed(drawing, given), given.skip, *x.shape, *x.stride(),
        SQUARE=first.square, RHT_ROW=first.rht, RHT_COLUMN=second.rht,
        SR_ROW=first.stochastic, SR_COLUMN=second.stochastic,
        NEGATIVE=NEGATIVE, TOP=E2M1.max * E4M3.max, LARGEST=FLOAT32_MAX,
        ROWS=config.rows, COLUMNS=config.columns, num_warps=config.warps,
    )  # fmt: skip


def variants() -> list[Variant]:
    cases = (  # dtype, square, (rht row, rht column), (stochastic row, stochastic column)
        (torch.bfloat16, False, (False, True), (False, False)),
        (torch.bfloat16, False, (False, True), (True, True)),
        (torch.float32, True, (False, False), (False, False)),
    )
    found = []
    for config in CONFIGS:
        sizes = {"ROWS": config.rows, "COLUMNS": config.columns, "NEGATIVE": NEGATIVE}
        for dtype, square, rht, random in cases:
            turned = {"RHT_ROW": rht[0], "RHT_COLUMN": rht[1], "skip": None, **tile.CONTIGUOUS, **sizes}
            seed: dict[str, str] = {"seed": "*i64"} if any(random) else {}
            found += [
                Variant(
                    f"nvfp4 amax {dtype} rht={rht} {config}", _amax_kernel,
                    {"x": tile.POINTERS[dtype], "row": "*i32", "column": "*i32", **tile.SIZES}, turned, config.warps,
                ),
                Variant(
                    f"nvfp4 {dtype} {'16x16' if square else '1x16'} rht={rht} stochastic={random} {config}", _cast_kernel,
                    {
                        "x": tile.POINTERS[dtype], "row": "*u8", "column": "*u8", "row_scale": "*u8",
                        "column_scale": "*u8", "row_global": "*fp32", "column_global": "*fp32",
                        "row_amax": "*fp32", "column_amax": "*fp32", **seed, **tile.SIZES,
                    },
                    {
                        **turned, "SQUARE": square, "SR_ROW": random[0], "SR_COLUMN": random[1],
                        "TOP": E2M1.max * E4M3.max, "LARGEST": FLOAT32_MAX, **({} if seed else {"seed": None}),
                    },
                    config.warps,
                ),
            ]  # fmt: skip
    return found
