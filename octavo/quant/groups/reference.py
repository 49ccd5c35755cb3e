"""The layout of groups in plain torch. Reads nothing back either: the same operations run on any device."""

import torch
from torch import Tensor

from octavo.quant.groups import BLOCK, Groups


def split(splits: Tensor | None, each: int, groups: Groups) -> None:
    """Fill the tensors of `groups`, which have these sizes, or `each` the same one."""
    start, block, owner, source, live, rows = groups
    if splits is None:  # all of one size
        splits = torch.full((start.shape[0] - 1,), each, device=start.device)
    ends = splits.long().clamp(0, rows).cumsum(0).clamp_max(rows)
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    last = ((ends - begins + BLOCK - 1) // BLOCK).cumsum(0)
    first = torch.cat((last.new_zeros(1), last[:-1]))
    start.copy_(torch.cat((begins[:1], ends)))
    block.copy_(torch.cat((first[:1], last)))
    b = torch.arange(owner.shape[0], device=splits.device)
    group = torch.searchsorted(last, b, right=True)
    used = group < splits.shape[0]
    group = group.clamp_max(splits.shape[0] - 1)
    at = begins[group] + (b - first[group]) * BLOCK
    owner.copy_(torch.where(used, group, -1))
    source.copy_(torch.where(used, at, 0))
    live.copy_(torch.where(used, (ends[group] - at).clamp_max(BLOCK), 0))


def in_blocks(x: Tensor, groups: Groups) -> Tensor:
    """Packed rows [rows, K] -> the same in blocks [padded, K], zeros between. The tail is not read."""
    at, live = _places(groups)
    if groups.rows == 0:
        return x.new_zeros(groups.padded, x.shape[1])
    return torch.where(live[:, None], x[at.clamp_max(groups.rows - 1)], 0)


def pack(x: Tensor, groups: Groups) -> Tensor:
    """The way back; the tail is zero."""
    at, live = _places(groups)
    packed = x.new_zeros(groups.rows + 1, x.shape[1])  # rows that are nobody's go to the last, which is cut off
    return packed.index_copy_(0, torch.where(live, at, groups.rows), x)[: groups.rows]


def _places(groups: Groups) -> tuple[Tensor, Tensor]:
    """For each row inside: its packed row, and whether it has one."""
    within = torch.arange(BLOCK, device=groups.owner.device)
    at = groups.source.long()[:, None] + within
    return at.view(-1), (within < groups.live[:, None]).view(-1)
