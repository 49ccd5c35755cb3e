"""Codes and scales of every scheme in numpy, from the tables of docs/numerics.md.

A value that is not finite: with a multiplier given beforehand it is coded alone, as E4M3's NaN, or in E5M2 as an Inf of
its sign or a NaN. With a scale measured from the data, a block whose amax is not finite has the scale NaN, and all that
shares the scale decodes to NaN. A finite value always saturates, also if its product with the multiplier overflows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.fuzz.formats import (
    E2M1,
    E4M3,
    F32,
    LARGEST,
    NAN,
    Format,
    decode_e8m0,
    encode_e8m0,
    power_of_two_below,
    rounded,
)

FLOAT32_MAX = LARGEST["float32"]
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], F32)


@dataclass(frozen=True)
class Scheme:
    """How an operand [rows, contraction] is quantized. `given` means that the multiplier comes from earlier steps."""

    kind: str  # tensorwise, rowwise, block, mx, nvfp4
    fmt: Format = E4M3
    given: bool = False
    pow2: bool = False
    square: bool = False  # 128x128, 32x32, 16x16 instead of one row
    rounding: str = "rceil"
    rht: bool = False
    stochastic: bool = False


@dataclass(frozen=True)
class Quantized:
    """Codes [rows, contraction], the scales of blocks as float64 of the same shape, and NVFP4's scale over all."""

    scheme: Scheme
    codes: NDArray[np.uint8]
    grid: NDArray  # as stored: float32, or bytes
    scale: NDArray[np.float64]
    over_all: np.float32 | None = None

    def values(self) -> NDArray[np.float64]:
        """Codes times block scales, without the scale over all."""
        with np.errstate(invalid="ignore"):
            return self.scheme.fmt.decode(self.codes) * self.scale

    def decoded(self, dtype: str) -> NDArray[np.float32]:
        """What the codes stand for in a dtype, saturated to its largest value."""
        with np.errstate(over="ignore", invalid="ignore"):
            total = self.values().astype(F32) * (F32(1) if self.over_all is None else self.over_all)
        return rounded(np.clip(total, -LARGEST[dtype], LARGEST[dtype]), dtype)


def quantize(
    scheme: Scheme,
    x: NDArray[np.float32],
    dtype: str,
    *,
    multiplier: float | None = None,
    seed: tuple[int, int] = (0, 0),
    stream: int = 0,
) -> Quantized:
    """x [rows, contraction] holds values of a dtype. `multiplier`: delayed scaling's; `seed`: (seed, step)."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        if scheme.kind == "nvfp4":
            return _nvfp4(scheme, x, seed, stream)
        if scheme.kind == "mx":
            return _mx(scheme, x)
        return _float32_scales(scheme, x, dtype, multiplier)


def _float32_scales(scheme: Scheme, x: NDArray[np.float32], dtype: str, multiplier: float | None) -> Quantized:
    block = {"tensorwise": (None, None), "rowwise": (1, None), "block": (128 if scheme.square else 1, 128)}[scheme.kind]
    if scheme.given:
        assert multiplier is not None
        inverse_scale = np.full((1, 1), multiplier, F32)
    else:
        a = block_amax(x, block)
        a = np.maximum(a, F32(1e-12)) if scheme.kind == "rowwise" else a
        inverse_scale = F32(scheme.fmt.max) / a
        ceiling = LARGEST[dtype] if scheme.kind == "block" else FLOAT32_MAX
        inverse_scale = np.where(np.isinf(inverse_scale) & (a > 0), F32(ceiling), inverse_scale)
        inverse_scale = np.where(a == 0, F32(1), inverse_scale)
        inverse_scale = power_of_two_below(inverse_scale) if scheme.pow2 else inverse_scale
        inverse_scale = np.where(np.isfinite(a), inverse_scale, F32(np.nan)).astype(F32)
    grid = (F32(1) / inverse_scale).astype(F32)
    codes = encode_elements(
        scheme.fmt, x, spread(np.where(np.isnan(inverse_scale), F32(1), inverse_scale), block, x.shape)
    )
    return Quantized(scheme, codes, grid, spread(grid, block, x.shape).astype(np.float64))


def _mx(scheme: Scheme, x: NDArray[np.float32]) -> Quantized:
    block = (32 if scheme.square else 1, 32)
    a = block_amax(x, block)
    finite = np.where(np.isfinite(a), a, F32(0))
    byte = np.where(np.isfinite(a), mx_byte(finite, scheme.fmt, scheme.rounding), 255).astype(np.uint8)
    inverse_scale = np.where(byte == 255, F32(1), np.exp2(127.0 - byte).astype(F32)).astype(F32)
    codes = encode_elements(scheme.fmt, x, spread(inverse_scale, block, x.shape))
    return Quantized(scheme, codes, byte, spread(decode_e8m0(byte), block, x.shape))


def mx_byte(a: NDArray[np.float32], fmt: Format, rounding: str) -> NDArray[np.uint8]:
    """The scale byte of a finite block maximum."""
    if rounding == "rceil":
        return encode_e8m0(a * F32(1 / fmt.max))
    if rounding == "even":  # up where its mantissa, rounded half up to the format's bits, carries
        half = 1 << (22 - fmt.mantissa_bits)
        a = (a.view(np.int32) + half).view(F32)
    exponent = (a.view(np.int32) >> 23) - 127  # a subnormal counts as 2^-127
    if rounding == "ceil":
        exponent = exponent + ((a.view(np.int32) & 0x7FFFFF) > 0)
    return np.clip(exponent - fmt.emax + 127, 0, 254).astype(np.uint8)


def _nvfp4(scheme: Scheme, x: NDArray[np.float32], seed: tuple[int, int], stream: int) -> Quantized:
    rows, columns = x.shape
    block = (16 if scheme.square else 1, 16)
    v = np.pad(x, ((0, 0), (0, -columns % 16)))
    v = turned(v) if scheme.rht else v
    g = np.abs(v).max(initial=F32(0)).astype(F32)
    top = F32(2688)
    s_enc, over_all = top / g, g / top
    if g == 0:
        s_enc, over_all = F32(1), F32(0)
    elif not np.isfinite(g):
        s_enc, over_all = F32(1), F32(np.nan)
    elif np.isinf(s_enc):
        s_enc = F32(FLOAT32_MAX)
        over_all = F32(1) / s_enc
    s_b = E4M3.encode(block_amax(v, block) * (s_enc * F32(1 / 6)))
    scale = E4M3.decode(s_b)
    inverse_scale = F32(1) / (scale.astype(F32) * (F32(1) / s_enc))
    inverse_scale = np.minimum(inverse_scale, F32(FLOAT32_MAX))
    scaled = v * spread(inverse_scale, block, v.shape)
    scaled = np.clip(scaled, F32(-6), F32(6))
    if scheme.stochastic:
        codes = round_stochastically(scaled, random_bytes(rows, v.shape[1] // 16, *seed, stream))
    else:
        codes = E2M1.encode(scaled)
    return Quantized(scheme, codes, s_b, spread(scale, block, v.shape), over_all)


def encode_elements(fmt: Format, x: NDArray[np.float32], inverse_scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes of x times its multipliers; an element that is not finite keeps to itself."""
    codes = fmt.encode(x * inverse_scale)
    if fmt.name == "E5M2":
        infinity = np.where(np.signbit(x), 0xFC, 0x7C)
        return np.where(np.isinf(x), infinity, np.where(np.isnan(x), NAN, codes)).astype(np.uint8)
    return np.where(np.isfinite(x), codes, NAN).astype(np.uint8)


# -- blocks ------------------------------------------------------------------------------------------------------------


def _sizes(shape: tuple[int, ...], block: tuple[int | None, int | None]) -> list[int]:
    return [max(length, 1) if b is None else b for length, b in zip(shape, block, strict=True)]


def block_amax(x: NDArray[np.float32], block: tuple[int | None, int | None]) -> NDArray[np.float32]:
    """The largest magnitude of every block; a NaN in it wins. One grid entry along a dim that is not cut."""
    height, width = _sizes(x.shape, block)
    whole = [1 if b is None else -(-n // b) for n, b in zip(x.shape, block, strict=True)]
    padded = np.pad(np.abs(x), ((0, whole[0] * height - x.shape[0]), (0, whole[1] * width - x.shape[1])))
    return padded.reshape(whole[0], height, whole[1], width).max(axis=(1, 3)) if padded.size else np.zeros(whole, F32)


def spread(grid: NDArray, block: tuple[int | None, int | None], shape: tuple[int, ...]) -> NDArray:
    """Each block's entry at each of its elements."""
    height, width = _sizes(shape, block)
    return np.repeat(np.repeat(grid, height, 0), width, 1)[: shape[0], : shape[1]]


# -- NVFP4's options ---------------------------------------------------------------------------------------------------


def turned(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Every 16 of a row times diag(signs) · H/4, sums and differences in float32, rounded to bfloat16."""
    v = x.reshape(x.shape[0], x.shape[1] // 16, 16) * SIGNS
    for distance in (1, 2, 4, 8):
        partner = np.arange(16) ^ distance
        v = np.where(np.arange(16) & distance, v[..., partner] - v, v + v[..., partner])
    return rounded((v * F32(0.25)).reshape(x.shape), "bfloat16")


def round_stochastically(x: NDArray[np.float32], r: NDArray[np.int64]) -> NDArray[np.uint8]:
    """t = |x| + (r/256)·step(|x|) in float32, rounded down to its own step."""

    def step(a: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.where(a < 2, F32(0.5), np.where(a < 4, F32(1), F32(2)))

    a = np.abs(x)
    t = a + r.astype(F32) * (step(a) * F32(1 / 256))
    down = np.minimum(np.floor(t / step(t)) * step(t), F32(6))
    return E2M1.encode(np.where(np.isnan(x), x, np.copysign(down, x)))


def random_bytes(rows: int, row_blocks: int, seed: int, step: int, stream: int) -> NDArray[np.int64]:
    """A byte for every element: Philox4x32-10 of (block index, step, stream) under the key `seed`."""
    index = np.arange(rows * row_blocks, dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    c = [index & low, index >> np.uint64(32), np.full_like(index, step) & low, np.full_like(index, stream)]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)]
    for _ in range(10):
        one, two = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(two >> np.uint64(32)) ^ c[1] ^ key[0], two & low, (one >> np.uint64(32)) ^ c[3] ^ key[1], one & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    words = np.stack(c, -1).astype("<u4")  # [blocks, 4]; their bytes in order are those of the block's elements
    return np.ascontiguousarray(words).view(np.uint8).reshape(rows, row_blocks * 16).astype(np.int64)
