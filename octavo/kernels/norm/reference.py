"""Norms in plain torch: float64, rounded once, so that no result depends on the order of a sum."""

from torch import Tensor

from octavo.kernels.norm import Gradients, Norm, Normed, Residual, Statistics, Wanted, summed


def forward(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Residual | None = None
) -> Normed:
    wide = summed(x, residual).double()
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
    statistics: Statistics,
    weight: Tensor | None,
    wanted: Wanted,
    added: Tensor | None,
) -> Gradients:
    mean, rstd = statistics
    assert rstd is not None
    g, r = dy.double(), rstd.double()[:, None]
    normed = (x.double() if mean is None else x.double() - mean.double()[:, None]) * r
    dw = None if wanted.weight is None else (g * normed).sum(0).to(wanted.weight)
    db = None if wanted.bias is None else g.sum(0).to(wanted.bias)
    # without dx its parts need not be computed
    if not wanted.x:
        return Gradients(None, dw, db)
    if weight is not None:
        g = g * _gamma(norm, weight)
    dx = g - normed * _average(norm, g * normed)[:, None]
    if norm.centers:
        dx = dx - g.mean(1, keepdim=True)
    # added before the one rounding, as the kernel does
    dx = dx * r if added is None else dx * r + added.double()
    return Gradients(dx.to(dy.dtype), dw, db)


def _average(norm: Norm, v: Tensor) -> Tensor:
    return v.sum(1) if norm.kind == "l2" else v.mean(1)


def _gamma(norm: Norm, weight: Tensor) -> Tensor:
    return weight.double() + 1 if norm.zero_centered else weight.double()
