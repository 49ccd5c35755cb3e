"""The rule that FP8 schemes share to derive a block's inverse scale from its largest magnitude.

    a <- max(a, eps)
    s  = 1 if a is 0, Inf or NaN, else fp8_max / a          rounded to nearest, in float32
    s  = ceiling if that overflowed to Inf                   float32's max, or for 1x128 blocks the input dtype's
    s <- the power of two at or below it, if pow2            its mantissa bits cleared

`encode` = s multiplies values into codes; the scale that multiplies codes back is 1/s, or NaN if a is not finite: no
inverse scale fits such a block, so all of it decodes to NaN. The Triton implementation is
`octavo.quant.tile.inverse_scale_from`.

A finite value that is too large saturates, also one whose product with s overflows. If the caller gives s, the scale
cannot mark a tensor that is not finite, so each code does: an Inf stays an Inf, or NaN if the format has no Inf.
"""

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.quant.scale_blocks import no_larger

FLOAT32_MAX = torch.finfo(torch.float32).max


def divide(numerator: float, x: Tensor) -> Tensor:
    """Returns numerator / x, rounded once. Python's `number / tensor` multiplies by the reciprocal and rounds twice."""
    return torch.full_like(x, numerator) / x


def inverse_scale_from(amax: Tensor, fmt_max: float, *, eps: float, ceiling: float, pow2: bool) -> Tensor:
    a = amax.clamp_min(eps)
    s = divide(fmt_max, a)
    s = torch.where(s.isinf(), ceiling, s)
    s = torch.where((a == 0) | a.isinf() | a.isnan(), 1.0, s)
    return clear_mantissa(s) if pow2 else s


def decode_scale(inverse_scale: Tensor, amax: Tensor | None = None) -> Tensor:
    """Returns 1 / encode; NaN where the amax behind it is not finite."""
    scale = divide(1.0, inverse_scale)
    return scale if amax is None else torch.where(amax.isfinite(), scale, float("nan"))


def saturated_codes(x: Tensor, inverse_scale: Tensor, fmt: Format) -> Tensor:
    """Returns codes of x * encode for a scale measured from x: Inf saturates, and its scale is NaN."""
    return fmt.encode(no_larger(x.float() * inverse_scale, fmt.max))


def given_codes(x: Tensor, inverse_scale: Tensor, fmt: Format) -> Tensor:
    """Returns codes of x * encode for a given inverse scale: finite values saturate, Inf and NaN stay visible."""
    wide = x.float()
    return fmt.encode(torch.where(wide.isinf(), wide, no_larger(wide * inverse_scale, fmt.max)))


def clear_mantissa(s: Tensor) -> Tensor:
    return (s.view(torch.int32) & 0x7F800000).view(torch.float32)
