"""Rowwise in plain torch. Its bits are the definition; `triton.py` matches them."""

from torch import Tensor

from octavo.quant import scale
from octavo.quant.maxima import amax as amax
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Given
from octavo.quant.rowwise import Rowwise
from octavo.quant.writing import write


def cast(x: Tensor, row: QTensor | None, column: QTensor | None, given: Given) -> None:
    for matrix, q, found in ((x, row, given.amax[0]), (x.T, column, given.amax[1])):
        if q is not None:
            spec = q.spec
            assert isinstance(spec, Rowwise) and found is not None
            encode = scale.encode_scale(found, spec.fmt.max, eps=spec.eps, ceiling=scale.FLOAT32_MAX, pow2=spec.pow2)
            write(q, given.skip, codes=spec.fmt.encode(matrix.float() * encode), scale=scale.decode_scale(encode))
