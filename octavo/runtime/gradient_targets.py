"""Destinations of a weight gradient besides `weight.grad`: buffers to accumulate in, or a queue for its operands."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo._torch.operators import foreach_add_, foreach_copy_
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.memory import joined_rows, overlaps_itself, span


class OperandQueue(Protocol):
    """A queue for the operands of a deferred dw."""

    def put(self, config: Any, *operands: Any) -> None: ...


class Writes:
    """Writes of a backward to buffers, deferred until all of it is computed: a backward that fails has written
    nothing."""

    def __init__(self) -> None:
        self._due: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def defer(self, write: Callable[..., Any], *arguments: Any) -> None:
        self._due.append((write, arguments))

    def drawn(self, seed: Tensor) -> Tensor:
        """Return a random counter with the steps added that are deferred."""
        due = sum([write is advance and arguments[0].data_ptr() == seed.data_ptr() for write, arguments in self._due])
        if not due:
            return seed
        # the counter itself moves when the backward is done: until then a second cast draws after the first
        ahead = seed.clone()
        ahead[1:].add_(due)
        return ahead

    def do(self) -> None:
        for write, arguments in self._due:
            write(*arguments)


def advance(seed: Tensor) -> None:
    """Advance a random counter [seed, step] by one step."""
    seed[1:].add_(1)


class Target:
    """Buffers that dw is accumulated in: one for a weight, or one for each of the weights that it consists of."""

    def __init__(self, buffers: Sequence[Tensor], mode: str) -> None:
        self.buffers, self.mode = tuple(buffers), mode  # "add" or "overwrite"
        self._loose: Tensor | None = None

    def open(self, rows: int, columns: int) -> Tensor:
        """Return the buffers, below each other, as one matrix [rows, columns], to write to or add to: a view. Where
        they are not adjacent in memory, or a weight is frozen, it is a matrix of zeros, which `close` spreads."""
        buffers, self._loose = self.buffers, None
        each = rows // len(buffers)
        parts = [gradient_matrix(t, each, columns) for t in buffers if not is_nothing(t)]
        if len(buffers) == 1 and parts:
            return parts[0]
        for buffer, part in zip((t for t in buffers if not is_nothing(t)), parts, strict=True):
            if not part.is_contiguous():
                raise UnsupportedShape(
                    "weight.main_grad of a group must be contiguous, so that dw lands in it; got "
                    f"{tuple(buffer.shape)} with strides {buffer.stride()}. Make it contiguous."
                )
        # adjacent buffers are one matrix for the GEMM, which adds to them without a copy
        joined = joined_rows(parts) if len(parts) == len(buffers) else None
        if joined is not None:
            return joined
        spans = sorted([span(part) for part in parts])
        if any([end > start for (_, end), (start, _) in pairwise(spans)]):
            raise UnsupportedConfig("weight.main_grad of two groups overlap. Give each group memory of its own.")
        # float32, whatever the buffers are: dw is rounded once, when it is spread
        self._loose = torch.zeros(rows, columns, dtype=torch.float32, device=buffers[0].device)
        return self._loose

    def close(self) -> None:
        """Finish the write: add or copy dw to buffers that are not adjacent."""
        if self._loose is not None:
            spread(self._loose, self.buffers, self.mode)


class LazyTarget:
    """A target that is looked up when dw is computed."""

    mode: str  # of the target
    _open_target: Target | None = None

    def find(self) -> Target:
        raise NotImplementedError

    def is_there(self) -> bool:
        """Return whether the target can be looked up in advance, without allocating it."""
        raise NotImplementedError

    def done(self) -> None:
        """Note that dw was written."""
        raise NotImplementedError

    def open(self, rows: int, columns: int) -> Tensor:
        self._open_target = self.find()
        return self._open_target.open(rows, columns)

    def close(self) -> None:
        assert self._open_target is not None
        self._open_target.close()
        self._open_target = None
        self.done()


def nothing(device: torch.device) -> Tensor:
    """Return a placeholder for the buffer of a frozen weight."""
    return torch.empty(0, dtype=torch.uint8, device=device)


def is_nothing(buffer: Tensor) -> bool:
    return buffer.dtype == torch.uint8 and buffer.numel() == 0


def spread(loose: Tensor, buffers: Sequence[Tensor], mode: str) -> None:
    """Add or copy the rows of `loose` to the buffers that they belong to."""
    pairs = [(t, part) for t, part in zip(buffers, loose.chunk(len(buffers)), strict=True) if not is_nothing(t)]
    if not pairs:  # all weights were frozen after forward
        return
    into = [buffer for buffer, _ in pairs]
    parts = [part.view(buffer.shape).to(buffer.dtype) for buffer, part in pairs]
    if mode == "add":
        # one launch for all weights
        foreach_add_(into, parts)
    else:
        foreach_copy_(into, parts)


def gradient_matrix(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """Return a weight's gradient buffer as [rows, columns], a view."""
    if buffer.dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedDtype(f"weight.main_grad must be float32 or bfloat16, got {_described(buffer)}.")
    if buffer.numel() != rows * columns:
        raise UnsupportedShape(
            f"weight.main_grad must hold {rows} x {columns} = {rows * columns} elements, got {_described(buffer)}."
        )
    if overlaps_itself(buffer):
        raise UnsupportedShape(
            f"weight.main_grad must have memory for each element of dw, and elements of this one overlap: "
            f"{_described(buffer)}. Set weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)."
        )
    try:
        return buffer.detach().view(rows, columns)
    except RuntimeError:
        raise UnsupportedShape(
            f"weight.main_grad must be viewable as {(rows, columns)}, so that dw lands in it and not in a copy; got "
            f"{_described(buffer)}. Make it contiguous."
        ) from None


def _described(buffer: Tensor) -> str:
    return f"{buffer.dtype} {tuple(buffer.shape)} with strides {buffer.stride()} on {buffer.device}"
