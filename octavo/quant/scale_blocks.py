"""Blocks of a matrix: the grid they make, their largest magnitude, and a value per block spread back over elements.

A block is (rows, columns); None stands for the whole dim. Blocks at the edge are cut off: elements beyond the matrix
count as zero and are never read.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Block = tuple[int | None, int | None]


def ceil_div(n: int, d: int) -> int:
    return -(-n // d)


def grid(rows: int, columns: int, block: Block, groups: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """Return the blocks per dim of a [rows, columns] matrix. A whole dim is one block, even of no elements, or as many
    as the dim has groups."""
    r, c = block
    return (groups[0] if r is None else -(-rows // r)), (groups[1] if c is None else -(-columns // c))


def amax(x: Tensor, block: Block) -> Tensor:
    """Return the largest magnitude of each block, float32 [block rows, block columns]; 0 if empty; NaN wins."""
    m, k = x.shape
    r, c = block[0] or max(m, 1), block[1] or max(k, 1)
    gm, gk = (1 if block[0] is None else -(-m // r)), (1 if block[1] is None else -(-k // c))
    padded = F.pad(x.float().abs(), (0, gk * c - k, 0, gm * r - m))
    return padded.view(gm, r, gk, c).amax((1, 3))


def spread(values: Tensor, block: Block, rows: int, columns: int) -> Tensor:
    """Repeat a value per block over its elements: to a shape that broadcasts to [rows, columns]."""
    r, c = block
    if r not in (None, 1):
        values = values.repeat_interleave(r, 0)[:rows]
    if c not in (None, 1):
        values = values.repeat_interleave(c, 1)[:, :columns]
    return values


def is_square(block: Block) -> bool:
    return block[0] == block[1]


def are_transposed(row: Any, column: Any) -> bool:
    """Return whether column codes are row codes transposed, byte for byte: one quantizer with square blocks, and no
    rotation along the contraction."""
    return row is not None and row == column and is_square(row.block) and row.basis == ""


def pad_columns(x: Tensor, multiple: int) -> Tensor:
    """Append zero columns up to a multiple."""
    missing = -x.shape[1] % multiple
    return F.pad(x, (0, missing)) if missing else x


def no_larger(x: Tensor, limit: float) -> Tensor:
    """Clamp to ±limit; NaN passes through."""
    return torch.clamp(x, -limit, limit)
