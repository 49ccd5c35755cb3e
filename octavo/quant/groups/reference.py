"""The layout of groups in plain torch. Reads nothing on the host either: the same operations run on any device."""

import torch
from torch import Tensor

from octavo.quant.groups import BLOCK, Groups


def split(splits: Tensor | None, each: int, groups: Groups) -> None:
    """Fill the tensors of `groups` from these sizes, or from the size `each` for all if `splits` is None."""
    start, block, owner, source, live, rows = groups
    if splits is None:  # all of one size
        splits = torch.full((start.shape[0] - 1,), each, device=start.device, dtype=torch.int64)
    ends = splits.long().clamp(0, rows).cumsum(0).clamp_max(rows)
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    last = ((ends - begins + BLOCK - 1) // BLOCK).cumsum(0)
    first = torch.cat((last.new_zeros(1), last[:-1]))
    start.copy_(torch.cat((begins[:1], ends)))
    block.copy_(torch.cat((first[:1], last)))
    b = torch.arange(owner.shape[0], device=splits.device, dtype=torch.int64)
    group = torch.searchsorted(last, b, right=True)
    used = group < splits.shape[0]
    group = group.clamp_max(splits.shape[0] - 1)
    at = begins[group] + (b - first[group]) * BLOCK
    owner.copy_(torch.where(used, group, -1))
    source.copy_(torch.where(used, at, 0))
    live.copy_(torch.where(used, (ends[group] - at).clamp_max(BLOCK), 0))


def in_blocks(x: Tensor, groups: Groups) -> Tensor:
    """Copy packed rows [rows, K] to the padded layout [padded, K], with zeros between. Do not read the tail."""
    at, live = places(groups)
    if groups.rows == 0:
        return x.new_zeros(groups.padded, x.shape[1])
    return torch.where(live[:, None], x[at.clamp_max(groups.rows - 1)], 0)


def gathered(x: Tensor, source: Tensor, groups: Groups) -> Tensor:
    """Copy rows of x [T, K] to packed rows [rows, K]: row r is x[source[r]], or zero if x has no row of that number.
    The tail is zero, whatever its entries of `source` are."""
    if x.shape[0] == 0:  # there is no row to read in place of a zero one
        return x.new_zeros(groups.rows, x.shape[1])
    tail = torch.arange(groups.rows, device=x.device, dtype=torch.int64) >= groups.start[-1]
    none = tail | (source < 0) | (source >= x.shape[0])
    return x.index_select(0, source.masked_fill(none, 0)).masked_fill_(none[:, None], 0)


def pack(x: Tensor, groups: Groups) -> Tensor:
    """Copy the padded layout back to packed rows, with a zero tail: the inverse of `in_blocks`."""
    at, live = places(groups)
    packed = x.new_zeros(groups.rows + 1, x.shape[1])  # padding goes to the last row, which is cut off
    return packed.index_copy_(0, torch.where(live, at, groups.rows), x)[: groups.rows]


def places(groups: Groups) -> tuple[Tensor, Tensor]:
    """Return, for each row of the padded layout, its packed row and whether it has one."""
    within = torch.arange(BLOCK, device=groups.owner.device, dtype=torch.int64)
    at = groups.source.long()[:, None] + within
    return at.view(-1), (within < groups.live[:, None]).view(-1)
