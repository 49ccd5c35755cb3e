"""Tensorwise in plain torch. Its bits are the definition; `triton.py` matches them."""

import torch
from torch import Tensor

from octavo.quant import scale_blocks
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.reference_cast import casts, measures, put
from octavo.quant.scale import FLOAT32_MAX, Codes, codes_by_amax, codes_by_inverse_scale


@measures
def amax(x: Tensor, spec: Quantizer) -> Tensor:
    return scale_blocks.amax(x, spec.block)


@casts
def cast(x: Tensor, spec: Quantizer, amax: Tensor | None, cast_args: CastArgs, is_column: bool) -> Codes:
    running_amax = cast_args.running_amax
    if running_amax is not None:
        largest = scale_blocks.amax(x, spec.block).view_as(running_amax)
        if cast_args.skip is None:
            running_amax.copy_(torch.maximum(running_amax, largest))
        else:
            put(running_amax, torch.maximum(running_amax, largest), cast_args.skip)
    if cast_args.inverse_scale is None:
        return codes_by_amax(x, amax, spec, FLOAT32_MAX)
    return codes_by_inverse_scale(x, cast_args.inverse_scale.view(1, 1), spec.fmt)
