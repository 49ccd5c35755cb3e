"""The rule that FP8 schemes share to derive a block's inverse scale from its largest magnitude.

    a <- max(a, eps)
    s  = 1 if a is 0, Inf or NaN, else fp8_max / a          rounded to nearest, in float32
    s  = ceiling if that overflowed to Inf                   float32's max, or for 1x128 blocks the input dtype's
    s <- the power of two at or below it, if pow2            its mantissa bits cleared

The inverse scale s multiplies values into codes. The scale that multiplies codes back is 1/s, or NaN if a is not
finite: no inverse scale fits such a block, so all of it decodes to NaN. The Triton implementation is
`octavo.quant.tile.inverse_scale_from`.

A finite value that is too large saturates, also one whose product with s overflows. If the caller gives s, the scale
cannot mark a tensor that is not finite, so each code does: an Inf stays an Inf, or NaN if the format has no Inf.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import check_not_negative
from octavo.formats import E4M3, E5M2, Format, check_format
from octavo.quant import scale_blocks
from octavo.quant.quantizer import Quantizer

FLOAT32_MAX = torch.finfo(torch.float32).max


class FP8Quantizer(Quantizer):
    """Base class of the schemes that follow this rule, each with blocks of its own."""

    fmt: Format
    pow2: bool
    eps: float

    def validate(self) -> None:
        check_format(self.fmt, (E4M3, E5M2), what=f"{type(self).__name__}.fmt")
        check_not_negative(self.eps, what=f"{type(self).__name__}.eps")


class Codes(NamedTuple):
    """What the reference of a cast writes for one orientation of a matrix."""

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None = None


def divide(numerator: float, x: Tensor) -> Tensor:
    """Return numerator / x, rounded once. Python's `number / tensor` multiplies by the reciprocal and rounds twice."""
    return torch.full_like(x, numerator) / x


def inverse_scale_from(amax: Tensor, fmt_max: float, *, eps: float, ceiling: float, pow2: bool) -> Tensor:
    a = amax.clamp_min(eps)
    s = divide(fmt_max, a)
    s = torch.where(s.isinf(), ceiling, s)
    s = torch.where((a == 0) | a.isinf() | a.isnan(), 1.0, s)
    return (s.view(torch.int32) & 0x7F800000).view(torch.float32) if pow2 else s


def decode_scale(inverse_scale: Tensor, amax: Tensor | None = None) -> Tensor:
    """Return 1 / inverse scale; NaN where the amax behind it is not finite."""
    scale = divide(1.0, inverse_scale)
    return scale if amax is None else torch.where(amax.isfinite(), scale, float("nan"))


def saturated_codes(x: Tensor, inverse_scale: Tensor, fmt: Format) -> Tensor:
    """Return codes of x * inverse scale for a scale measured from x: Inf saturates, and its scale is NaN."""
    return fmt.encode((x.float() * inverse_scale).clamp(-fmt.max, fmt.max))


def codes_by_amax(x: Tensor, amax: Tensor | None, spec: Quantizer, ceiling: float) -> Codes:
    """Return the codes of x by scales from the amax of each block; None measures it."""
    assert isinstance(spec, FP8Quantizer)
    found = scale_blocks.amax(x, spec.block) if amax is None else amax
    inverse_scale = inverse_scale_from(found, spec.fmt.max, eps=spec.eps, ceiling=ceiling, pow2=spec.pow2)
    spread = scale_blocks.spread(inverse_scale, spec.block, *x.shape)
    return Codes(saturated_codes(x, spread, spec.fmt), decode_scale(inverse_scale, found))


def codes_by_inverse_scale(x: Tensor, inverse_scale: Tensor, fmt: Format) -> Codes:
    """Return the codes of x by a given inverse scale: finite values saturate, Inf and NaN stay visible."""
    wide = x.float()
    kept = torch.where(wide.isinf(), wide, (wide * inverse_scale).clamp(-fmt.max, fmt.max))
    return Codes(fmt.encode(kept), torch.ones_like(inverse_scale) / inverse_scale)
