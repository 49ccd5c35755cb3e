"""The permutation in plain torch: the definition. It reads nothing on the host either."""

import torch
from torch import Tensor

from octavo.kernels.permute import DROPPED, PAD, TAIL, Assignments, Sorted


def listed(mask: Tensor, index: Tensor) -> None:
    chosen, top_k = mask != 0, index.shape[1]
    assignment = chosen.cumsum(1) - 1
    experts = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device).expand(mask.shape)
    # the column behind the last assignment receives what has none
    wide = torch.full((index.shape[0], top_k + 1), -1, dtype=torch.int32, device=index.device)
    wide.scatter_(1, torch.where(chosen & (assignment < top_k), assignment, top_k), experts)
    index.copy_(wide[:, :top_k])


def sort(index: Tensor, align: int, made: Sorted) -> None:
    experts, rows = made.sizes.shape[0], made.assignments.shape[0]
    flat = index.reshape(-1).long()
    # experts out of range sort behind all others
    expert = torch.where((flat >= 0) & (flat < experts), flat, experts)
    # stable: tokens of an expert keep their order, as in the kernel
    ordered, order = expert.sort(stable=True)
    first = torch.searchsorted(ordered, torch.arange(experts + 1, device=flat.device, dtype=torch.int64))
    ends = ((first.diff() + align - 1) // align * align).cumsum(0)
    starts = torch.cat((ends.new_zeros(1), ends))  # the last is where the tail begins
    made.sizes.copy_(starts.clamp_max(rows).diff())
    row = starts[ordered] + torch.arange(flat.shape[0], device=flat.device, dtype=torch.int64) - first[ordered]
    # the row behind the last takes what is dropped
    row = torch.where((ordered < experts) & (row < rows), row, rows)
    positions = torch.empty_like(row).index_copy_(0, order, torch.where(row < rows, row, DROPPED))
    made.positions.copy_(positions.view(index.shape))
    at = torch.arange(
        rows + 1, device=flat.device, dtype=torch.int64
    )  # one more row, for the assignments that are dropped
    assignments = torch.where(at < starts[-1], PAD, TAIL)
    made.assignments.copy_(assignments.index_copy_(0, row, order)[:rows])


def scatter(
    x: Tensor, out: Tensor, assignments: Assignments, sources: Tensor, probs: Tensor | None, zero_tail: bool
) -> None:
    if x.shape[0] == 0 or assignments.positions.shape[1] == 0:
        out.zero_()
        return
    there = (sources >= 0)[:, None]
    token = sources.clamp_min(0) // assignments.positions.shape[1]
    value = x[token]
    if probs is not None:
        value = (value.float() * _of_rows(probs, assignments, sources).float()[:, None]).to(x.dtype)
    out.copy_(torch.where(there, value, 0))


def combine(rows: Tensor, y: Tensor, assignments: Assignments, probs: Tensor | None) -> None:
    # assignment after assignment in float32, the order of the kernel
    total = torch.zeros(y.shape, dtype=torch.float32, device=y.device)
    for k in range(assignments.positions.shape[1]):
        value = _rows_of(rows, assignments, k).float()
        if probs is None:
            total = total + value
        else:
            prob = probs.gather(1, _columns(assignments)[:, k : k + 1])[:, 0]
            prob = torch.where(assignments.positions[:, k] >= 0, prob, 0)  # that of a dropped assignment may be NaN
            total = _fused(value, prob.float()[:, None], total)
    y.copy_(total)


def combine_backward(
    dy: Tensor, rows: Tensor, assignments: Assignments, sources: Tensor, probs: Tensor, drows: Tensor | None,
    dprobs: Tensor,
    zero_tail: bool,
) -> None:  # fmt: skip
    if drows is not None:
        scatter(dy, drows, assignments, sources, probs, zero_tail)
    for k in range(assignments.positions.shape[1]):
        found = _rows_of(rows, assignments, k)
        sums = (dy.double() * found.double()).sum(1)
        there = assignments.positions[:, k] >= 0  # of an assignment without a row, even where dy is no number
        _write_dprobs(dprobs, assignments, k, torch.where(there, sums, 0).to(dprobs.dtype))


def take(probs: Tensor, out: Tensor, assignments: Assignments, sources: Tensor) -> None:
    if probs.numel() == 0:
        out.zero_()
        return
    out.copy_(torch.where(sources >= 0, _of_rows(probs, assignments, sources), 0))


def take_backward(grad: Tensor, dprobs: Tensor, assignments: Assignments) -> None:
    for k in range(assignments.positions.shape[1]):
        _write_dprobs(dprobs, assignments, k, _rows_of(grad[:, None], assignments, k)[:, 0])


def _columns(assignments: Assignments) -> Tensor:
    """Return, for each assignment, the column of its probability."""
    if assignments.experts is not None:
        return assignments.experts.clamp_min(0).long()
    tokens, top_k = assignments.positions.shape
    return torch.arange(top_k, device=assignments.positions.device, dtype=torch.int64).expand(tokens, top_k)


def _of_rows(probs: Tensor, assignments: Assignments, sources: Tensor) -> Tensor:
    return probs.gather(1, _columns(assignments)).reshape(-1)[sources.clamp_min(0)]


def _rows_of(rows: Tensor, assignments: Assignments, k: int) -> Tensor:
    """Return the row of each token's k-th assignment [T, D]; zeros for an assignment without one."""
    position = assignments.positions[:, k]
    if rows.shape[0] == 0:
        return rows.new_zeros(position.shape[0], rows.shape[1])
    return torch.where((position >= 0)[:, None], rows[position.clamp_min(0)], 0)


def _write_dprobs(dprobs: Tensor, assignments: Assignments, k: int, values: Tensor) -> None:
    """Write a value for each token, zero for one whose k-th assignment has no row."""
    if assignments.experts is None:
        dprobs[:, k] = values
    else:  # assignments that are left have no expert, and add zero to the first one
        dprobs.scatter_add_(1, _columns(assignments)[:, k : k + 1], values[:, None])


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a · b + c of float32, rounded once. The product is exact in float64. The sum is rounded to odd there,
    so that rounding it again to float32 gives what one rounding gives."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    # the error of the sum, exactly (two-sum): its sign says to which side to round
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(torch.int64)
    outwards = (error > 0) == (total > 0)
    odd = torch.where(
        (error != 0) & error.isfinite() & (bits & 1 == 0), torch.where(outwards, bits + 1, bits - 1), bits
    )
    return odd.view(torch.float64).float()
