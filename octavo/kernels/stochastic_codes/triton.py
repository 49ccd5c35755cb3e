"""Stochastic rounding to E4M3 on the GPU: one read of the values, one write of the codes."""

# mypy: allow-untyped-defs, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from octavo.launch import Launch
from octavo.quant import tile
from octavo.quant.tile import Config

CONFIGS = (Config(16, 128, 4), Config(8, 256, 4))
_MAX: tl.constexpr = tl.constexpr(448.0)
_NORMAL: tl.constexpr = tl.constexpr(2.0**-6)


@triton.jit
def noise_of(seed, index, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return 16 random bits for each element of [ROWS, COLUMNS]: one draw of Philox, at index [ROWS, COLUMNS / 8],
    serves eight neighbours."""
    zero = (index & 0).to(tl.uint32)
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed), low, high, zero + tl.load(seed + 1).to(tl.uint32), zero)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, COLUMNS))


@triton.jit
def _stochastic_codes_kernel(
    values, scale, codes, seed, M, K, STRIDE, ACROSS, TALL, WIDE, FIRST, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    pm, pk = tile.tile_index(K, COLUMNS)
    rows, columns = pm.to(tl.int64) * ROWS + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    live = (rows < M)[:, None] & (columns < K)[None, :]
    v = tl.load(values + rows[:, None] * K + columns[None, :], mask=live, other=0.0)
    s = tl.load(scale + (rows // TALL)[:, None] * ACROSS + (columns // WIDE)[None, :], mask=live, other=1.0)
    # a block of zeros has scale zero
    x = tl.where(s > 0, tl.div_rn(v, s), 0.0)
    eighths = pk * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    # by the element's place in the whole weight: groups and tiles draw what one pass over it would
    noise = noise_of(seed, (rows + FIRST)[:, None] * tl.cdiv(K, 8) + eighths[None, :], ROWS, COLUMNS)
    size = tl.abs(x)
    bits = size.to(tl.uint32, bitcast=True)
    # 20 bits of a float32's mantissa are below E4M3's: a carry out of them rounds up
    normal = ((bits + (noise << 4)) & 0xFFF00000).to(tl.float32, bitcast=True)
    # subnormal codes are multiples of 2^-9, as far apart as each other
    small = tl.floor(size * 512 + noise.to(tl.float32) * (1.0 / 65536)) * (1.0 / 512)
    rounded = tl.where(size < _NORMAL, small, normal)
    rounded = tl.where(rounded > _MAX, _MAX, rounded)
    # not -rounded, which Triton computes as 0 - rounded: zero would lose its sign
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    found = (rounded.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    found = found.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    # the cast before has written the code of what is not finite
    finite = bits < 0x7F800000
    tl.store(codes + rows[:, None] * STRIDE + columns[None, :], found, mask=live & finite)


def stochastic_codes(
    values: Tensor, scale: Tensor, block: tuple[int, int], codes: Tensor, seed: Tensor, first: int,
    config: Config = CONFIGS[0],
) -> None:  # fmt: skip
    sizes = codes.stride(0), scale.shape[1], *block, first
    _launch(tuple(values.shape), sizes, config)(values, scale, codes, seed)


@lru_cache(maxsize=4096)
def _launch(shape: tuple[int, int], sizes: tuple[int, ...], config: Config) -> Launch:
    return tile.launch(_stochastic_codes_kernel, shape, sizes, config)
