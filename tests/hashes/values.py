"""Inputs and weights that are the same on every machine and with every version of torch and numpy.

Raw words of PCG64, whose stream numpy guarantees, become multiples of a power of two with 8 bits of mantissa: bfloat16,
float16 and float32 hold them exactly, and every narrower format has to round them.
"""

import zlib

import numpy as np
import torch
from torch import Tensor

LEVELS = 511  # -255 ... 255


def integers(seed: str, count: int) -> np.ndarray:
    """Integers from -255 to 255 that follow from the text `seed`."""
    words = np.random.PCG64(zlib.crc32(seed.encode())).random_raw(count)
    return (np.asarray(words, dtype=np.uint64) % np.uint64(LEVELS)).astype(np.int64) - LEVELS // 2


def grid(
    seed: str, *shape: int, unit: float = 2**-6, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    """Multiples of `unit` in rows and blocks of 16 columns of different magnitude, so that scales differ too."""
    whole = torch.from_numpy(integers(seed, int(np.prod(shape, dtype=np.int64)))).double().reshape(shape)
    whole *= unit
    if len(shape) > 1:
        rows = torch.arange(shape[-2]) % 3
        columns = torch.arange(shape[-1]) // 16 % 4
        whole *= torch.exp2(-(rows[:, None] + columns[None, :]).double())
    return whole.to(dtype).to(device)
