"""Block scaling in plain torch. Its bits are the definition; `triton.py` matches them."""

import torch
from torch import Tensor

from octavo.quant import scale, scale_blocks
from octavo.quant.block import _Blocks
from octavo.quant.maxima import amax as amax
from octavo.quant.per_group_reference import cast_each
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs
from octavo.quant.writing import write


@cast_each
def cast(x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs) -> None:
    for matrix, q, found in ((x, row, cast_args.amax[0]), (x.T, column, cast_args.amax[1])):
        if q is not None:
            spec = q.spec
            assert isinstance(spec, _Blocks)
            found = scale_blocks.amax(matrix, spec.block) if found is None else found
            # the ceiling is the input dtype's maximum, not float32's: numerics.md tells where that matters
            inverse_scale = scale.inverse_scale_from(
                found, spec.fmt.max, eps=spec.eps, ceiling=torch.finfo(x.dtype).max, pow2=spec.pow2
            )
            spread = scale_blocks.spread(inverse_scale, spec.block, *matrix.shape)
            codes = scale.saturated_codes(matrix, spread, spec.fmt)
            write(q, cast_args.skip, codes=codes, scale=scale.decode_scale(inverse_scale, found))
