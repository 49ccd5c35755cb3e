"""The random-sign Hadamard rotation of 16 elements, in a fixed order of additions: every device gets the same bits.

    y = bfloat16(x * diag(signs) * H / 4)

H is the Sylvester matrix of order 16; H/4 is its own inverse.
"""

import torch
from torch import Tensor

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
NEGATIVE = sum(1 << i for i, s in enumerate(SIGNS) if s < 0)  # as bits, for the kernel


def _butterfly(v: Tensor) -> Tensor:
    """Multiply v [..., 16] by H/4: four rounds of sums and differences at distance 1, 2, 4, 8, in float32."""
    for distance in (1, 2, 4, 8):
        pairs = v.reshape(*v.shape[:-1], SIZE // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = torch.stack((a + b, a - b), -2).flatten(-3)
    return v * 0.25


def _signs(like: Tensor) -> Tensor:
    """Compute the signs on the device: a tensor from a list would be a host copy, which no graph can capture."""
    negative = (NEGATIVE >> torch.arange(SIZE, device=like.device, dtype=torch.int64)) & 1
    return 1.0 - 2.0 * negative.float()


def turn(x: Tensor) -> Tensor:
    """Rotate x [R, C], C a multiple of 16. Return bfloat16 values in float32."""
    groups = x.float().reshape(x.shape[0], x.shape[1] // SIZE, SIZE)
    return _butterfly(groups * _signs(x)).flatten(-2).to(torch.bfloat16).float()


def turn_back(x: Tensor) -> Tensor:
    """Return the inverse of `turn`, in float32, without a rounding of its own."""
    return (_butterfly(x.reshape(x.shape[0], x.shape[1] // SIZE, SIZE)) * _signs(x)).flatten(-2)
