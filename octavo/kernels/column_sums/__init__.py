"""Sums down the columns of a matrix: the gradient of a bias, or the total of the partial sums of programs."""

import torch
from torch import Tensor

from octavo import backend


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum [M, N] to [N], in float64 on the reference and in float32 elsewhere, and round once."""
    return backend.implementation(__name__, x).column_sums(x, dtype)
