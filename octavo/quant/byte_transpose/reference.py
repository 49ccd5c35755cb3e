"""The transpose of bytes in plain torch."""

from torch import Tensor


def transpose(codes: Tensor, out: Tensor) -> None:
    out.copy_(codes.T)
