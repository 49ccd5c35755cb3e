"""Sums down the columns of a matrix: the gradient of a bias, or what programs have summed each by itself."""

import torch
from torch import Tensor

from octavo import backend


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N] -> [N], summed in float64 on the reference and in float32 elsewhere, rounded once."""
    found: Tensor = backend.twin(__name__, x).column_sums(x, dtype)
    return found
