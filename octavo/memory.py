"""Addresses of tensors in memory: the span of one, whether two overlap, whether several follow each other."""

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from octavo.errors import UnsupportedConfig


def span(t: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements and the address after the last."""
    first = t.data_ptr()  # 0 for a tensor without elements
    if t.is_contiguous():
        return first, first + t.nbytes
    last: int = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return first, first + (last + 1) * t.element_size()


def overlaps_itself(t: Tensor) -> bool:
    """Return whether two elements of a tensor may lie in one place, as those of an expanded one do."""
    if t.is_contiguous():
        return False
    reach = 0  # the place of the last element in the dims of smaller steps
    for step, n in sorted([(step, n) for n, step in zip(t.shape, t.stride(), strict=True) if n > 1]):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


def is_dense(t: Tensor) -> bool:
    """Tell whether a tensor's elements fill the memory from the first to the last, each in a place of its own."""
    first, end = span(t)
    return end - first == t.nbytes and not overlaps_itself(t)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether the spans of two tensors overlap, so that they may share memory."""
    first, end = span(a)
    other, other_end = span(b)
    return first < other_end and other < end


def refuse_shared_memory(name: str, what: str) -> NoReturn:
    """Raise the error for a caller's buffer of this name that overlaps a tensor that is still needed."""
    raise UnsupportedConfig(f"{name} lies in the memory of {what}. Give it memory of its own.")


def refuse_dgrad_out(dgrad_out: Tensor, dys: Sequence[Tensor | None]) -> None:
    """Raise if a buffer for dx overlaps a gradient that arrives."""
    if any([dy is not None and overlap(dgrad_out, dy) for dy in dys]):
        refuse_shared_memory("dgrad_out", "dy, which this layer and others may still have to read")


def joined_rows(parts: Sequence[Tensor]) -> Tensor | None:
    """Return one view of contiguous tensors of one shape that follow each other in one allocation, joined along the
    first dim; None if they do not."""
    first = parts[0]
    step, storage = first.nbytes, first.untyped_storage()
    start, base = first.data_ptr(), storage.data_ptr()
    for i, part in enumerate(parts):
        if (
            part.data_ptr() != start + i * step or part.dtype != first.dtype or part.shape != first.shape
            or not part.is_contiguous() or part.untyped_storage().data_ptr() != base
        ):  # fmt: skip
            return None
    return first.as_strided((len(parts) * first.shape[0], *first.shape[1:]), first.stride())
