"""Rowwise in plain torch. Its bits are the definition; `triton.py` matches them."""

from torch import Tensor

from octavo.quant import maxima, scale
from octavo.quant.per_group_reference import amax_each, cast_each
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs
from octavo.quant.rowwise import Rowwise
from octavo.quant.writing import write

amax = amax_each(maxima.amax)


@cast_each
def cast(x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs) -> None:
    for matrix, q, found in ((x, row, cast_args.amax[0]), (x.T, column, cast_args.amax[1])):
        if q is not None:
            spec = q.spec
            assert isinstance(spec, Rowwise) and found is not None
            inverse_scale = scale.inverse_scale_from(
                found, spec.fmt.max, eps=spec.eps, ceiling=scale.FLOAT32_MAX, pow2=spec.pow2
            )
            codes = scale.saturated_codes(matrix, inverse_scale, spec.fmt)
            write(q, cast_args.skip, codes=codes, scale=scale.decode_scale(inverse_scale, found))
