"""Triton building blocks of the quantize kernels. A kernel reads a tile of x once and writes it in both orientations.

Every kernel runs a one-dimensional grid of tiles, row by row, addresses elements in 64 bits, masks the edges and
returns at once if the skip flag is set. Casts to FP8 are the hardware's: round to nearest even, saturate, NaN to 0x7f.
`/` is Triton's fast divide, so every division here is `tl.div_rn`.

Rows in groups (`octavo.quant.groups`) come with the pointers `owner`, `source` and `live`, and the grid covers the
padded layout. A tile lies in one block, so it belongs to one group: its rows begin elsewhere in x, and may be fewer.
Without groups these pointers are None; the kernel is compiled for that and contains none of this code.

A kernel that gathers has the pointer `gather` as well: the row of x that each packed row is. A kernel reads it only for
rows of a group, and reads no row of x where it names none: x has `height` rows. Both are None otherwise.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.launch import Launch
from octavo.launch import Variant as Variant
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Quantizer
from octavo.quant.scale import FLOAT32_MAX, FP8Quantizer

S = TypeVar("S", bound=Quantizer)


Sizes = tuple[int, ...]


class Config(NamedTuple):
    """A tile and the warps that work on it."""

    rows: int
    columns: int
    warps: int


POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


def tiles(shape: Sizes, config: Config) -> int:
    """Return the grid: at least one tile per dim, so that the kernel writes scales of empty tensors too."""
    m, k = shape
    return max(1, -(-m // config.rows)) * max(1, -(-k // config.columns))


def spec_of(kind: type[S], row: QTensor | None, column: QTensor | None) -> S:
    """Return the quantizer that both orientations share."""
    lead = column if row is None else row
    assert lead is not None
    spec = lead.spec
    assert isinstance(spec, kind) and (column is None or column.spec is spec or column.spec == spec)
    return spec


def shape_inside(x: Tensor, groups: Groups | None) -> Sizes:
    """Return the shape that a kernel writes: rows in groups fill whole blocks."""
    return x.shape if groups is None else (groups.padded, x.shape[1])


def number_of(groups: Groups | None) -> int:
    return 0 if groups is None else groups.number


def pointers_of(groups: Groups | None) -> tuple[Tensor | None, ...]:
    """Return the pointers owner, source and live, each None without groups."""
    return (None, None, None) if groups is None else (groups.owner, groups.source, groups.live)


def height_of(x: Tensor, source: Tensor | None) -> int | None:
    """Return how many rows of x a `source` may name; None without one, so that no kernel has it as an argument."""
    return None if source is None else x.shape[0]


def codes_and_scales(row: QTensor | None, column: QTensor | None) -> tuple[Tensor | None, ...]:
    """Return the pointers row, column, row_scale and column_scale."""
    if row is None or column is None:
        first = (None, None) if row is None else (row.codes, row.scale)
        second = (None, None) if column is None else (column.codes, column.scale)
        return first[0], second[0], first[1], second[1]
    return row.codes, column.codes, row.scale, column.scale


def scale_strides(q: QTensor | None) -> Sizes:
    return (0, 0) if q is None else q.scale.stride()


def launch(kernel: Any, shape: Sizes, sizes: tuple[int | None, ...], config: Config, **constants: Any) -> Launch:
    """Return the launch of a kernel over the tiles of a matrix. Its sizes are the matrix's and then `sizes`; the
    constants that are the tile's own, which come last, are added."""
    own = {"ROWS": config.rows, "COLUMNS": config.columns, "TILE": config.rows, "W": config.warps}
    constants |= {name: own[name] for name in kernel.arg_names if name in own}
    return Launch(kernel, tiles(shape, config), (*shape, *sizes), num_warps=config.warps, **constants)


def rule(spec: FP8Quantizer, ceiling: float = FLOAT32_MAX) -> dict[str, Any]:
    """Return the constants of `inverse_scale_from`."""
    return {"MAX": spec.fmt.max, "EPS": spec.eps, "CEILING": ceiling, "POW2": spec.pow2}


@triton.jit
def tile_index(K, COLUMNS: tl.constexpr):
    """Return (tile row, tile column) of this program."""
    across = tl.maximum(tl.cdiv(K, COLUMNS), 1)
    pid = tl.program_id(0)
    return pid // across, pid % across


_ROWS_OF_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def group_tile(source, live, first_row, M):
    """Return (packed row at which a tile begins, packed row at which its group or its block ends, rows of its block
    that are anybody's), of a tile that begins at a row inside. A tile in use may have no row of its own: its codes are
    zero."""
    block = first_row // _ROWS_OF_BLOCK
    used = tl.load(live + block, mask=first_row < M, other=0)  # of no rows at all there is no block to ask about
    start = tl.load(source + block, mask=first_row < M, other=0)
    return start + first_row % _ROWS_OF_BLOCK, start + used, used


@triton.jit
def group_of(owner, first_row):
    """Return whose a tile in use is."""
    return tl.load(owner + first_row // _ROWS_OF_BLOCK)


@triton.jit
def load_tile(x, M, K, stride_m, stride_k, rows, columns):
    """Return x[rows, columns] in its own dtype; zero outside."""
    at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
    return tl.load(x + at, mask=(rows < M)[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit
def named_rows(gather, rows, end, height):
    """Return (the row of x that each packed row is, whether x has it), from one load for each row of a tile. No entry
    past `end` is read."""
    named = tl.load(gather + rows, mask=rows < end, other=-1)
    return named, (named >= 0) & (named < height)


@triton.jit
def gather_tile(x, gather, end, height, K, stride_m, stride_k, rows, columns):
    """Return x[gather[rows], columns] in its own dtype; zero outside, and where x has no such row."""
    named, there = named_rows(gather, rows, end, height)
    at = named.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
    return tl.load(x + at, mask=there[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit
def inverse_scale_from(amax, MAX: tl.constexpr, EPS: tl.constexpr, CEILING: tl.constexpr, POW2: tl.constexpr):
    """Return (inverse scale, scale back): as inverse_scale_from and decode_scale of octavo.quant.scale compute them.
    The scale is NaN if amax is Inf or NaN."""
    a = amax
    if EPS > 0:
        a = tl.where(amax < EPS, EPS, amax)  # a NaN passes
    if POW2:
        return _power_of_two(a, MAX, CEILING)
    else:
        s = divide(MAX, a)
        s = tl.where(s == float("inf"), CEILING, s)
        bad = (a == float("inf")) | (a != a)
        s = tl.where((a == 0) | bad, 1.0, s)
        return s, tl.where(bad, float("nan"), divide(1.0, s))


@triton.constexpr_function
def exponent_of(value):
    """Return the exponent of the power of two at or below a positive number."""
    return math.frexp(value)[1] - 1


@triton.jit
def _power_of_two(a, MAX: tl.constexpr, CEILING: tl.constexpr):
    """Compute `inverse_scale_from` for powers of two in integers, a tenth of the instructions. FP8 maxima are 1.75 *
    2^n, so MAX / a has the exponent n - exponent(a), less one where a's mantissa exceeds 1.75; rounding the quotient
    never carries it further."""
    bits = a.to(tl.int32, bitcast=True)
    n: tl.constexpr = exponent_of(MAX)
    biased = 254 + n - ((bits + 0x1FFFFF) >> 23)  # the sum carries into the exponent above 1.75
    top: tl.constexpr = 127 + exponent_of(CEILING)
    biased = tl.where(biased > 254, top, biased)  # the quotient overflows; every subnormal a is here
    odd = (bits - 1).to(tl.uint32, bitcast=True) >= 0x7F7FFFFF  # 0, Inf or NaN
    biased = tl.where(odd, 127, biased)
    s = (biased << 23).to(tl.float32, bitcast=True)
    undo = tl.maximum((254 - biased) << 23, 0x400000)  # 1 / 2^127 is a subnormal
    undo = tl.where(bits >= 0x7F800000, 0x7FC00000, undo)
    return s, undo.to(tl.float32, bitcast=True)


@triton.jit
def divide(NUMERATOR: tl.constexpr, x):
    """Return NUMERATOR / x, correctly rounded."""
    return tl.div_rn(tl.where(x == x, NUMERATOR, NUMERATOR), x)


@triton.jit
def magnitude_bits(v):
    """Return |v| as an integer of v's own width: ordered as the magnitudes are, NaN above all, so that an integer max
    is an amax that keeps NaN. Taken before v is widened, so that the widening stays free to move past a change of
    layout."""
    if v.dtype.primitive_bitwidth == 16:
        return v.to(tl.uint16, bitcast=True) & 0x7FFF
    else:
        return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def float_bits(bits, like):
    """Return the float32 bits of magnitudes in `magnitude_bits` of a tensor like this one."""
    if like.dtype.primitive_bitwidth == 16:
        return bits.to(tl.uint16).to(like.dtype, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    else:
        return bits


@triton.jit
def amax_along(v, axis: tl.constexpr):
    """Return the largest magnitude along an axis of v, float32, NaN kept."""
    return float_bits(tl.max(magnitude_bits(v), axis), v).to(tl.float32, bitcast=True)


@triton.jit
def amax_bits(v):
    """Return float32 bits of the largest magnitude in a tile."""
    return float_bits(tl.max(tl.max(magnitude_bits(v), 1), 0), v)


@triton.jit
def raise_amax(amax, bits):
    """Raise an amax: *amax = max(*amax, bits), float32 read as integers. The bits are the same in any order, NaN above
    all."""
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def _tensor_amax_kernel(
    x, out, skip, owner, source, live, gather, M, K, stride_m, stride_k, height,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if skip is not None:
        if tl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    first, end = pm * ROWS, M
    if owner is not None:
        first, end, _ = group_tile(source, live, pm * ROWS, M)
        if first >= end:
            return
        out += group_of(owner, pm * ROWS)
    rows, columns = first + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    if gather is None:
        v = load_tile(x, end, K, stride_m, stride_k, rows, columns)
    else:
        v = gather_tile(x, gather, end, height, K, stride_m, stride_k, rows, columns)
    # widened first: an integer max in 32 bits takes fewer instructions than one in 16
    raise_amax(out, amax_bits(v.to(tl.float32)))


AMAX_CONFIGS = (Config(64, 256, 8), Config(128, 128, 8))


@lru_cache(maxsize=4096)
def _amax_launch(shape: Sizes, strides: Sizes, height: int | None, config: Config) -> Launch:
    return launch(_tensor_amax_kernel, shape, (*strides, height), config)


def tensor_amax(
    x: Tensor,
    skip: Tensor | None,
    config: Config = AMAX_CONFIGS[0],
    groups: Groups | None = None,
    source: Tensor | None = None,
) -> Tensor:
    """Return max|x| as float32 [1, 1], or that of each group [number], whose rows a `source` may name."""
    shape = (1, 1) if groups is None else (groups.number,)
    out = torch.zeros(shape, dtype=torch.float32, device=x.device)
    launch = _amax_launch(shape_inside(x, groups), x.stride(), height_of(x, source), config)
    launch(x, out, skip, *pointers_of(groups), source)
    return out


EXAMPLE = ((16384, 8192), (8192, 1))  # shape and strides of a matrix that a variant is a launch for


def variant_of(name: str, launch: Launch, **pointers: str) -> Variant:
    """Return the variant of a launch whose pointers have these types; the others are None."""
    options, passed = launch.options, [name for name in launch.kernel.arg_names if name not in launch.options]
    sizes = dict(zip(passed[len(passed) - len(launch.sizes) :], launch.sizes, strict=True))
    types = pointers | {name: "i32" for name, size in sizes.items() if size not in (None, 1)}
    constants = {name: options[name] for name in launch.kernel.arg_names if name in options}
    constants |= {name: sizes.get(name) for name in passed if name not in types}
    return Variant(name, launch.kernel, types, constants, options["num_warps"])
