"""Block scaling in plain torch. Its bits are the definition; `triton.py` matches them."""

import torch
from torch import Tensor

from octavo.quant.maxima import amax as amax
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.reference_cast import casts
from octavo.quant.scale import Codes, codes_by_amax


@casts
def cast(x: Tensor, spec: Quantizer, amax: Tensor | None, cast_args: CastArgs, is_column: bool) -> Codes:
    # the ceiling is the input dtype's maximum, not float32's: numerics.md tells where that matters
    return codes_by_amax(x, amax, spec, torch.finfo(x.dtype).max)
