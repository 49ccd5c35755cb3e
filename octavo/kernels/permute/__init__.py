"""Moves rows to their experts and back: a stable counting sort, a scatter of rows, a weighted sum, and their gradients.

A token has K slots, and each slot names an expert. The sort gives each slot a row of the permuted matrix: rows of
expert 0 first, and inside an expert in the order of the slots. Nothing depends on values on the host, and no sum on the
order in which programs run. The tensors of a sort:

    positions  [T, K]  the row of each slot; DROPPED for a slot without one
    slots      [C]     the slot, t · K + k, that each row comes from; PAD for a row that fills up its expert to a
                       multiple of `align`, TAIL for a row after the last expert
    sizes      [E]     the number of rows of each expert, pads included

C is fixed. Slots whose row would lie beyond it are dropped. Probabilities are [T, W]: one for each slot, W = K, or one
for each expert, W = E, where `experts` [T, K] has the expert of each slot.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo import backend

DROPPED, PAD, TAIL = -1, -1, -2
MAX_EXPERTS = 4096


class Sorted(NamedTuple):
    """The rows of the slots, and the slots of the rows."""

    sizes: Tensor  # [E] int64
    positions: Tensor  # [T, K] int32
    slots: Tensor  # [C] int32


class Slots(NamedTuple):
    """The row of each slot, and the place of its probability."""

    positions: Tensor  # [T, K]
    experts: Tensor | None = None  # [T, K] int32; None: probabilities are [T, K] themselves


def most_rows(slots: int, experts: int, align: int) -> int:
    """Returns the most rows that `slots` slots can fill, whatever their experts are."""
    return slots if align == 1 else (slots + experts * (align - 1)) // align * align


def tokens(slots: Tensor, positions: Tensor) -> Tensor:
    """Returns the token that each row comes from [C], int32, negative for a row without one."""
    return torch.div(slots, positions.shape[-1], rounding_mode="floor")


def listed(mask: Tensor, top_k: int) -> Tensor:
    """Returns the experts of each token [T, K], int32, in ascending order, from a mask [T, E]. -1 fills slots that are
    left; experts beyond the first K are left out."""
    index = torch.empty(mask.shape[0], top_k, dtype=torch.int32, device=mask.device)
    if index.numel():
        backend.twin(__name__, mask).listed(mask.contiguous().view(torch.uint8), index)
    return index


def sort(index: Tensor, experts: int, rows: int, align: int) -> Sorted:
    """Sorts the slots of `index` [T, K] by expert into `rows` rows. Slots with an expert out of range are dropped."""
    made = Sorted(
        torch.empty(experts, dtype=torch.int64, device=index.device),
        torch.empty(index.shape, dtype=torch.int32, device=index.device),
        torch.empty(rows, dtype=torch.int32, device=index.device),
    )
    backend.twin(__name__, index).sort(index.contiguous(), align, made)
    return made


def scatter(x: Tensor, positions: Tensor, slots: Tensor, zero_tail: bool) -> Tensor:
    """Copies x [T, D], in any dtype of at most four bytes, to the rows of its slots [C, D]. Pads are zeros; so is the
    tail with `zero_tail`, otherwise it is left as the memory was."""
    out = torch.empty(slots.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        moved, into = (x.view(torch.uint8), out.view(torch.uint8)) if x.element_size() == 1 else (x, out)
        backend.twin(__name__, x).scatter(moved, into, Slots(positions), slots, None, zero_tail)
    return out


def combine(rows: Tensor, slots: Slots, probs: Tensor | None) -> Tensor:
    """Sums the rows [C, D] of each token's slots to y [T, D], each multiplied by its probability if there are any: in
    float32, slot after slot, one rounding for a product and its sum. Reads no other row."""
    y = torch.empty(slots.positions.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
    if y.numel():
        backend.twin(__name__, rows).combine(rows, y, slots, probs)
    return y


def combine_backward(
    dy: Tensor, rows: Tensor | None, slots: Slots, sources: Tensor, probs: Tensor | None, zero_tail: bool,
    wants_rows: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Returns the gradients of `combine`: of the rows, p · dy rounded once, and, if `rows` are given, of the
    probabilities, ⟨dy, row⟩, summed in float32 on a GPU and in float64 on the reference. A slot without a row has the
    gradient zero. `sources` has the slot of each row."""
    drows = torch.empty(sources.shape[0], dy.shape[1], dtype=dy.dtype, device=dy.device) if wants_rows else None
    twin = backend.twin(__name__, dy)
    if rows is None or probs is None:
        if drows is not None and drows.numel():
            twin.scatter(dy, drows, slots, sources, probs, zero_tail)
        return drows, None
    dprobs = _empty_probs(probs.shape, probs.dtype, slots)
    if dprobs.numel() or (drows is not None and drows.numel()):
        twin.combine_backward(dy, rows, slots, sources, probs, drows, dprobs, zero_tail)
    return drows, dprobs


def take(probs: Tensor, slots: Slots, sources: Tensor) -> Tensor:
    """Returns the probability of each row's slot [C]; zero for a row without one."""
    out = torch.empty(sources.shape[0], dtype=probs.dtype, device=probs.device)
    if out.numel():
        backend.twin(__name__, probs).take(probs.contiguous(), out, slots, sources)
    return out


def take_backward(grad: Tensor, slots: Slots, shape: tuple[int, ...]) -> Tensor:
    """Returns the gradient of `take` in the probabilities' shape [T, W]. Reads no row that has no slot."""
    dprobs = _empty_probs(shape, grad.dtype, slots)
    if dprobs.numel():
        backend.twin(__name__, grad).take_backward(grad.contiguous(), dprobs, slots)
    return dprobs


def _empty_probs(shape: tuple[int, ...], dtype: torch.dtype, slots: Slots) -> Tensor:
    """Allocates gradients of probabilities. Kernels write one for each slot, so those of other experts are zeroed."""
    make = torch.empty if slots.experts is None else torch.zeros
    return make(shape, dtype=dtype, device=slots.positions.device)
