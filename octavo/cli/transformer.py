"""A transformer block with a language model's proportions and plain nn.Linears, to be converted and then compiled.
Tensors are [B, T, C]: sequences, positions, width."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    width: int
    heads: int
    hidden: int


class Attention(nn.Module):
    """Causal self-attention by torch's own kernel; q, k and v come from one projection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, T, D]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return y


class SwiGLU(nn.Module):
    """A SwiGLU MLP; gate and value come from one projection."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * value)
        return y


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.RMSNorm(size.width), Attention(size))
        self.mlp = nn.Sequential(nn.RMSNorm(size.width), SwiGLU(size.width, size.hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = x + self.mlp(x)
        return y
