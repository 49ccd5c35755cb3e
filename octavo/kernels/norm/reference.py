"""Norms in plain torch: float64, rounded once, so that no result depends on the order of a sum."""

import torch
from torch import Tensor

from octavo.kernels.norm import Gradients, Norm, Normed


def forward(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Normed:
    wide = x.double()
    mean = wide.mean(1) if norm.centers else None
    centered = wide if mean is None else wide - mean[:, None]
    rstd = (_average(norm, centered * centered) + norm.eps).rsqrt()
    y = centered * rstd[:, None]
    if weight is not None:
        y = y * _gamma(norm, weight)
    if bias is not None:
        y = y + bias.double()
    return Normed(y.to(x.dtype), None if mean is None else mean.float(), rstd.float())


def backward(
    norm: Norm,
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    x_grad: bool,
    weight_grad: torch.dtype | None,
    bias_grad: torch.dtype | None,
    added: Tensor | None,
) -> Gradients:
    g, r = dy.double(), rstd.double()[:, None]
    found = (x.double() if mean is None else x.double() - mean.double()[:, None]) * r
    dw = None if weight_grad is None else (g * found).sum(0).to(weight_grad)
    db = None if bias_grad is None else g.sum(0).to(bias_grad)
    if not x_grad:
        return Gradients(None, dw, db)
    if weight is not None:
        g = g * _gamma(norm, weight)
    dx = g - found * _average(norm, g * found)[:, None]
    if norm.centers:
        dx = dx - g.mean(1, keepdim=True)
    dx = dx * r if added is None else dx * r + added.double()
    return Gradients(dx.to(dy.dtype), dw, db)


def _average(norm: Norm, v: Tensor) -> Tensor:
    return v.mean(1) if norm.averages else v.sum(1)


def _gamma(norm: Norm, weight: Tensor) -> Tensor:
    return weight.double() + 1 if norm.zero_centered else weight.double()
