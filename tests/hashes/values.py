"""Inputs and weights that are the same on every machine and with every version of torch and numpy.

Raw words of PCG64, whose stream numpy guarantees, become multiples of a power of two with 8 bits of mantissa: bfloat16
and float32 hold them exactly, and every narrower format has to round them.

Magnitudes change every 16 rows and columns by powers of two. x falls where w rises, along each contraction, and so do x
and dy: every term of a sum then counts, and it matters which elements share a scale. Were they alike, all recipes with
scales that are powers of two would give the same bits.
"""

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEVELS = 511  # -255 ... 255


def integers(seed: str, count: int) -> np.ndarray:
    """Integers from -255 to 255 that follow from the text `seed`."""
    words = np.random.PCG64(zlib.crc32(seed.encode())).random_raw(count)
    return (np.asarray(words, dtype=np.uint64) % np.uint64(LEVELS)).astype(np.int64) - LEVELS // 2


def grid(seed: str, *shape: int, unit: float = 2**-6, signs: tuple[int, int] = (-1, -1)) -> Tensor:
    """float32 multiples of `unit`, in magnitudes that follow `signs` along the last two dims."""
    whole = torch.from_numpy(integers(seed, int(np.prod(shape, dtype=np.int64)))).double().reshape(shape)
    whole *= unit
    if len(shape) > 1:
        rows, columns = (sign * exponents(size) for sign, size in zip(signs, shape[-2:], strict=True))
        whole *= torch.exp2(rows[:, None] + columns[None, :])
    return whole.float()


def exponents(size: int) -> Tensor:
    """From -6 to 5 within the first block of 128, alike in no two of its blocks of 32, and 9 after it."""
    blocks = torch.arange(size) // 16
    return torch.where(blocks < 8, blocks * 5 % 12 - 6, 9).double()


def rows_of(seed: str, lead: tuple[int, ...], width: int, **settings: Any) -> Tensor:
    """A grid of rows, in leading dims."""
    return grid(seed, math.prod(lead), width, **settings).reshape(*lead, width)
