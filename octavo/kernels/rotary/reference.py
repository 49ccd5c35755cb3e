"""Rotary positions in plain torch."""

import torch
from torch import Tensor


def rotate(qkv: Tensor, own: Tensor, other: Tensor, heads: int, shared: int) -> tuple[Tensor, Tensor]:
    number = heads + 2 * shared
    rows = qkv.view(qkv.shape[0], qkv.shape[1], number, qkv.shape[2] // number)
    q, k = rows[:, :, :heads], rows[:, :, heads : heads + shared]
    return _turned(q, own, other), _turned(k, own, other)


def rotate_back(dq: Tensor, dk: Tensor, dv: Tensor, own: Tensor, other: Tensor) -> Tensor:
    batch, length, heads, channels = dq.shape
    parts = torch.cat((_turned(dq, own, -other), _turned(dk, own, -other), dv), 2)
    return parts.view(batch, length, (heads + 2 * dk.shape[2]) * channels)


def _turned(x: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """Rotate x [B, T, heads, D]: `roll` brings the other channels of pairs."""
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, -1)
    return (wide * own.float() + swapped * other.float()).to(x.dtype)
