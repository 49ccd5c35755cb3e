"""Tensors without data. Fakes and allocations are both created from them, so that each shape rule exists once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorProto:
    """Shape, dtype, device and strides of a tensor that need not exist.

    `Quantizer.proto` takes one and tells the shapes of codes and scales before there is data.

    Args:
        shape: the tensor's shape.
        dtype: the tensor's dtype.
        device: the tensor's device.
        strides: the tensor's strides; None for a contiguous tensor.

    Example:
        >>> x = octavo.quant.TensorProto((512, 1024), torch.bfloat16, torch.device("cpu"))
        >>> octavo.quant.MX().proto(x).scale.shape
        (512, 32)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, x: Tensor) -> "TensorProto":
        """Return the description of a tensor.

        Args:
            x: the tensor.

        Returns:
            Its shape, dtype and device, and its strides unless it is contiguous.

        Example:
            >>> octavo.quant.TensorProto.of(torch.ones(4, 6).T).strides
            (1, 6)
        """
        return cls(tuple(x.shape), x.dtype, x.device, None if x.is_contiguous() else x.stride())

    @cached_property
    def empty(self) -> Callable[[], Tensor]:
        """Allocate the tensor, uninitialized: `proto.empty()`. A function made once, since layers call it at every
        step."""
        if self.strides is None:
            return partial(torch.empty, self.shape, dtype=self.dtype, device=self.device)
        return partial(torch.empty_strided, self.shape, self.strides, dtype=self.dtype, device=self.device)

    def unsupported_reason(self, x: Tensor) -> str:
        """Return how a tensor differs from this description, in words.

        Args:
            x: the tensor to compare. The stride of a dim of one element is ignored.

        Returns:
            The first difference, such as "dtype torch.float32 instead of torch.bfloat16"; "" if there is none.

        Example:
            >>> octavo.quant.TensorProto.of(torch.ones(4, 6)).unsupported_reason(torch.ones(4, 8))
            'shape (4, 8) instead of (4, 6)'
        """
        if tuple(x.shape) != self.shape:
            return f"shape {tuple(x.shape)} instead of {self.shape}"
        if x.dtype != self.dtype:
            return f"dtype {x.dtype} instead of {self.dtype}"
        if x.device != self.device:
            return f"device {x.device} instead of {self.device}"
        want = self.strides or torch.empty(self.shape, device="meta", dtype=self.dtype).stride()
        if x.numel() and any(n > 1 and a != b for n, a, b in zip(self.shape, x.stride(), want, strict=True)):
            return f"strides {x.stride()} instead of {want}"
        return ""
