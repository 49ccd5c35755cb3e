"""From a block's largest magnitude to the multiplier that fits it into a format: the rule FP8 schemes share.

    a <- max(a, eps)
    s  = 1 if a is 0, Inf or NaN, else fp8_max / a          rounded to nearest, in float32
    s  = ceiling if that overflowed to Inf                   float32's max, or for 1x128 blocks the input dtype's
    s <- the power of two at or below it, if pow2            its mantissa bits cleared

`encode` = s multiplies values into codes; the scale that multiplies codes back is 1/s. The Triton twin of this rule is
`octavo.quant.tile.encode_scale`.
"""

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max


def divide(numerator: float, x: Tensor) -> Tensor:
    """numerator / x, correctly rounded. Python's `number / tensor` is a product with the reciprocal: two roundings."""
    return torch.full_like(x, numerator) / x


def encode_scale(amax: Tensor, fmt_max: float, *, eps: float, ceiling: float, pow2: bool) -> Tensor:
    a = amax.clamp_min(eps)
    s = divide(fmt_max, a)
    s = torch.where(s.isinf(), ceiling, s)
    s = torch.where((a == 0) | a.isinf() | a.isnan(), 1.0, s)
    return clear_mantissa(s) if pow2 else s


def decode_scale(encode: Tensor) -> Tensor:
    return divide(1.0, encode)


def clear_mantissa(s: Tensor) -> Tensor:
    return (s.view(torch.int32) & 0x7F800000).view(torch.float32)
