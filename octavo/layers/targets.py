"""Where a weight's gradient goes if not to `weight.grad`: a buffer to be added to, or a mailbox to wait in."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.errors import UnsupportedDtype, UnsupportedShape


class Target(Protocol):
    """Where dw is accumulated."""

    def open(self, rows: int, columns: int) -> Tensor:
        """The buffer as [rows, columns], to write to or add to."""
        ...

    def close(self) -> None:
        """It is written."""
        ...


class Mail(Protocol):
    """Where the operands of a delayed dw are left."""

    def put(self, config: Any, *operands: Any) -> None: ...


class Fixed:
    """A target whose buffers are known from the start: in a graph."""

    def __init__(self, buffers: Sequence[Tensor], mode: str) -> None:
        self.buffers, self.mode = buffers, mode
        self.loose: Tensor | None = None

    def open(self, rows: int, columns: int) -> Tensor:
        matrix, self.loose = open_buffers(self.buffers, rows, columns, self.buffers[0].device)
        return matrix

    def close(self) -> None:
        if self.loose is not None:
            spread(self.loose, self.buffers, self.mode)


def open_buffers(
    buffers: Sequence[Tensor], rows: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Gradient buffers, of one weight or of several below each other, as one matrix [rows, columns]: a view. Where they
    do not lie one after the other in memory, or one is of no elements, which is how a frozen weight's looks, it is
    zeros instead, the second result too, for `spread` to bring home."""
    each, frozen = rows // len(buffers), [len(buffers) > 1 and buffer.numel() == 0 for buffer in buffers]
    parts = [gradient_matrix(t, each, columns, device) for t, none in zip(buffers, frozen, strict=True) if not none]
    joined = None if any(frozen) else parts[0] if len(parts) == 1 else joined_rows(parts)
    if joined is not None:
        return joined, None
    loose = torch.zeros(rows, columns, dtype=parts[0].dtype, device=device)
    return loose, loose


def spread(loose: Tensor, buffers: Sequence[Tensor], mode: str) -> None:
    """Bring rows that were written elsewhere to the buffers that they are for."""
    pairs = [(t, part) for t, part in zip(buffers, loose.chunk(len(buffers)), strict=True) if t.numel()]
    into = [buffer for buffer, _ in pairs]
    parts = [part.view(buffer.shape).to(buffer.dtype) for buffer, part in pairs]
    if mode == "add":
        torch._foreach_add_(into, parts)
    else:
        torch._foreach_copy_(into, parts)


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


def gradient_matrix(buffer: Tensor, rows: int, columns: int, device: torch.device) -> Tensor:
    """A weight's gradient buffer as [rows, columns], a view."""
    found = f"{buffer.dtype} {tuple(buffer.shape)} with strides {buffer.stride()} on {buffer.device}"
    if buffer.dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedDtype(f"weight.main_grad must be float32 or bfloat16, got {found}.")
    if buffer.device != device or buffer.numel() != rows * columns:
        raise UnsupportedShape(
            f"weight.main_grad must hold {rows} x {columns} = {rows * columns} elements on {device}, got {found}."
        )
    try:
        overlaps = any(n > 1 and step == 0 for n, step in zip(buffer.shape, buffer.stride(), strict=True))
        matrix = None if overlaps else buffer.detach().view(rows, columns)
    except RuntimeError:
        matrix = None
    if matrix is None:
        raise UnsupportedShape(
            f"weight.main_grad must be viewable as {(rows, columns)}, so that dw lands in it and not in a copy; got "
            f"{found}. Make it contiguous."
        )
    return matrix
