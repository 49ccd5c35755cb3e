"""The transpose of bytes on the GPU, in words of four codes.

A program reads four rows at a time as words, sorts the sixteen bytes of each 4x4 square into the words of four columns
within a thread, and transposes tiles of those words. Only whole words pass through shared memory, and memory is read
and written in runs of 128 bytes. Matrices whose sides are not multiples of four take torch's copy.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.launch import Launch
from octavo.quant import tile
from octavo.quant.byte_transpose import reference
from octavo.quant.tile import Config, Variant, tile_index

WORD = 4
CONFIGS = (Config(32, 32, 4), Config(32, 64, 8))  # tiles in words of four codes, both ways


@triton.jit
def _byte(word, N: tl.constexpr):
    return (word >> (8 * N)) & 0xFF


@triton.jit
def _transpose_kernel(codes, out, M, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Transpose words of four codes: `codes` has [4 M, K] words, which are [4 M, 4 K] bytes, `out` [4 K, M] words."""
    pm, pk = tile_index(K, COLUMNS)
    i, j = pm * ROWS + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i < M)[:, None] & (j < K)[None, :]
    at = codes + 4 * i.to(tl.int64)[:, None] * K + j[None, :]
    a = tl.load(at, mask=inside, other=0)
    b = tl.load(at + K, mask=inside, other=0)
    c = tl.load(at + 2 * K, mask=inside, other=0)
    d = tl.load(at + 3 * K, mask=inside, other=0)
    to = out + 4 * j.to(tl.int64)[:, None] * M + i[None, :]
    turned = (j < K)[:, None] & (i < M)[None, :]
    for n in tl.static_range(4):
        word = _byte(a, n) | (_byte(b, n) << 8) | (_byte(c, n) << 16) | (_byte(d, n) << 24)
        tl.store(to + n * M, tl.trans(word), mask=turned)


def transpose(codes: Tensor, out: Tensor, config: Config = CONFIGS[0]) -> None:
    m, k = codes.shape
    whole = m % WORD == 0 and k % WORD == 0 and codes.is_contiguous() and out.is_contiguous()
    if not whole or (codes.data_ptr() | out.data_ptr()) % WORD:
        reference.transpose(codes, out)
    elif codes.numel():
        _transpose_launch(m // WORD, k // WORD, config)(codes.view(torch.int32), out.view(torch.int32))


@lru_cache(maxsize=4096)
def _transpose_launch(m: int, k: int, config: Config) -> Launch:
    return tile.launch(_transpose_kernel, (m, k), (), config)


def variants() -> list[Variant]:
    return [
        tile.variant_of(
            f"transpose_bytes {config}", _transpose_launch(*tile.EXAMPLE[0], config), codes="*i32", out="*i32"
        )
        for config in CONFIGS
    ]
