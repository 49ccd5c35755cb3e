"""Philox4x32-10, the counter-based generator of stochastic rounding: random bits depend on position, not time.

One call returns 16 bytes, one for each element of a 16-block: byte j, little-endian over the words, is r of element j.

    key     = seed (64 bits)
    counter = block index (64 bits), step (32 bits), stream (0 for the row orientation, 1 for the column's)

The same (seed, step) gives the same bytes on every device and after a resume; the block index counts along the rows of
the orientation being written.
"""

import torch
from torch import Tensor

FACTORS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low words of a*b. The product may wrap past int64's sign; its bits are right."""
    product = b * a
    return (product >> 32) & _LOW, product & _LOW


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four words for each counter; words are int64 tensors below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(FACTORS[0], c0)
        high1, low1 = _multiply(FACTORS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & _LOW, (k1 + KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def random_bytes(rows: int, row_blocks: int, seed: Tensor, stream: int, first: int = 0) -> Tensor:
    """Return r of every element, int64 [rows, 16*row_blocks], from seed = [seed, step] and the number of the first
    block."""
    index = torch.arange(first, first + rows * row_blocks, device=seed.device, dtype=torch.int64)
    zero = torch.zeros_like(index)
    step = zero + (seed[1] & _LOW)
    key = (seed[0] & _LOW, (seed[0] >> 32) & _LOW)
    words = philox((index & _LOW, index >> 32, step, zero + stream), key)
    r = torch.stack([(w >> shift) & 0xFF for w in words for shift in (0, 8, 16, 24)], -1)
    return r.view(rows, row_blocks * 16)
