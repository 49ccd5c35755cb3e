"""A ViT and a DiT in plain torch, of the shapes of ViT-B/16 and DiT-B/2. Tensors are [B, T, C]: pictures, patches,
width."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Sizes of a transformer over the patches of a picture."""

    width: int
    layers: int
    heads: int
    picture: int  # pixels, or latents, of a side
    patch: int
    channels: int
    batch: int

    @property
    def patches(self) -> int:
        return (self.picture // self.patch) ** 2


SIZES = {
    "vit": {"base": Size(768, 12, 12, 224, 16, 3, 32), "tiny": Size(64, 2, 4, 16, 4, 3, 8)},
    "dit": {"base": Size(768, 12, 12, 32, 2, 4, 24), "tiny": Size(64, 2, 4, 8, 2, 4, 8)},
}


class Attention(nn.Module):
    """Self-attention of each patch to all patches, by torch's own kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [3, B, heads, T, D]
        y: Tensor = self.out(F.scaled_dot_product_attention(*heads.unbind()).transpose(1, 2).flatten(-2))
        return y


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))


class Block(nn.Module):
    """A block of the ViT: attention and MLP, each after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention, self.mlp = Attention(size.width, size.heads), mlp(size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class ViT(nn.Module):
    """Map pictures [B, channels, side, side] to scores of classes, read from a token of its own."""

    def __init__(self, size: Size, classes: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(size.channels, size.width, size.patch, size.patch)
        self.class_embedding = nn.Parameter(torch.zeros(size.width))
        self.position_embedding = nn.Parameter(0.02 * torch.randn(size.patches + 1, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.classifier = nn.Linear(size.width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        patches = self.patch_embed(pictures).flatten(2).transpose(1, 2)
        first = self.class_embedding.to(patches.dtype).expand(len(patches), 1, -1)
        x = torch.cat((first, patches), 1) + self.position_embedding
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.classifier(self.norm(x[:, 0]))
        return scores


class ConditionedBlock(nn.Module):
    """A block of the DiT: shifts, scales and gates of both halves come from the condition (adaLN-zero)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width, elementwise_affine=False)
        self.attention, self.mlp = Attention(size.width, size.heads), mlp(size.width)
        self.adaLN_modulation = modulation(size.width, 6)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(condition)[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm(x) * (1 + scale1) + shift1)
        y: Tensor = x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)
        return y


def modulation(width: int, parts: int) -> nn.Sequential:
    """Return the layers from a condition to rows of shifts, scales and gates, which begin at zero."""
    last = nn.Linear(width, parts * width)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.SiLU(), last)


class DiT(nn.Module):
    """Map noisy latents [B, channels, side, side], their times in [0, 1] and classes to velocities of that shape."""

    def __init__(self, size: Size, classes: int) -> None:
        super().__init__()
        self.size = size
        self.patch_embed = nn.Conv2d(size.channels, size.width, size.patch, size.patch)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(size.patches, size.width))
        self.time_embed = nn.Sequential(nn.Linear(256, size.width), nn.SiLU(), nn.Linear(size.width, size.width))
        self.class_embed = nn.Embedding(classes, size.width)
        self.blocks = nn.ModuleList(ConditionedBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, elementwise_affine=False)
        self.adaLN_modulation = modulation(size.width, 2)
        self.proj_out = nn.Linear(size.width, size.patch**2 * size.channels)

    def forward(self, latents: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        x = self.patch_embed(latents).flatten(2).transpose(1, 2) + self.position_embedding
        condition = self.time_embed(waves(times)) + self.class_embed(classes)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.adaLN_modulation(condition)[:, None].chunk(2, -1)
        patches = self.proj_out(self.norm(x) * (1 + scale) + shift).transpose(1, 2)
        return F.fold(patches.float(), self.size.picture, self.size.patch, stride=self.size.patch)


def waves(times: Tensor, count: int = 256) -> Tensor:
    """Return cosines and sines of times, [B, count]."""
    speeds = torch.exp(-math.log(1e4) * torch.arange(count // 2, device=times.device) / (count // 2))
    angles = 1000 * times[:, None] * speeds
    return torch.cat((angles.cos(), angles.sin()), -1)
