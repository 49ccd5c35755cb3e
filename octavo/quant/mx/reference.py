"""MX in plain torch. Its bits are the definition; `triton.py` matches them."""

import torch
from torch import Tensor

from octavo.formats import E8M0, E8M0_NAN, Format
from octavo.quant import scale_blocks
from octavo.quant.maxima import amax as amax
from octavo.quant.mx import MANTISSA_BITS, MX
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.reference_cast import casts
from octavo.quant.scale import Codes, saturated_codes


def scale_byte(amax: Tensor, fmt: Format, rounding: str) -> Tensor:
    """Return the E8M0 byte, as uint8, of a block whose largest magnitude is amax (float32)."""
    if rounding == "rceil":
        # the product with the rounded reciprocal equals exact division for every bfloat16 amax
        return E8M0.encode(amax * (1 / fmt.max))
    return _shifted_exponent(amax, fmt, rounding)


def _shifted_exponent(amax: Tensor, fmt: Format, rounding: str) -> Tensor:
    bits = amax.view(torch.int32)
    if rounding == "even":
        bits = bits + (1 << (22 - MANTISSA_BITS[fmt.name]))  # half of the last kept mantissa bit
    exponent = bits >> 23
    if rounding == "ceil":
        exponent = exponent + ((bits & 0x7FFFFF) > 0)
    byte = (exponent - fmt.emax).clamp(0, 254)
    return torch.where(amax.isfinite(), byte, E8M0_NAN).to(torch.uint8)


def inverse_scale_of(byte: Tensor) -> Tensor:
    """Return 2^(127-b), exactly: the decoding of 254-b. For b = 254 it is a float32 subnormal, for 255 NaN."""
    return E8M0.decode(torch.where(byte == E8M0_NAN, E8M0_NAN, 254 - byte.to(torch.int32)).to(torch.uint8))


@casts
def cast(x: Tensor, spec: Quantizer, amax: Tensor | None, cast_args: CastArgs, is_column: bool) -> Codes:
    assert isinstance(spec, MX)
    byte = scale_byte(scale_blocks.amax(x, spec.block) if amax is None else amax, spec.fmt, spec.rounding)
    spread = scale_blocks.spread(inverse_scale_of(byte), spec.block, *x.shape)
    return Codes(saturated_codes(x, spread, spec.fmt), byte)
