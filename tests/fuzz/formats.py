"""Number formats in numpy, from the table of docs/numerics.md: every code's value, and the nearest code of a value."""

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32 = np.float32
Array = NDArray[np.float32] | NDArray[np.float64]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LARGEST = {name: float(ml_dtypes.finfo(dtype).max) for name, dtype in DTYPES.items()}
NAN = 0x7F  # how both FP8 formats write a NaN


@dataclass(frozen=True)
class Format:
    """A sign, some exponent bits and some mantissa bits."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    emax: int

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """The value of every code."""
        codes = np.arange(1 << (1 + self.exponent_bits + self.mantissa_bits))
        sign = np.where(codes >> (self.exponent_bits + self.mantissa_bits), -1.0, 1.0)
        exponent = (codes >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        fraction = (codes & ((1 << self.mantissa_bits) - 1)) / (1 << self.mantissa_bits)
        bias = (1 << (self.exponent_bits - 1)) - 1
        values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
        if self.name == "E4M3":  # one NaN for each sign, no Inf
            values[codes & 0x7F == 0x7F] = np.nan
        if self.name == "E5M2":  # as IEEE has it
            values = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), values)
        return sign * values

    @cached_property
    def magnitudes(self) -> NDArray[np.float64]:
        """Finite values from zero up: the place of each is its code."""
        half = self.values[: len(self.values) // 2]
        return half[np.isfinite(half)]

    def encode(self, x: Array) -> NDArray[np.uint8]:
        """Nearest code, ties to the even one; what is larger than max, Inf too, becomes max. NaN as documented."""
        a = np.abs(x.astype(np.float64))
        middle = (self.magnitudes[1:] + self.magnitudes[:-1]) / 2
        code = np.searchsorted(middle, a, side="left")  # a tie falls to the code below
        tie = code < len(middle)
        tie &= a == middle[np.minimum(code, len(middle) - 1)]
        code = code + (tie & (code % 2 == 1))
        top = 1 << (self.exponent_bits + self.mantissa_bits)
        code = np.where(np.signbit(x), code + top, code)
        nan = 7 if self.name == "E2M1" else NAN
        return np.where(np.isnan(x), nan, code).astype(np.uint8)

    def decode(self, codes: NDArray[np.uint8]) -> NDArray[np.float64]:
        return self.values[codes]


E4M3 = Format("E4M3", 4, 3, 448.0, 8)
E5M2 = Format("E5M2", 5, 2, 57344.0, 15)
E2M1 = Format("E2M1", 2, 1, 6.0, 2)
FORMATS = {f.name: f for f in (E4M3, E5M2, E2M1)}


def decode_e8m0(byte: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.where(byte == 255, np.nan, np.exp2(byte.astype(np.float64) - 127))


def encode_e8m0(x: Array) -> NDArray[np.uint8]:
    """The smallest power of two that is not below x; 0 gives the smallest there is."""
    fraction, exponent = np.frexp(np.where(x > 0, x, 2.0**-127).astype(np.float64))  # x = fraction * 2^exponent
    byte = exponent - (fraction == 0.5) + 127
    return np.clip(byte, 0, 254).astype(np.uint8)


def power_of_two_below(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The power of two at or below each positive x; NaN stays."""
    exponent = np.frexp(x)[1]
    return np.where(np.isnan(x), x, np.ldexp(F32(1), exponent - 1)).astype(F32)


def rounded(x: Array, dtype: str) -> NDArray[np.float32]:
    """x in float32, then in the dtype, as float32 again."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(F32).astype(DTYPES[dtype]).astype(F32)


def last_place(x: NDArray[np.float32], dtype: str) -> NDArray[np.float64]:
    """The distance from |x| to the next larger value of the dtype."""
    info = ml_dtypes.finfo(DTYPES[dtype])
    a = np.abs(np.where(np.isfinite(x), x, 0)).astype(np.float64)
    exponent = np.frexp(np.maximum(a, float(info.smallest_normal)))[1] - 1
    return np.exp2(exponent.astype(np.float64) - info.nmant)
