"""A program has one position of one sequence: all heads of q, then those of k, and in backward those of v.

In torch's operations the same took ten kernels a layer. All heads of a position share its sines and cosines, which one
program therefore reads once.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.launch import Launch

HEADS, WARPS = 8, 4  # heads at a time


@triton.jit
def _turn(
    x, y, cosine, of_low, of_high, count, step_x, step_y,
    HALF: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate `count` heads of x, `step_x` elements apart, to y. `of_low` and `of_high` are the sine and its negative:
    what the low channels give to the high ones, and the high channels to the low ones."""
    channels = tl.arange(0, WIDE)
    # heads of one position share its factors, which stay in registers
    for first in range(0, count, HEADS):
        heads = first + tl.arange(0, HEADS)
        live = (heads < count)[:, None] & (channels < HALF)[None, :]
        at_x = x + heads[:, None] * step_x + channels[None, :]
        low = tl.load(at_x, mask=live, other=0.0).to(tl.float32)
        high = tl.load(at_x + HALF, mask=live, other=0.0).to(tl.float32)
        at_y = y + heads[:, None] * step_y + channels[None, :]
        # the product of `low` is fused into the sum, as in `rotary.cast`
        tl.store(at_y, tl.fma(low, cosine, high * of_high).to(y.dtype.element_ty), mask=live)
        tl.store(at_y + HALF, tl.fma(low, of_low, high * cosine).to(y.dtype.element_ty), mask=live)


@triton.jit
def _copy(x, y, count, step_x, step_y, HALF: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr):
    """Copy `count` heads of x, `step_x` elements apart, to y."""
    channels = tl.arange(0, 2 * WIDE)
    for first in range(0, count, HEADS):
        heads = first + tl.arange(0, HEADS)
        live = (heads < count)[:, None] & (channels < 2 * HALF)[None, :]
        v = tl.load(x + heads[:, None] * step_x + channels[None, :], mask=live, other=0.0)
        tl.store(y + heads[:, None] * step_y + channels[None, :], v, mask=live)


@triton.jit
def _factors(own, other, t, HALF: tl.constexpr, WIDE: tl.constexpr):
    channels = tl.arange(0, WIDE)
    live = channels < HALF
    cosine = tl.load(own + t * 2 * HALF + channels, mask=live, other=0.0).to(tl.float32)
    sine = tl.load(other + t * 2 * HALF + HALF + channels, mask=live, other=0.0).to(tl.float32)
    # not -sine, which Triton computes as 0 - sine: a sine of zero would lose its sign
    return cosine[None, :], sine[None, :], -1.0 * sine[None, :]


@triton.jit
def _rotate_kernel(
    qkv, own, other, q, k, T, H, S, HALF: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    cosine, sine, negative = _factors(own, other, row % T, HALF, WIDE)
    D: tl.constexpr = 2 * HALF
    at = row.to(tl.int64)
    x = qkv + at * (H + 2 * S) * D
    _turn(x, q + at * H * D, cosine, sine, negative, H, D, D, HALF, WIDE, HEADS)
    _turn(x + H * D, k + at * S * D, cosine, sine, negative, S, D, D, HALF, WIDE, HEADS)


@triton.jit
def _back_kernel(
    dq, dk, dv, own, other, out, T, H, S, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    HALF: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    b, t = (row // T).to(tl.int64), (row % T).to(tl.int64)
    cosine, sine, negative = _factors(own, other, row % T, HALF, WIDE)
    D: tl.constexpr = 2 * HALF
    y = out + row.to(tl.int64) * (H + 2 * S) * D
    _turn(dq + b * q_batch + t * q_token, y, cosine, negative, sine, H, q_head, D, HALF, WIDE, HEADS)
    _turn(dk + b * k_batch + t * k_token, y + H * D, cosine, negative, sine, S, k_head, D, HALF, WIDE, HEADS)
    # not a turn by a cosine of one and a sine of zero: that would make the partner of an Inf NaN
    _copy(dv + b * v_batch + t * v_token, y + (H + S) * D, S, v_head, D, HALF, WIDE, HEADS)


def rotate(qkv: Tensor, own: Tensor, other: Tensor, heads: int, shared: int) -> tuple[Tensor, Tensor]:
    batch, length, width = qkv.shape
    channels = width // (heads + 2 * shared)
    q = torch.empty(batch, length, heads, channels, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(batch, length, shared, channels, dtype=qkv.dtype, device=qkv.device)
    if qkv.numel():
        _forward(batch * length, length, heads, shared, channels)(qkv, own.contiguous(), other.contiguous(), q, k)
    return q, k


def rotate_back(dq: Tensor, dk: Tensor, dv: Tensor, own: Tensor, other: Tensor) -> Tensor:
    # torch's attention returns gradients in strides of its own: heads and tokens may lie either way
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    batch, length, heads, channels = dq.shape
    shared = dk.shape[2]
    out = torch.empty(batch, length, (heads + 2 * shared) * channels, dtype=dq.dtype, device=dq.device)
    if out.numel():
        strides = tuple(step for t in (dq, dk, dv) for step in t.stride()[:3])
        launch = _backward(batch * length, length, heads, shared, channels, strides)
        launch(dq, dk, dv, own.contiguous(), other.contiguous(), out)
    return out


@lru_cache(maxsize=4096)
def _forward(rows: int, length: int, heads: int, shared: int, channels: int) -> Launch:
    return Launch(_rotate_kernel, rows, (length, heads, shared), num_warps=WARPS, **_constants(channels))


@lru_cache(maxsize=4096)
def _backward(
    rows: int, length: int, heads: int, shared: int, channels: int, strides: tuple[int, ...]
) -> Launch:  # fmt: skip
    return Launch(_back_kernel, rows, (length, heads, shared, *strides), num_warps=WARPS, **_constants(channels))


def _constants(channels: int) -> dict[str, int]:
    return {"HALF": channels // 2, "WIDE": triton.next_power_of_2(channels // 2), "HEADS": HEADS}
