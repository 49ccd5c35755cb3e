"""AdamW in one pass: every tensor is read once and written once, in tiles of whole blocks of 8-bit moments."""

# mypy: allow-untyped-defs, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.adamw import BLOCK, Moments
from octavo.kernels.stochastic_codes.triton import noise_of
from octavo.launch import Launch
from octavo.quant.tile import amax_bits, raise_amax

ROWS, WARPS = 8, 4  # blocks of a tile: 0.94 of copy bandwidth, 0.73 with 8-bit moments; 16 rows take 0.93 and 0.62
_MAX: tl.constexpr = tl.constexpr(448.0)
_SMALLEST: tl.constexpr = tl.constexpr(2.0**-9)


@triton.jit
def _encoded(x, least: tl.constexpr):
    """Return codes [R, B] of rows that share a scale, and their scales [R]."""
    scale = tl.max(tl.abs(x), 1) * (1 / _MAX)
    # a block of zeros has scale zero, and 0 / 0 is NaN
    scaled = tl.where((scale > 0)[:, None], tl.div_rn(x, scale[:, None] + tl.zeros_like(x)), 0.0)
    # a root that rounds to zero would divide the next update by eps alone
    scaled = tl.where((scaled > 0) & (scaled < least), least, scaled)
    scaled = tl.where(scaled > _MAX, _MAX, tl.where(scaled < -_MAX, -_MAX, scaled))
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale


@triton.jit
def _raise(amax, x, at, N, SIZE, R: tl.constexpr, B: tl.constexpr):
    """Raise the amaxes of the parts of SIZE elements that a tile lies in."""
    if amax is not None:
        if SIZE is None:
            raise_amax(amax, amax_bits(x))
        else:
            first = tl.program_id(0).to(tl.int64) * (R * B)
            last = tl.minimum(first + R * B, N) - 1
            # a tile may reach into several groups of one parameter
            for part in range(first // SIZE, last // SIZE + 1):
                inside = (at >= part * SIZE) & (at < (part + 1) * SIZE)
                raise_amax(amax + part, amax_bits(tl.where(inside, x, 0.0)))


@triton.jit
def _adamw_kernel(
    values, grad, average, square, average_scale, square_scale, settings, seed, copy, amax, N, SIZE,
    R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = block[:, None] * B + tl.arange(0, B)[None, :]
    live = at < N
    if tl.load(settings + 8) != 0:  # nothing changes, and a scale may still need the amax
        if amax is not None:
            _raise(amax, tl.load(values + at, mask=live, other=0.0).to(tl.float32), at, N, SIZE, R, B)
        return
    # settings are on the device: a captured step reads those of each replay
    g = tl.load(grad + at, mask=live, other=0.0).to(tl.float32) * tl.load(settings + 7)
    if average_scale is None:
        m = tl.load(average + at, mask=live, other=0.0).to(tl.float32)
        v = tl.load(square + at, mask=live, other=0.0).to(tl.float32)
    else:
        is_block = block * B < N
        m = tl.load(average + at, mask=live, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        v = tl.load(square + at, mask=live, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        m *= tl.load(average_scale + block, mask=is_block, other=0.0)[:, None]
        v *= tl.load(square_scale + block, mask=is_block, other=0.0)[:, None]
        # kept as a root: squares span twice as many powers of two as a code has
        v *= v
    p = tl.load(values + at, mask=live, other=0.0).to(tl.float32)
    # in torch's order of operations, which the reference has
    m += tl.load(settings + 3) * (g - m)
    v = v * tl.load(settings + 4) + tl.load(settings + 5) * g * g
    root = tl.sqrt_rn(v)
    p *= tl.load(settings)
    denominator = tl.div_rn(root, tl.load(settings + 2) + tl.zeros_like(root)) + tl.load(settings + 6)
    p -= tl.div_rn(tl.load(settings + 1) * m, denominator)
    if average_scale is None:
        tl.store(average + at, m.to(average.dtype.element_ty), mask=live)
        tl.store(square + at, v.to(square.dtype.element_ty), mask=live)
    else:
        codes, scale = _encoded(m, 0.0)
        tl.store(average + at, codes, mask=live)
        tl.store(average_scale + block, scale, mask=is_block)
        codes, scale = _encoded(root, _SMALLEST)
        tl.store(square + at, codes, mask=live)
        tl.store(square_scale + block, scale, mask=is_block)
    if seed is not None:
        bits = p.to(tl.uint32, bitcast=True)
        index = block[:, None] * (B // 8) + tl.arange(0, B // 8)[None, :].to(tl.int64)
        rounded = ((bits + noise_of(seed, index, R, B)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        # Inf and NaN have no neighbour to round to
        p = tl.where((bits & 0x7F800000) == 0x7F800000, p, rounded)
    tl.store(values + at, p.to(values.dtype.element_ty), mask=live)
    if copy is not None:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=live)
    _raise(amax, tl.where(live, p, 0.0), at, N, SIZE, R, B)


def adamw(
    values: Tensor, grad: Tensor, moments: Moments, settings: Tensor, seed: Tensor | None, copy: Tensor | None,
    amaxes: int,
) -> Tensor | None:  # fmt: skip
    # measured in the same pass: the cast that follows reads the values once
    amax = torch.zeros(amaxes, dtype=torch.float32, device=values.device) if amaxes else None
    if values.numel():
        size = values.numel() // amaxes if amaxes > 1 else None
        _launch(values.numel(), size)(values, grad.contiguous(), *moments, settings, seed, copy, amax)
    return amax


@lru_cache(maxsize=4096)
def _launch(n: int, size: int | None) -> Launch:
    return Launch(_adamw_kernel, triton.cdiv(n, ROWS * BLOCK), (n, size), num_warps=WARPS, R=ROWS, B=BLOCK)
