"""Parts of the small transformers, with plain nn.Linears, to be converted and then compiled: attention, MLP, block.
Tensors are [B, T, C]: sequences, positions, width."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Device = torch.device | str


def float32_on(device: Device) -> Any:
    """Return the settings of every parameter of the small models: they begin in float32, whatever torch's defaults."""
    return {"device": device, "dtype": torch.float32}


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    width: int
    heads: int
    hidden: int


class Attention(nn.Module):
    """Causal self-attention by torch's own kernel: each position reads itself and those before it. q, k and v come from
    one projection."""

    def __init__(self, width: int, heads: int, device: Device = "cpu", *, qkv_width: int | None = None) -> None:
        super().__init__()
        self.heads = heads  # --parallel leaves a rank some of them
        self.qkv = nn.Linear(width, qkv_width or 3 * width, bias=False, **float32_on(device))
        self.out = nn.Linear(width, width, bias=False, **float32_on(device))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mixed(self.qkv(x)))

    def mixed(self, qkv: Tensor) -> Tensor:
        """Return rows of mixed values, from rows of q, k and v, side by side."""
        heads = qkv.view(*qkv.shape[:2], 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, T, D]
        values = F.scaled_dot_product_attention(self.placed(q), self.placed(k), v, is_causal=True)
        return values.transpose(1, 2).flatten(-2)

    def placed(self, x: Tensor) -> Tensor:
        """Return q or k with its position in it; this attention knows none."""
        return x


class MLP(nn.Module):
    """Map each position on its own: by GELU, or by SwiGLU, whose gate and value come from one projection."""

    def __init__(self, width: int, hidden: int, device: Device = "cpu", *, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.up = nn.Linear(width, 2 * hidden if gated else hidden, bias=False, **float32_on(device))
        self.down = nn.Linear(hidden, width, bias=False, **float32_on(device))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.gated:
            gate, value = h.chunk(2, dim=-1)
            h = F.silu(gate) * value
        else:
            h = F.gelu(h)
        return self.down(h)


def as_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype of torch.autocast, if that is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(
        self, width: int, attention: nn.Module, mlp: nn.Module, device: Device = "cpu", *, eps: float | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=eps, **float32_on(device))
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(width, eps=eps, **float32_on(device))
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        # a norm's output stays in float32 under autocast; experts run as one operation if they need not cast it
        return x + self.mlp(as_autocast(self.mlp_norm(x)))


def swiglu_block(size: Size, device: Device = "cpu") -> Block:
    """Return a block with a language model's proportions, without positions."""
    attention = Attention(size.width, size.heads, device)
    return Block(size.width, attention, MLP(size.width, size.hidden, device, gated=True), device)
