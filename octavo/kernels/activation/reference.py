"""Activations in plain torch, computed in float64 and rounded once. The result of an element does not depend on its
position in a row; float32's vectorised exponential does."""

import math

import torch
from torch import Tensor

from octavo.kernels.activation import DRAWN_BITS, STREAM, Function, Inputs, kept_scale, threshold
from octavo.quant.nvfp4.philox import philox

Curve = tuple[Tensor, Tensor]  # value, slope
_LOW = 0xFFFFFFFF


def gelu(x: Tensor, alpha: float) -> Curve:
    """Return x · σ(2u), u = √(2/π) (x + 0.044715 x³): equal to x/2 (1 + tanh u), without the cancellation."""
    # by a sigmoid and not by tanh: 1 + tanh u cancels where u is negative
    c = 2 * math.sqrt(2 / math.pi)
    s = torch.sigmoid(c * x * (1 + 0.044715 * x * x))
    return x * s, s + x.clamp(-30, 30) * s * (1 - s) * c * (1 + 3 * 0.044715 * x.clamp(-30, 30) ** 2)


def swish(x: Tensor, alpha: float) -> Curve:
    """Return x · σ(αx)"""
    s = torch.sigmoid(alpha * x)
    slope = s * (1 + (alpha * x).clamp(-1000, 1000) * (1 - s))
    return x * s, torch.where(x.isinf(), torch.nan, slope)  # as torch's own slope, and the kernel's


def sigmoid(x: Tensor, alpha: float) -> Curve:
    s = torch.sigmoid(x)
    return s, s * (1 - s)


def relu(x: Tensor, alpha: float) -> Curve:
    # zero at zero, as torch's; NaN fails the comparison and keeps slope 1
    return torch.relu(x), torch.where(x <= 0, 0.0, torch.ones_like(x))


def srelu(x: Tensor, alpha: float) -> Curve:
    """Return relu(x)²"""
    r = torch.relu(x)
    return r * r, 2 * r


def linear(x: Tensor, alpha: float) -> Curve:
    return alpha * x, torch.full_like(x, alpha)


def softcap(x: Tensor, alpha: float) -> Curve:
    """Return α tanh(x/α)"""
    u = x / alpha
    return alpha * torch.tanh(u), 1 / torch.cosh(u) ** 2


def situ(x: Tensor, alpha: float) -> Curve:
    """Return α tanh(x/α) · σ(x)"""
    s, (cap, slope) = torch.sigmoid(x), softcap(x, alpha)
    return cap * s, s * (slope + cap * (1 - s))


CURVES = {
    "gelu": gelu, "swish": swish, "sigmoid": sigmoid, "relu": relu, "srelu": srelu, "linear": linear,
    "softcap": softcap, "situ": situ,
}  # fmt: skip


def kept(shape: tuple[int, ...], drop: float, seed: Tensor) -> Tensor:
    """Return the dropout mask of an [M, K] matrix. Four neighbours in a row share a counter and take one word each."""
    m, k = shape
    # one counter for every four neighbours, in the order of a row: any tiling draws the same bits
    index = torch.arange(m * -(-k // 4), device=seed.device, dtype=torch.int64)
    zero = torch.zeros_like(index)
    key = (seed[0] & _LOW, (seed[0] >> 32) & _LOW)
    words = philox((index & _LOW, index >> 32, zero + (seed[1] & _LOW), zero + STREAM), key)
    drawn = torch.stack(words, -1).view(m, -1)[:, :k] >> (32 - DRAWN_BITS)
    return drawn >= threshold(drop)


def halves(fn: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """Split the input of a gated function into a and b, each [M, H]."""
    if not fn.interleave:
        return x.chunk(2, 1)  # type: ignore[return-value]
    pairs = x.view(x.shape[0], -1, 2, fn.interleave)
    return pairs[:, :, 0].flatten(1), pairs[:, :, 1].flatten(1)


def joined(fn: Function, a: Tensor, b: Tensor) -> Tensor:
    """Join a and b again: the inverse of `halves`."""
    if not fn.interleave:
        return torch.cat((a, b), 1)
    pairs = torch.stack((a.view(len(a), -1, fn.interleave), b.view(len(b), -1, fn.interleave)), 2)
    return pairs.view(len(a), -1)


def _clamped(fn: Function, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return (a, b) if fn.limit is None else (a.clamp(max=fn.limit), b.clamp(-fn.limit, fn.limit))


def _gate(fn: Function, b: Tensor) -> Curve:
    """Return the factor that multiplies f(a), and its slope, for b already clamped."""
    value, slope = CURVES[fn.gate](b, fn.beta)
    return value + fn.offset, slope


def _wide(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.double().contiguous() if bias is None else x.double() + bias.double()


def _activated(fn: Function, x: Tensor) -> Tensor:
    """Apply the function to x, in float64, before scales and dropout."""
    if not fn.gated:
        return CURVES[fn.curve](x, fn.alpha)[0]
    a, b = _clamped(fn, *halves(fn, x))
    return CURVES[fn.curve](a, fn.alpha)[0] * _gate(fn, b)[0]


def forward(
    fn: Function,
    x: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    end: Tensor | None = None,
) -> Tensor:
    if end is not None:
        # rows past the end stay as the memory was
        y = torch.empty(x.shape[0], x.shape[1] // 2 if fn.gated else x.shape[1], dtype=x.dtype, device=x.device)
        if n := int(end):
            y[:n] = forward(fn, x[:n], _first(scales, n), bias, seed)
        return y
    y = _activated(fn, _wide(x, bias))
    if scales is not None:
        y = y * scales.double()[:, None]
    if seed is not None:
        y = torch.where(kept(tuple(y.shape), fn.drop, seed), y * kept_scale(fn.drop), 0.0)
    return y.to(x.dtype)


def _first(t: Tensor | None, n: int) -> Tensor | None:
    """Return the first n rows, as a view."""
    return None if t is None else t[:n]


def backward(
    fn: Function, dy: Tensor, inputs: Inputs, dx: Tensor | None, ds: Tensor | None, end: Tensor | None = None
) -> None:
    if end is not None:
        if n := int(end):
            own = inputs._replace(x=_first(inputs.x, n), scales=_first(inputs.scales, n))
            backward(fn, dy[:n], own, _first(dx, n), _first(ds, n))
        return
    x, scales, bias, seed = inputs
    g = dy.double()
    if seed is not None:
        g = torch.where(kept(tuple(g.shape), fn.drop, seed), g * kept_scale(fn.drop), 0.0)
    wide = torch.zeros_like(g) if x is None else _wide(x, bias)
    if ds is not None:
        ds.copy_((g * _activated(fn, wide)).sum(1))
    if dx is None:
        return
    if scales is not None:
        g = g * scales.double()[:, None]
    if not fn.gated:
        dx.copy_(g * CURVES[fn.curve](wide, fn.alpha)[1])
        return
    a, b = halves(fn, wide)
    top, within = _clamped(fn, a, b)
    value, slope = CURVES[fn.curve](top, fn.alpha)
    gate, gate_slope = _gate(fn, within)
    da, db = g * slope * gate, g * value * gate_slope
    if fn.limit is not None:
        da, db = torch.where(a <= fn.limit, da, 0.0), torch.where(b.abs() <= fn.limit, db, 0.0)
    dx.copy_(joined(fn, da, db))
