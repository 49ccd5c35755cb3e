"""Where the scales of an operand lie, as kernels step through them: by group, by row and by block of the contraction.

    scale[group * s.group + row // height * s.row + block * s.block]

A ragged operand's padded rows, and blocks of them, are counted through all groups, so that only a scale which is the
group's alone has a stride for groups. Stacked matrices' are counted within each.
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
    """Whether a scale reaches over all of the contraction."""
    return spec.block[1] is None


def grouped_strides(a: GroupedTensor) -> Strides:
    """Of an operand in ragged groups: [padded, K], or [K, padded] contracted over the rows of a group."""
    down, across = a.q.scale.stride()
    if a.q.spec.block == (None, None):
        return Strides(1, 0, 0)
    if whole(a.q.spec):
        return Strides(0 if a.orientation == "row" else across, down, 0)
    return Strides(0, down, across)


def stacked_strides(b: QTensor, height: int, along: str) -> Strides:
    """Of matrices that begin `height` rows or columns after each other."""
    down, across = b.scale.stride()
    if b.spec.block == (None, None):
        return Strides(1, 0, 0)
    if whole(b.spec):
        return Strides(height * down if along == "rows" else across, down, 0)
    r, c = b.spec.block
    assert r is not None and c is not None
    return Strides(height // r * down if along == "rows" else height // c * across, down, across)
