"""Rows in memory of other ranks: put them there, and get them from there.

Each rank has a matrix of rows, of the same width on all ranks, in memory that the others address. A place among the
rows of all ranks is one number, rank · HEIGHT + row; a negative one is no place. The host reads none of them. Rows are
moved as bytes, whatever their dtype is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo import backend

HEIGHT_BITS = 30
HEIGHT = 1 << HEIGHT_BITS  # no rank has as many rows
WORDS = {8: torch.int64, 4: torch.int32, 1: torch.uint8}  # by bytes


class Peers(NamedTuple):
    """Memory of each rank of a group, as this process addresses it."""

    memory: Sequence[Tensor]  # uint8, of each rank; it begins at a multiple of 16 bytes
    addresses: Tensor  # [ranks] int64, on the device: where the memory begins


def put(x: Tensor, source: Tensor | None, target: Tensor, peers: Peers) -> None:
    """Copy rows of x [T, D] to places [N], of which no two are alike. `source` [N] has the row of x for each place;
    None: the row of that number. It is not read where there is no place."""
    if x.numel() and target.numel():
        backend.implementation(__name__, x).put(_words(x.contiguous()), source, target, peers)


def get(out: Tensor, target: Tensor, peers: Peers) -> Tensor:
    """Copy the rows at places [N] to `out` [N, D], contiguous, and return it. Its rows without a place are left."""
    if out.numel():
        backend.implementation(__name__, out).get(_words(out), target, peers)
    return out


def _words(x: Tensor) -> Tensor:
    """Return rows as the widest words that they consist of."""
    rows = x.view(torch.uint8)
    begins = rows.data_ptr(), rows.storage_offset(), rows.shape[1]
    size = next(size for size in WORDS if not any(begin % size for begin in begins))
    return rows.view(WORDS[size])
