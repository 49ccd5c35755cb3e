"""Stochastic rounding to E4M3 in plain torch."""

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.quant import scale_blocks
from octavo.quant.nvfp4.philox import random_bytes

_NORMAL = 2.0**-6  # the least normal number; below it, codes are 2^-9 apart


def stochastic_codes(
    values: Tensor, scale: Tensor, block: tuple[int, int], codes: Tensor, seed: Tensor, first: int
) -> None:
    m, k = values.shape
    spread = scale_blocks.spread(scale, block, m, k)[:m].expand(m, k)  # groups have scales of padding
    x = torch.where(spread > 0, values / spread, 0.0)
    noise = noise_of(first, m, k, seed)
    bits = x.abs().contiguous().view(torch.int32)
    normal = ((bits + (noise << 4).int()) & ~0xFFFFF).view(torch.float32)
    small = (x.abs() * 512 + noise.float() / 65536).floor() / 512
    rounded = torch.where(x.abs() < _NORMAL, small, normal).clamp(max=E4M3.max).copysign(x)
    found = rounded.to(E4M3.dtype).view(torch.uint8)
    codes[:, :k] = torch.where(x.isfinite(), found, codes[:, :k])


def noise_of(first: int, m: int, k: int, seed: Tensor) -> Tensor:
    """Return 16 random bits for each element of m rows, int64 [m, k]."""
    blocks = -(-k // 8)
    r = random_bytes(m, blocks, seed, 0, first * blocks).view(m, -1, 2)
    return (r[:, :k, 0] | r[:, :k, 1] << 8).contiguous()
