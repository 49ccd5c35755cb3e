"""A language model with the proportions of Llama's, twice: in plain torch, to be converted, and of Octavo's operations.

Both have the same parameters in the same order, so that one seed gives both the same first weights. Blocks have an
RMSNorm before attention and before a SwiGLU MLP, rotary positions, no bias. q, k and v come from one projection, and so
do gate and value. Tensors are [B, T, C]: sequences, positions, width.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo import ops
from octavo._torch.attention import chosen_backend
from octavo.cli.bench.transformer import SwiGLU

EPS = 1e-5  # of the norms
TURN = 10000.0  # positions per radian of the slowest pair of channels
STD = 0.02  # of the first weights

# kernels of attention, in the order in which they are tried; that of torch itself differs between its versions
ATTENTION = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
}


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


def attention_order(first: str) -> AbstractContextManager[Any]:
    """Returns a context in which attention tries the kernels of ATTENTION[first] in that order. A call traced by
    torch.compile inside of it keeps the kernel that was chosen then."""
    return sdpa_kernel(list(ATTENTION[first]), set_priority=True)


# -- in plain torch --------------------------------------------------------------------------------------------------


def rotation(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns factors [T, 1, D] of `rotate`: for a channel itself, and for the other one of its pair."""
    speed = TURN ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(length)[:, None, None] * speed  # [T, 1, D/2]
    return torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)


def rotate(x: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """Rotates pairs of channels of x [B, T, heads, D] by an angle proportional to the position. Channel i and channel
    i + D/2 are a pair: `roll` swaps them in one kernel, and the signs are in `other`."""
    return torch.addcmul(x * own, x.roll(x.shape[-1] // 2, -1), other)


class RotaryAttention(nn.Module):
    """Causal attention between the projections: rows of q, k and v, side by side, to rows of mixed values."""

    own: Tensor
    other: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        for name, factor in zip(("own", "other"), rotation(size.length, size.head_width), strict=True):
            self.register_buffer(name, factor, persistent=False)

    def forward(self, qkv: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.heads(qkv), is_causal=True, enable_gqa=self.shares)
        return mixed.transpose(1, 2).flatten(-2)

    @property
    def shares(self) -> bool:
        return self.size.kv_heads < self.size.heads

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, each [B, heads, T, D], q and k rotated."""
        size = self.size
        # one split: its gradient is one copy, that of slices would be one of all of qkv for each
        rows = qkv.view(*qkv.shape[:-1], -1, size.head_width)
        q, k, v = rows.split((size.heads, size.kv_heads, size.kv_heads), dim=2)  # type: ignore[no-untyped-call]
        q, k = (rotate(x, self.own, self.other) for x in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.qkv = nn.Linear(size.width, size.qkv_width, bias=False)
        self.mix = RotaryAttention(size)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.mix(self.qkv(x)))
        return y


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(size.width, eps=EPS), Attention(size)
        self.mlp_norm, self.mlp = nn.RMSNorm(size.width, eps=EPS), SwiGLU(size.width, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Llama(nn.Module):
    """Maps tokens [B, T] to the loss of predicting each one's successor; the first token follows the last."""

    def __init__(self, size: Size, blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = blocks  # with the last norm
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def plain_blocks(size: Size) -> nn.Module:
    return nn.Sequential(*(Block(size) for _ in range(size.layers)), nn.RMSNorm(size.width, eps=EPS))


# -- of Octavo's operations ------------------------------------------------------------------------------------------


def fused_blocks(size: Size, recipe: str) -> nn.Module:
    """Returns the same blocks as one Sequential: everything from one attention to the next runs as one operation."""
    layers: list[nn.Module] = []
    for i in range(size.layers):
        layers += [
            ops.MakeExtraOutput(channel=f"before attention {i}", output_to_caller=False),
            ops.RMSNorm(size.width, eps=EPS),
            ops.Linear(size.width, size.qkv_width, bias=False, recipe=recipe),
            RotaryAttention(size),
            ops.Linear(size.width, size.width, bias=False, recipe=recipe),
            ops.AddExtraInput(source=f"before attention {i}"),
            ops.MakeExtraOutput(channel=f"before MLP {i}", output_to_caller=False),
            ops.RMSNorm(size.width, eps=EPS),
            ops.Linear(size.width, 2 * size.hidden, bias=False, recipe=recipe),
            ops.SwiGLU(),
            ops.Linear(size.hidden, size.width, bias=False, recipe=recipe),
            ops.AddExtraInput(source=f"before MLP {i}"),
        ]
    return ops.Sequential(*layers, ops.RMSNorm(size.width, eps=EPS))


# -- either ----------------------------------------------------------------------------------------------------------


def reset(model: nn.Module, seed: int) -> None:
    """Draws the weights: equal for equal seeds, and for models with equal parameters in equal order."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=STD)


def attention_kernel(size: Size, device: torch.device, first: str) -> str:
    """Returns the name of the kernel that attention runs in bfloat16."""
    mix = RotaryAttention(size).to(device, torch.bfloat16)
    shape = (size.batch, size.length, size.qkv_width)
    qkv = torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    with attention_order(first):
        return chosen_backend(*mix.heads(qkv), is_causal=True, enable_gqa=mix.shares)
