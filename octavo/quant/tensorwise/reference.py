"""Tensorwise in plain torch. Its bits are the definition; `triton.py` matches them."""

import torch
from torch import Tensor

from octavo.quant import blocks, scale
from octavo.quant.per_group_reference import amax_each, cast_each
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.writing import put, write


@amax_each
def amax(x: Tensor, row: Quantizer | None, column: Quantizer | None, skip: Tensor | None) -> AmaxPair:
    found = blocks.amax(x, (None, None))  # [1, 1]
    return (None if row is None else found), (None if column is None else found)


@cast_each
def cast(x: Tensor, row: QTensor | None, column: QTensor | None, given: CastArgs) -> None:
    if given.observed is not None:
        largest = blocks.amax(x, (None, None)).view_as(given.observed)
        put(given.observed, torch.maximum(given.observed, largest), given.skip)
    if row is not None and column is not None and row.spec is column.spec and given.amax[0] is given.amax[1]:
        codes, undo = _cast(x, row.spec, given.amax[0], given.encode)
        write(row, given.skip, codes=codes, scale=undo)
        write(column, given.skip, codes=codes.T, scale=undo)  # one scale: the other orientation has the same codes
        return
    for matrix, q, found in ((x, row, given.amax[0]), (x.T, column, given.amax[1])):
        if q is not None:
            codes, undo = _cast(matrix, q.spec, found, given.encode)
            write(q, given.skip, codes=codes, scale=undo)


def _cast(x: Tensor, spec: Quantizer, amax: Tensor | None, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """(codes, scale)."""
    if given is not None:
        encode = given.view(1, 1)
        return scale.given_codes(x, encode, spec.fmt), scale.decode_scale(encode)
    assert isinstance(spec, Tensorwise) and amax is not None
    encode = scale.encode_scale(amax, spec.fmt.max, eps=spec.eps, ceiling=scale.FLOAT32_MAX, pow2=spec.pow2)
    return scale.saturated_codes(x, encode, spec.fmt), scale.decode_scale(encode, amax)
