"""Tensorwise in plain torch. Its bits are the definition; `triton.py` matches them."""

import torch
from torch import Tensor

from octavo.quant import scale, scale_blocks
from octavo.quant.per_group_reference import amax_each, cast_each
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.writing import put, write


@amax_each
def amax(x: Tensor, row: Quantizer | None, column: Quantizer | None, skip: Tensor | None) -> AmaxPair:
    found = scale_blocks.amax(x, (None, None))  # [1, 1]
    return (None if row is None else found), (None if column is None else found)


@cast_each
def cast(x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs) -> None:
    if cast_args.running_amax is not None:
        largest = scale_blocks.amax(x, (None, None)).view_as(cast_args.running_amax)
        put(cast_args.running_amax, torch.maximum(cast_args.running_amax, largest), cast_args.skip)
    if row is not None and column is not None and row.spec is column.spec and cast_args.amax[0] is cast_args.amax[1]:
        codes, undo = _cast(x, row.spec, cast_args.amax[0], cast_args.inverse_scale)
        write(row, cast_args.skip, codes=codes, scale=undo)
        write(column, cast_args.skip, codes=codes.T, scale=undo)  # one scale: the other orientation has the same codes
        return
    for matrix, q, found in ((x, row, cast_args.amax[0]), (x.T, column, cast_args.amax[1])):
        if q is not None:
            codes, undo = _cast(matrix, q.spec, found, cast_args.inverse_scale)
            write(q, cast_args.skip, codes=codes, scale=undo)


def _cast(x: Tensor, spec: Quantizer, amax: Tensor | None, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (codes, scale)."""
    if given is not None:
        inverse_scale = given.view(1, 1)
        return scale.given_codes(x, inverse_scale, spec.fmt), scale.decode_scale(inverse_scale)
    assert isinstance(spec, Tensorwise) and amax is not None
    inverse_scale = scale.inverse_scale_from(
        amax, spec.fmt.max, eps=spec.eps, ceiling=scale.FLOAT32_MAX, pow2=spec.pow2
    )
    return scale.saturated_codes(x, inverse_scale, spec.fmt), scale.decode_scale(inverse_scale, amax)
