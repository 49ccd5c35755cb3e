"""Sums down the columns of a matrix: the gradient of a bias."""

import torch
from torch import Tensor

from octavo import backend


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N] -> [N], summed in float64 on the reference and in float32 elsewhere, rounded once."""
    wide = torch.float64 if backend.choose(x.device) == "reference" else torch.float32
    return x.sum(0, dtype=wide).to(dtype)
