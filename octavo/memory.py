"""Where tensors lie in memory: the addresses of one, whether two overlap, whether several follow each other."""

from collections.abc import Sequence

from torch import Tensor


def span(t: Tensor) -> tuple[int, int]:
    """The addresses between which its elements are."""
    first = t.data_ptr()  # 0 where there are none
    if t.is_contiguous():
        return first, first + t.nbytes
    last: int = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return first, first + (last + 1) * t.element_size()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory, by what they say of themselves."""
    first, end = span(a)
    other, other_end = span(b)
    return first < other_end and other < end


def joined_rows(parts: Sequence[Tensor]) -> Tensor | None:
    """Contiguous tensors of one shape as one, a view of all of them, if they follow each other in one allocation; their
    first dim is then the sum of theirs."""
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
