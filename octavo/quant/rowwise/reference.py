"""Rowwise in plain torch. Its bits are the definition; `triton.py` matches them."""

from torch import Tensor

from octavo.quant import scale_blocks
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.reference_cast import casts, measures
from octavo.quant.scale import FLOAT32_MAX, Codes, codes_by_amax


@measures
def amax(x: Tensor, spec: Quantizer) -> Tensor:
    return scale_blocks.amax(x, spec.block)


@casts
def cast(x: Tensor, spec: Quantizer, amax: Tensor | None, cast_args: CastArgs, is_column: bool) -> Codes:
    return codes_by_amax(x, amax, spec, FLOAT32_MAX)
