"""Strides of an operand's scales, as kernels step through them: by group, by row and by block of the contraction.

    scale[group * s.group + row // height * s.row + block * s.block]

The padded rows of a ragged operand, and their blocks, are numbered through all groups, so that only one scale per group
has a stride for groups. Those of stacked matrices are numbered within each matrix.
"""

from typing import NamedTuple

from octavo.quant.grouped import GroupedTensor
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Quantizer


class Strides(NamedTuple):
    group: int
    row: int
    block: int


def whole(spec: Quantizer) -> bool:
    """Return whether a scale reaches over all of the contraction."""
    return spec.block[1] is None


def grouped_strides(a: GroupedTensor) -> Strides:
    """Return the strides for ragged groups: [padded, K], or [K, padded] contracted over the rows of a group."""
    down, across = a.q.scale.stride()
    if a.q.spec.block == (None, None):
        return Strides(1, 0, 0)
    if whole(a.q.spec):
        return Strides(0 if a.orientation == "row" else across, down, 0)
    return Strides(0, down, across)


def stacked_strides(b: QTensor, height: int, along: str) -> Strides:
    """Return the strides for stacked matrices, each of which begins `height` rows or columns after the previous."""
    down, across = b.scale.stride()
    if b.spec.block == (None, None):
        return Strides(1, 0, 0)
    if whole(b.spec):
        return Strides(height * down if along == "rows" else across, down, 0)
    r, c = b.spec.block
    assert r is not None and c is not None
    return Strides(height // r * down if along == "rows" else height // c * across, down, across)
