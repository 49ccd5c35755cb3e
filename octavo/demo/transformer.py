"""A transformer block with a language model's proportions and plain nn.Linears, to be converted and then compiled.
Tensors are [B, T, C]: sequences, positions, width."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Device = torch.device | str


def float32_on(device: Device) -> Any:
    """Returns the settings of every parameter of the small models: they begin in float32, whatever torch's defaults."""
    return {"device": device, "dtype": torch.float32}


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    width: int
    heads: int
    hidden: int


class Attention(nn.Module):
    """Causal self-attention by torch's own kernel; q, k and v come from one projection."""

    def __init__(self, size: Size, device: Device = "cpu") -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False, **float32_on(device))
        self.out = nn.Linear(size.width, size.width, bias=False, **float32_on(device))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, T, D]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return y


class SwiGLU(nn.Module):
    """A SwiGLU MLP; gate and value come from one projection."""

    def __init__(self, width: int, hidden: int, device: Device = "cpu") -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False, **float32_on(device))
        self.down = nn.Linear(hidden, width, bias=False, **float32_on(device))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * value)
        return y


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, size: Size, device: Device = "cpu") -> None:
        super().__init__()
        norm = partial(nn.RMSNorm, size.width, **float32_on(device))
        self.attention = nn.Sequential(norm(), Attention(size, device))
        self.mlp = nn.Sequential(norm(), SwiGLU(size.width, size.hidden, device))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = x + self.mlp(x)
        return y
