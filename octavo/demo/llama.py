"""Blocks with the proportions of Llama's, twice: in plain torch, to be converted, and of Octavo's operations.

Both have the same parameters in the same order, so that one seed gives both the same first weights. Blocks have an
RMSNorm before attention and before a SwiGLU MLP, rotary positions, no bias. q, k and v come from one projection, and so
do gate and value. Tensors are [B, T, C]: sequences, positions, width. `octavo bench model` times them, and
`octavo train --model llama` trains them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from octavo import ops
from octavo.demo import transformer
from octavo.demo.transformer import MLP, Block, Device, float32_on
from octavo.fusion.sequential import Sequential
from octavo.kernels.rotary import heads_of
from octavo.ops.attention import RotaryFactors

EPS = 1e-5  # of the norms
TURN = 10000.0  # positions per radian of the slowest pair of channels, about


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    width: int
    heads: int
    kv_heads: int  # fewer than heads: several heads share keys and values
    hidden: int  # of the MLP
    layers: int
    vocabulary: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_width

    @property
    def tokens(self) -> int:
        return self.batch * self.length


# -- in plain torch --------------------------------------------------------------------------------------------------


class PlainAttention(RotaryFactors):
    """Causal attention between the projections: rows of q, k and v, side by side, to rows of mixed values. As
    `ops.RotaryAttention`, but no operation."""

    def __init__(self, size: Size, device: Device = "cpu") -> None:
        super().__init__(size.length, size.head_width, TURN, device=device)
        self.size = size

    def forward(self, qkv: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.heads(qkv), is_causal=True, enable_gqa=self.shares)
        return mixed.transpose(1, 2).flatten(-2)

    @property
    def shares(self) -> bool:
        return self.size.kv_heads < self.size.heads

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each [B, heads, T, D], q and k rotated."""
        length = qkv.shape[1]
        q, k, v = heads_of(qkv, self.own[:length], self.other[:length], self.size.heads, self.size.kv_heads)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class Attention(transformer.Attention):
    """Attention whose heads may share keys and values."""

    def __init__(self, size: Size, device: Device = "cpu") -> None:
        super().__init__(size.width, size.heads, device, qkv_width=size.qkv_width)
        self.mix = PlainAttention(size, device)

    def mixed(self, qkv: Tensor) -> Tensor:
        return self.mix(qkv)


def make_block(size: Size, device: Device = "cpu") -> Block:
    attention = Attention(size, device)
    return Block(size.width, attention, MLP(size.width, size.hidden, device, gated=True), device, eps=EPS)


def plain_blocks(size: Size, device: Device = "cpu") -> nn.Module:
    norm = nn.RMSNorm(size.width, eps=EPS, **float32_on(device))
    return nn.Sequential(*(make_block(size, device) for _ in range(size.layers)), norm)


# -- of Octavo's operations ------------------------------------------------------------------------------------------


def fused_blocks(size: Size, device: Device = "cpu", *, recipe: str) -> nn.Module:
    """Return the same blocks as one Sequential: everything from one attention to the next runs as one operation."""
    layers: list[nn.Module] = []
    norm = partial(ops.RMSNorm, size.width, eps=EPS, **float32_on(device))
    rotary: Any = {"kv_heads": size.kv_heads, "positions": size.length, "base": TURN, "device": device}

    def linear(inputs: int, outputs: int) -> nn.Module:
        return ops.Linear(inputs, outputs, bias=False, recipe=recipe, **float32_on(device))

    for i in range(size.layers):
        layers += [
            ops.MakeExtraOutput(channel=f"before attention {i}", output_to_caller=False),
            norm(),
            linear(size.width, size.qkv_width),
            ops.RotaryAttention(size.heads, size.head_width, **rotary),
            linear(size.width, size.width),
            ops.AddExtraInput(source=f"before attention {i}"),
            ops.MakeExtraOutput(channel=f"before MLP {i}", output_to_caller=False),
            norm(),
            linear(size.width, 2 * size.hidden),
            ops.SwiGLU(),
            linear(size.hidden, size.width),
            ops.AddExtraInput(source=f"before MLP {i}"),
        ]
    return Sequential(*layers, norm())
