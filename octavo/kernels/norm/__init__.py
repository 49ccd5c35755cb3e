"""Normalisation of x [M, N] by the statistics of each row.

    layer    x̂ = (x - mean) · rstd,  rstd = 1/√(variance + eps)       y = x̂ · γ + β
    rms      x̂ = x · rstd,           rstd = 1/√(mean of x² + eps)     y = x̂ · γ
    l2       x̂ = x · rstd,           rstd = 1/√(sum of x² + eps)      y = x̂

    dx = rstd · (g - x̂ · mean(g · x̂) - mean(g)),  g = dy · γ          the last mean for layer alone; l2 takes sums
    dγ = Σ dy · x̂    dβ = Σ dy                                         over the rows

Backward takes x again, with the mean and rstd that forward computed, as float32 [M]. With `zero_centered` the weight
is γ - 1. y and dx have x's dtype. `added` is another gradient of x, which is added to dx before dx is rounded.

A forward with a `Residual` normalises z = x + extra instead of x, and writes z too, in the pass that reads x and extra.
z is rounded to x's dtype before it is normalised, so that y, mean and rstd are those of z written and then normalised.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo import backend
from octavo.kernels.column_sums import column_sums


class Norm(NamedTuple):
    kind: str  # "layer", "rms", "l2"
    eps: float
    zero_centered: bool = False

    @property
    def centers(self) -> bool:
        return self.kind == "layer"


class Residual(NamedTuple):
    """A tensor to add to x before the norm, and memory for the sum."""

    extra: Tensor  # [M, N], in x's dtype
    z: Tensor  # [M, N], contiguous, in x's dtype: x + extra is written to it


def summed(x: Tensor, residual: Residual | None) -> Tensor:
    """Write the sum in a pass of its own and return it; return x if there is nothing to add."""
    return x if residual is None else torch.add(x, residual.extra, out=residual.z)


class Normed(NamedTuple):
    y: Tensor  # [M, N]
    mean: Tensor | None  # float32 [M]
    rstd: Tensor  # float32 [M]


class Statistics(NamedTuple):
    """Mean and rstd of the rows, as forward computed them."""

    mean: Tensor | None  # float32 [M]
    rstd: Tensor | None  # float32 [M]; None if only dβ is wanted


class Wanted(NamedTuple):
    """The gradients that a backward computes: dx, and dγ and dβ in the given dtypes."""

    x: bool = True
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None


ONLY_X = Wanted()


class Gradients(NamedTuple):
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def forward(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Residual | None = None
) -> Normed:
    if x.numel() == 0:
        empty = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return Normed(y, empty if norm.centers else None, empty.clone())
    return backend.implementation(__name__, x).forward(norm, x, weight, bias, residual)


def backward(
    norm: Norm,
    dy: Tensor,
    x: Tensor | None,
    statistics: Statistics,
    weight: Tensor | None,
    wanted: Wanted = ONLY_X,
    added: Tensor | None = None,
) -> Gradients:
    """Compute the gradients named in `wanted`. dβ alone needs only dy. Only dx uses `weight` and `added`, a contiguous
    tensor like dx."""
    if not wanted.x and wanted.weight is None:
        return Gradients(None, None, None if wanted.bias is None else column_sums(dy, wanted.bias))
    assert x is not None and statistics.rstd is not None
    if dy.numel() == 0:
        dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if wanted.x else None
        sums = (None if d is None else torch.zeros(dy.shape[1], dtype=d, device=dy.device) for d in wanted[1:])
        return Gradients(dx, *sums)
    return backend.implementation(__name__, dy).backward(norm, dy, x, statistics, weight, wanted, added)
