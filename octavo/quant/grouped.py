"""A quantized matrix whose rows come in ragged groups."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedShape
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.groups.reference import pack
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Given, Quantizer, as_matrix, fill_pair


@dataclass(frozen=True, eq=False)
class GroupedTensor:
    """Codes and scales of rows in groups, inside their blocks of 128 (`octavo.quant.groups`).

    A row orientation has codes [padded, K], contracted over K; a column orientation has [K, padded], contracted over
    the rows of a group. A group's codes and scales are those that its rows alone would have; what no row stands for is
    zero within a group's last block and undefined past the last group."""

    q: QTensor
    groups: Groups
    side: str  # "row" or "column"

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Values [rows, K], packed; zero in the tail."""
        values = self.q.dequantize(dtype)
        return pack(values if self.side == "row" else values.T, self.groups)

    def members(self) -> list[QTensor]:
        """Each group's own QTensor, views of this one. Reads the sizes, which waits for the device."""
        sizes, firsts = self.groups.sizes(), self.groups.block[:-1].tolist()
        return [self._member(BLOCK * first, size) for first, size in zip(firsts, sizes, strict=True)]

    def _member(self, start: int, size: int) -> QTensor:
        q, rows = self.q, slice(start, start + size)
        if self.side == "row":
            height = q.spec.block[0] or 1
            return QTensor(q.codes[rows], q.scale[_blocks(rows, height)], q.spec, (size, q.columns), q.dtype)
        return QTensor(q.codes[:, rows], q.scale[:, _blocks(rows, BLOCK)], q.spec, (q.rows, size), q.dtype)


def _blocks(part: slice, length: int) -> slice:
    """The blocks that a range, which begins with one, has elements of."""
    return slice(part.start // length, -(-part.stop // length))


def quantize_groups(
    x: Tensor, row: Quantizer | None, column: Quantizer | None, groups: Groups
) -> tuple[GroupedTensor | None, GroupedTensor | None]:
    """The orientations that have a quantizer, each group by itself, from one read of x [rows, K]. The tail is never
    read: no amax sees it."""
    matrix = as_matrix(x)
    if matrix.shape[0] != groups.rows:
        raise UnsupportedShape(f"These groups are of {groups.rows} rows, tail included, and x has {matrix.shape[0]}.")
    if groups.start.device != x.device:
        raise UnsupportedDevice(f"x is on {x.device} and its groups on {groups.start.device}. Move the sizes first.")
    for spec in (row, column):
        if spec is not None and not spec.takes_groups:
            raise UnsupportedConfig(f"{spec} cannot quantize rows in groups in this version. Use fp8-block or bf16.")
    like = TensorProto((groups.padded, matrix.shape[1]), x.dtype, x.device)
    pair = (
        None if row is None else row.proto(like).empty(),
        None if column is None else column.proto(like, axis=0).empty(),
    )
    if groups.padded:
        fill_pair(matrix, pair, Given(groups=groups))
    return (
        None if pair[0] is None else GroupedTensor(pair[0], groups, "row"),
        None if pair[1] is None else GroupedTensor(pair[1], groups, "column"),
    )
