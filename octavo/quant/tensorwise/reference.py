"""Tensorwise in plain torch. Its bits are the definition; `triton.py` matches them."""

import torch
from torch import Tensor

from octavo.quant import blocks, scale
from octavo.quant.alone import amax_each, cast_each
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Given, Pair, Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.writing import put, write


@amax_each
def amax(x: Tensor, row: Quantizer | None, column: Quantizer | None, skip: Tensor | None) -> Pair:
    found = blocks.amax(x, (None, None))  # [1, 1]
    return (None if row is None else found), (None if column is None else found)


@cast_each
def cast(x: Tensor, row: QTensor | None, column: QTensor | None, given: Given) -> None:
    if given.observed is not None:
        largest = blocks.amax(x, (None, None)).view_as(given.observed)
        put(given.observed, torch.maximum(given.observed, largest), given.skip)
    for matrix, q, found in ((x, row, given.amax[0]), (x.T, column, given.amax[1])):
        if q is not None:
            encode = _encode(q.spec, found, given.encode)
            write(q, given.skip, codes=q.spec.fmt.encode(matrix.float() * encode), scale=scale.decode_scale(encode))


def _encode(spec: Quantizer, amax: Tensor | None, given: Tensor | None) -> Tensor:
    if given is not None:
        return given.view(1, 1)
    assert isinstance(spec, Tensorwise) and amax is not None
    return scale.encode_scale(amax, spec.fmt.max, eps=spec.eps, ceiling=scale.FLOAT32_MAX, pow2=spec.pow2)
