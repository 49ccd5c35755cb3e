"""Sums down the columns, in float64."""

import torch
from torch import Tensor


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.sum(0, dtype=torch.float64).to(dtype)
