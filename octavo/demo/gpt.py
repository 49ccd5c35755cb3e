"""A byte-level GPT, small enough to read in a minute: pre-norm blocks, causal attention with rotary positions, GELU.

Every matrix product outside attention is a plain nn.Linear, so a conversion finds all of them. With a mixture in its
shape each MLP is a mixture of experts, and the family "llama" has the blocks of `octavo.demo.llama`. Tensors are
[B, T, C]: sequences, positions, width.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.demo import llama, transformer
from octavo.demo.moe_gpt import MixtureShape, make_mixture
from octavo.demo.transformer import MLP, Block, Device, float32_on
from octavo.errors import UnsupportedShape

BYTES = 256
LONGEST_TURN = 100.0  # positions per radian of the slowest pair of channels; contexts are about a hundred bytes


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT, its kind of blocks, and the sizes of the mixtures of experts that it has in place of MLPs, if
    any."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 128
    family: str = "gpt"  # or "llama"
    mixture: MixtureShape | None = None

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads, self.context) < 1 or self.width % (2 * self.heads):
            raise UnsupportedShape(
                f"A model has sizes from 1 up and an even number of channels in each head, got {self.sizes()}. "
                "Choose a width that is a multiple of twice the heads."
            )

    def sizes(self) -> str:
        """Return the sizes as --size takes them, with their names."""
        return f"width {self.width}, layers {self.layers}, heads {self.heads}, context {self.context}"

    def llama(self) -> llama.Size:
        """Return the sizes of Llama's blocks: two heads share keys and values, and the MLP has 8/3 of the width."""
        shared = self.heads if self.heads % 2 else self.heads // 2
        hidden = -(-8 * self.width // 3 // 32) * 32  # a multiple of 32, which every scheme of scales divides
        return llama.Size(1, self.context, self.width, self.heads, shared, hidden, self.layers, BYTES)


def rotate(x: Tensor) -> Tensor:
    """Rotate pairs of channels by an angle proportional to the position, so that products depend on the distance."""
    t, d = x.shape[-2:]
    speed = LONGEST_TURN ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = torch.arange(t, device=x.device, dtype=torch.float32)[:, None] * speed  # [T, D/2]
    left, right = x.float().chunk(2, dim=-1)
    turned = (left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos())
    return torch.cat(turned, dim=-1).to(x.dtype)


class Attention(transformer.Attention):
    """Attention with rotary positions."""

    def placed(self, x: Tensor) -> Tensor:
        return rotate(F.rms_norm(x, x.shape[-1:]))  # bounded, so rounding changes it little


def make_block(shape: Shape, device: Device, *, plain: bool) -> nn.Module:
    if shape.family == "llama":
        return llama.make_block(shape.llama(), device)
    width, attention = shape.width, Attention(shape.width, shape.heads, device)
    if shape.mixture is None:
        return Block(width, attention, MLP(width, 4 * width, device, gated=False), device)
    return Block(width, attention, make_mixture(width, shape.mixture, device, plain=plain), device)


class GPT(nn.Module):
    """Map bytes [B, T] to logits of each next byte, [B, T, 256]. `plain` makes mixtures in plain torch, with the same
    first weights as those of octavo.MoE."""

    def __init__(self, shape: Shape, *, seed: int, plain: bool = False, device: Device = "cpu") -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(BYTES, shape.width, **float32_on(device))
        self.blocks = nn.Sequential(*(make_block(shape, device, plain=plain) for _ in range(shape.layers)))
        self.norm = nn.RMSNorm(shape.width, **float32_on(device))
        self.head = nn.Linear(shape.width, BYTES, bias=False, **float32_on(device))
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Draw the weights again: equal for equal seeds, on any device."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() >= 2:
                std = self._std(name, weight.shape[-1])
                weight.data.copy_(torch.randn(weight.shape, generator=generator, **float32_on("cpu")) * std)

    def _std(self, name: str, inputs: int) -> float:
        if name == "bytes.weight":
            return 0.5
        if name == "head.weight":
            return 0.02  # small logits: the first loss is that of a uniform guess
        # projections into the residual stream start smaller, as it sums 2 x layers of their outputs
        terms = 2 * self.shape.layers if name.endswith(("out.weight", "down.weight", "fc2.weight")) else 1
        return float((inputs * terms) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(tokens))))


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross entropy of next bytes."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


def loss_of(
    call: Callable[[Tensor], Tensor], batch: Tensor, dtype: torch.dtype = torch.bfloat16, reduction: str = "mean"
) -> Tensor:
    """Return the cross entropy of a batch's next bytes, with activations in `dtype`: the mean, or with "none" a row
    for each sequence."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    with nullcontext() if dtype == torch.float32 else torch.autocast(batch.device.type, dtype):
        found = F.cross_entropy(call(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)
    return found if reduction == "mean" else found.view(targets.shape)
