"""The sort of tokens by the ranks of their experts: `sort_by_rank`."""

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, check_whole
from octavo.moe.permutation import Permutation, check_capacity, sort


def sort_by_rank(index: Tensor, num_experts: int, ranks: int, capacity: int) -> Permutation:
    """Sort the assignments of tokens by the rank of their expert, and on a rank by expert, into a fixed number of rows
    for each rank. Experts are on the ranks in their order, equally many on each.

    `permute(x, permutation)` then makes equal parts for an all-to-all. Reads nothing on the host.

    Args:
        index: the experts of each token [..., K], int32 or int64; entries of no expert are dropped.
        num_experts: the number of experts of all ranks.
        ranks: the number of ranks, which divides `num_experts`.
        capacity: the number of rows for each rank. Assignments beyond are dropped, from the last expert of the rank on.

    Returns:
        A permutation [ranks · capacity]: the rows of rank p begin at p · capacity, and those that no assignment has are
        pads. Its sizes are the rows in use of each expert, pads not included: they are for the rank of the expert, not
        for a `octavo.GroupedLinear` here.

    Raises:
        UnsupportedConfig: `ranks` does not divide `num_experts`, or `capacity` is negative.
        UnsupportedDtype: the index has another dtype.

    Example:
        >>> permutation = octavo.moe.sort_by_rank(torch.tensor([[0, 3], [1, 2], [1, 3]]), 4, ranks=2, capacity=4)
        >>> permutation.sources, permutation.sizes
        (tensor([ 0,  1,  2, -1,  1,  0,  2, -1], dtype=torch.int32), tensor([1, 2, 1, 2]))
    """
    check_whole(ranks, what="ranks")
    check_capacity(capacity)
    if num_experts % ranks:
        raise UnsupportedConfig(
            f"Each rank has equally many experts, and {num_experts} do not divide by {ranks} ranks. Add experts."
        )
    local = num_experts // ranks
    made = sort(index, num_experts)
    ends = made.sizes.view(ranks, local).cumsum(1)
    kept = ends.clamp_max(capacity)
    begins = ends[:, -1].cumsum(0) - ends[:, -1]
    row = torch.arange(ranks * capacity, device=index.device, dtype=torch.int64)
    is_zero = isinstance(capacity, int) and capacity == 0
    rank = row if is_zero else torch.div(row, capacity, rounding_mode="floor")
    within = row - rank * capacity
    none = made.assignments.new_full((1,), -1)
    found = torch.cat([made.assignments, none])[(begins[rank] + within).clamp_max(made.assignments.shape[0])]
    assignments = torch.where(within < kept[rank, -1], found, none)
    owner = torch.div(index, local, rounding_mode="floor").clamp(0, ranks - 1).long()
    place = made.positions - begins[owner]
    there = (made.positions >= 0) & (place < capacity)
    positions = torch.where(there, owner * capacity + place, -1).to(torch.int32)
    sizes = torch.diff(kept, prepend=kept.new_zeros(ranks, 1)).flatten()
    return Permutation(sizes, positions, assignments)
