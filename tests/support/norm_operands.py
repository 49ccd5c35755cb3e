"""Norms of each kind, and operands for them."""

import torch

from octavo.kernels.norm import Norm
from tests.support.activation_formulas import data

NORMS = {
    "layer": Norm("layer", 1e-5),
    "layer, large eps": Norm("layer", 0.3),
    "layer, zero centered": Norm("layer", 1e-5, zero_centered=True),
    "rms": Norm("rms", 1e-5),
    "rms, zero centered": Norm("rms", 0.3, zero_centered=True),
    "l2": Norm("l2", 1e-6),
}


def operands(norm, m, n, dtype=torch.float32, device="cpu"):
    """x with rows of different means and sizes, dy, weight, bias."""
    x = (data(m, n, seed=1) * (1 + torch.arange(m)[:, None] % 5) + torch.arange(m)[:, None] % 7).to(dtype)
    weight = data(n, dtype=dtype, seed=2).to(device) if norm.kind != "l2" else None
    bias = data(n, dtype=dtype, seed=3).to(device) if norm.kind == "layer" else None
    return x.to(device), data(m, n, dtype=dtype, seed=4).to(device), weight, bias
