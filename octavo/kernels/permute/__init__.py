"""Move rows to their experts and back: a stable counting sort, a scatter of rows, a weighted sum, and their gradients.

A token has K assignments, and each assignment names an expert. The sort gives each assignment a row of the permuted
matrix: rows of expert 0 first, and inside an expert in the order of the assignments. Nothing depends on values on the
host, and no sum on the order in which programs run. The tensors of a sort:

    positions    [T, K]  the row of each assignment; DROPPED for an assignment without one
    assignments  [C]     the assignment, t · K + k, that each row comes from; PAD for a row that fills up its expert to
                         a multiple of `align`, TAIL for a row after the last expert
    sizes        [E]     the number of rows of each expert, pads included

C is fixed. Assignments whose row would lie beyond it are dropped. Probabilities are [T, W]: one for each assignment, W
= K, or one for each expert, W = E, where `experts` [T, K] has the expert of each assignment.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo import backend

DROPPED, PAD, TAIL = -1, -1, -2
MAX_EXPERTS = 4096


class Sorted(NamedTuple):
    """The rows of the assignments, and the assignments of the rows."""

    sizes: Tensor  # [E] int64
    positions: Tensor  # [T, K] int32
    assignments: Tensor  # [C] int32


class Assignments(NamedTuple):
    """The row of each assignment, and the place of its probability."""

    positions: Tensor  # [T, K]
    experts: Tensor | None = None  # [T, K] int32; None: probabilities are [T, K] themselves


def most_rows(assignments: int, experts: int, align: int) -> int:
    """Return the most rows that `assignments` assignments can fill, whatever their experts are."""
    return assignments if align == 1 else (assignments + experts * (align - 1)) // align * align


def tokens(assignments: Tensor, positions: Tensor) -> Tensor:
    """Return the token that each row comes from [C], int32, negative for a row without one."""
    return torch.div(assignments, positions.shape[-1], rounding_mode="floor")


def listed(mask: Tensor, top_k: int) -> Tensor:
    """Return the experts of each token [T, K], int32, in ascending order, from a mask [T, E]. -1 fills assignments
    that are left; experts beyond the first K are left out."""
    index = torch.empty(mask.shape[0], top_k, dtype=torch.int32, device=mask.device)
    if index.numel():
        backend.implementation(__name__, mask).listed(mask.contiguous().view(torch.uint8), index)
    return index


def sort(index: Tensor, experts: int, rows: int, align: int) -> Sorted:
    """Sort the assignments of `index` [T, K] by expert into `rows` rows. Assignments with an expert out of range are
    dropped."""
    made = Sorted(
        torch.empty(experts, dtype=torch.int64, device=index.device),
        torch.empty(index.shape, dtype=torch.int32, device=index.device),
        torch.empty(rows, dtype=torch.int32, device=index.device),
    )
    backend.implementation(__name__, index).sort(index.contiguous(), align, made)
    return made


def scatter(x: Tensor, positions: Tensor, assignments: Tensor, zero_tail: bool) -> Tensor:
    """Copy x [T, D], in any dtype of at most four bytes, to the rows of its assignments [C, D]. Pads are zeros; so is
    the tail with `zero_tail`, otherwise it is left as the memory was."""
    out = torch.empty(assignments.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        moved, into = (x.view(torch.uint8), out.view(torch.uint8)) if x.element_size() == 1 else (x, out)
        backend.implementation(__name__, x).scatter(moved, into, Assignments(positions), assignments, None, zero_tail)
    return out


def combine(rows: Tensor, assignments: Assignments, probs: Tensor | None) -> Tensor:
    """Sum the rows [C, D] of each token's assignments to y [T, D], each multiplied by its probability if there are
    any: in float32, assignment after assignment, one rounding for a product and its sum. Reads no other row."""
    y = torch.empty(assignments.positions.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
    if y.numel():
        backend.implementation(__name__, rows).combine(rows, y, assignments, probs)
    return y


def combine_backward(
    dy: Tensor, rows: Tensor | None, assignments: Assignments, sources: Tensor, probs: Tensor | None, zero_tail: bool,
    wants_rows: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of `combine`: of the rows, p · dy rounded once, and, if `rows` are given, of the
    probabilities, ⟨dy, row⟩, summed in float32 on a GPU and in float64 on the reference. An assignment without a row
    has the gradient zero. `sources` has the assignment of each row."""
    drows = torch.empty(sources.shape[0], dy.shape[1], dtype=dy.dtype, device=dy.device) if wants_rows else None
    implementation = backend.implementation(__name__, dy)
    if rows is None or probs is None:
        if drows is not None and drows.numel():
            implementation.scatter(dy, drows, assignments, sources, probs, zero_tail)
        return drows, None
    dprobs = _empty_probs(probs.shape, probs.dtype, assignments)
    if dprobs.numel() or (drows is not None and drows.numel()):
        implementation.combine_backward(dy, rows, assignments, sources, probs, drows, dprobs, zero_tail)
    return drows, dprobs


def take(probs: Tensor, assignments: Assignments, sources: Tensor) -> Tensor:
    """Return the probability of each row's assignment [C]; zero for a row without one."""
    out = torch.empty(sources.shape[0], dtype=probs.dtype, device=probs.device)
    if out.numel():
        backend.implementation(__name__, probs).take(probs.contiguous(), out, assignments, sources)
    return out


def take_backward(grad: Tensor, assignments: Assignments, shape: tuple[int, ...]) -> Tensor:
    """Return the gradient of `take` in the probabilities' shape [T, W]. Reads no row that has no assignment."""
    dprobs = _empty_probs(shape, grad.dtype, assignments)
    if dprobs.numel():
        backend.implementation(__name__, grad).take_backward(grad.contiguous(), dprobs, assignments)
    return dprobs


def _empty_probs(shape: tuple[int, ...], dtype: torch.dtype, assignments: Assignments) -> Tensor:
    """Allocate gradients of probabilities. Kernels write one for each assignment, so those of other experts are
    zeroed."""
    make = torch.empty if assignments.experts is None else torch.zeros
    return make(shape, dtype=dtype, device=assignments.positions.device)
