"""The amax of schemes whose every scale follows from its own block, in plain torch on any device."""

from torch import Tensor

from octavo.quant import scale_blocks
from octavo.quant.groups import Groups
from octavo.quant.groups.reference import in_blocks
from octavo.quant.quantizer import AmaxPair, Quantizer


def amax(
    x: Tensor, row: Quantizer | None, column: Quantizer | None, skip: Tensor | None, groups: Groups | None = None
) -> AmaxPair:
    """Return the largest magnitude of each block, in each orientation that has a quantizer."""
    x = x if groups is None else in_blocks(x, groups)
    return (
        None if row is None else scale_blocks.amax(x, row.block),
        None if column is None else scale_blocks.amax(x.T, column.block),
    )
