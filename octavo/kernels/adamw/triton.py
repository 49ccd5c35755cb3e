"""AdamW in one pass: every tensor is read once and written once, in tiles of whole blocks of 8-bit moments."""

# mypy: allow-untyped-defs, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.adamw import BLOCK, Moments
from octavo.launch import Launch
from octavo.quant.tile import Variant

ROWS, WARPS = 8, 4  # blocks of a tile: 0.94 of copy bandwidth, 0.73 with 8-bit moments; 16 rows take 0.93 and 0.62
_MAX: tl.constexpr = tl.constexpr(448.0)
_SMALLEST: tl.constexpr = tl.constexpr(2.0**-9)


@triton.jit
def _encoded(x, least: tl.constexpr):
    """Codes [R, B] of rows that share a scale, and their scales [R]."""
    scale = tl.max(tl.abs(x), 1) * (1 / _MAX)
    scaled = tl.where((scale > 0)[:, None], tl.div_rn(x, scale[:, None] + tl.zeros_like(x)), 0.0)
    scaled = tl.where((scaled > 0) & (scaled < least), least, scaled)
    scaled = tl.where(scaled > _MAX, _MAX, tl.where(scaled < -_MAX, -_MAX, scaled))
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale


@triton.jit
def _noise(seed, block, B: tl.constexpr, R: tl.constexpr):
    """16 random bits for each element of [R, B]: one draw of Philox serves eight neighbours."""
    index = block[:, None] * (B // 8) + tl.arange(0, B // 8)[None, :].to(tl.int64)
    zero = (index & 0).to(tl.uint32)
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed), low, high, zero + tl.load(seed + 1).to(tl.uint32), zero)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (R, B))


@triton.jit
def _adamw_kernel(
    values, grad, average, square, average_scale, square_scale, settings, seed, copy, amax, N,
    R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = block[:, None] * B + tl.arange(0, B)[None, :]
    live = at < N
    g = tl.load(grad + at, mask=live, other=0.0).to(tl.float32)
    if average_scale is None:
        m = tl.load(average + at, mask=live, other=0.0).to(tl.float32)
        v = tl.load(square + at, mask=live, other=0.0).to(tl.float32)
    else:
        is_block = block * B < N
        m = tl.load(average + at, mask=live, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        v = tl.load(square + at, mask=live, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        m *= tl.load(average_scale + block, mask=is_block, other=0.0)[:, None]
        v *= tl.load(square_scale + block, mask=is_block, other=0.0)[:, None]
        v *= v
    p = tl.load(values + at, mask=live, other=0.0).to(tl.float32)
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
        rounded = ((bits + _noise(seed, block, B, R)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        p = tl.where((bits & 0x7F800000) == 0x7F800000, p, rounded)
    tl.store(values + at, p.to(values.dtype.element_ty), mask=live)
    if copy is not None:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=live)
    # floats that are not negative compare as their bits do; a NaN compares as the largest
    largest = tl.max(tl.abs(tl.where(live, p, 0.0)).to(tl.int32, bitcast=True))
    tl.atomic_max(amax, largest)


def adamw(
    values: Tensor, grad: Tensor, moments: Moments, settings: Tensor, seed: Tensor | None, copy: Tensor | None
) -> Tensor:
    amax = torch.zeros(1, dtype=torch.int32, device=values.device)
    if values.numel():
        _launch(values.numel())(values, grad.contiguous(), *moments, settings, seed, copy, amax)
    return amax.view(torch.float32)


@lru_cache(maxsize=4096)
def _launch(n: int) -> Launch:
    return Launch(_adamw_kernel, triton.cdiv(n, ROWS * BLOCK), (n,), num_warps=WARPS, R=ROWS, B=BLOCK)


def variants() -> list[Variant]:
    found = []
    for values, copy in (("*fp32", None), ("*fp32", "*bf16"), ("*bf16", None)):
        for grad in ("*fp32", "*bf16"):
            for moment in ("*fp32", "*bf16", "*u8"):
                scale = "*fp32" if moment == "*u8" else None
                types = {
                    "values": values, "grad": grad, "average": moment, "square": moment, "average_scale": scale,
                    "square_scale": scale, "settings": "*fp32", "seed": "*i64" if values == "*bf16" else None,
                    "copy": copy, "amax": "*i32", "N": "i32",
                }  # fmt: skip
                name = f"adamw of {values} by {grad}, moments {moment}, copy {copy}"
                signature = {key: kind for key, kind in types.items() if kind is not None}
                absent = {key: None for key, kind in types.items() if kind is None}
                found.append(Variant(name, _adamw_kernel, signature, {**absent, "R": ROWS, "B": BLOCK}, WARPS))
    return found
