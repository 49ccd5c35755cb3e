"""Tensors without data. Fakes and allocations are both created from them, so that each shape rule exists once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorProto:
    """Shape, dtype, strides and device of a tensor that may not exist. Contiguous unless strides are given."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, x: Tensor) -> "TensorProto":
        return cls(tuple(x.shape), x.dtype, x.device, None if x.is_contiguous() else x.stride())

    @cached_property
    def empty(self) -> Callable[[], Tensor]:
        """A function that allocates the tensor, uninitialized: a partial of torch's, since it runs at every step."""
        if self.strides is None:
            return partial(torch.empty, self.shape, dtype=self.dtype, device=self.device)
        return partial(torch.empty_strided, self.shape, self.strides, dtype=self.dtype, device=self.device)

    def refusal(self, x: Tensor) -> str:
        """Returns how `x` differs from this, in words; "" if it fits. Ignores the stride of a dim of one element."""
        if tuple(x.shape) != self.shape:
            return f"shape {tuple(x.shape)} instead of {self.shape}"
        if x.dtype != self.dtype:
            return f"dtype {x.dtype} instead of {self.dtype}"
        if x.device != self.device:
            return f"device {x.device} instead of {self.device}"
        want = self.strides or torch.empty(self.shape, device="meta").stride()
        if x.numel() and any(n > 1 and a != b for n, a, b in zip(self.shape, x.stride(), want, strict=True)):
            return f"strides {x.stride()} instead of {want}"
        return ""
