"""Activations, elementwise or gated, with the bias, row scales and dropout that run in the same pass.

    y = keep(f(x + bias) · scales)                          x [M, K] -> y [M, K]
    y = keep(f(a) · (h(b) + offset) · scales)               gated: x [M, 2H] holds a and b, y [M, H]

The kernel activates `a`, the first half of a row (`torch.nn.functional.glu` activates the second half); with
`interleave` = k, `a` is every other k columns. `bias` has one element per column of x, `scales` one per row. `keep` is
dropout: an element's position and `seed` alone decide whether it is kept, never the time of the computation, so that
backward draws the same mask again and only the seed is saved.

f and h are curves: functions that return value and slope, defined under one name in `reference.py` and in `triton.py`
and listed in CURVES of both. An activation is an entry of ACTIVATIONS, the only list that kernels and layer use.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo import backend
from octavo.kernels.column_sums import column_sums


class Function(NamedTuple):
    """The function that a kernel applies to every element, or to every pair (a, b) if it is gated."""

    curve: str
    gated: bool = False
    alpha: float = 1.0  # the curve's own setting
    limit: float | None = None  # gated: a is at most this, b at most this in magnitude
    gate: str = "linear"  # gated: the curve applied to b after the clamp
    beta: float = 1.0  # the gate curve's own setting
    offset: float = 0.0  # gated: added to the value of the gate curve
    interleave: int = 0  # gated: a and b alternate every so many columns; 0: they are the halves of a row
    drop: float = 0.0  # probability that dropout zeroes an element; kept elements are divided by 1 - drop

    @property
    def remembers(self) -> bool:
        """Whether the gradient depends on x."""
        return self.gated or self.curve != "linear"

    @property
    def changes(self) -> bool:
        """Whether dx can differ from dy when there are no scales."""
        return self.remembers or self.alpha != 1.0 or self.drop != 0.0


ACTIVATIONS = {
    "gelu": Function("gelu"),  # by tanh
    "qgelu": Function("swish", alpha=1.702),
    "relu": Function("relu"),
    "srelu": Function("srelu"),
    "silu": Function("swish"),
    "linear": Function("linear"),  # alpha · x
    "glu": Function("sigmoid", gated=True),
    "geglu": Function("gelu", gated=True),
    "qgeglu": Function("swish", gated=True, alpha=1.702),
    "reglu": Function("relu", gated=True),
    "sreglu": Function("srelu", gated=True),
    "swiglu": Function("swish", gated=True),
    "clamped-swiglu": Function("swish", gated=True, alpha=1.702, limit=7.0, offset=1.0),
    "situglu": Function("situ", gated=True, alpha=4.0, gate="softcap", beta=25.0),
}

DRAWN_BITS = 30  # random bits that dropout draws for each element
DRAWS = 1 << DRAWN_BITS
STREAM = 2  # Philox stream of dropout; stochastic rounding uses streams 0 and 1


def threshold(drop: float) -> int:
    """Return the bound below which an element's random bits drop it."""
    return round(drop * DRAWS)


def kept_scale(drop: float) -> float:
    """Return the multiplier of kept elements, which leaves the expected sum unchanged."""
    left = DRAWS - threshold(drop)
    return DRAWS / left if left else 0.0


class Inputs(NamedTuple):
    """The tensors of a forward. Backward needs x again only if `fn.remembers`."""

    x: Tensor | None
    scales: Tensor | None = None
    bias: Tensor | None = None
    seed: Tensor | None = None


class Wanted(NamedTuple):
    """The gradients that a backward computes: dx, and those of scales and bias in the given dtypes."""

    x: bool = True
    scales: torch.dtype | None = None
    bias: torch.dtype | None = None


ONLY_X = Wanted()


class Gradients(NamedTuple):
    x: Tensor | None
    scales: Tensor | None
    bias: Tensor | None


def forward(
    fn: Function,
    x: Tensor,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    end: Tensor | None = None,
) -> Tensor:
    """Return y, contiguous, in x's dtype. If `end` is given, int32 [1] on x's device, rows from there on are not read,
    and theirs of y are undefined."""
    width = x.shape[1] // 2 if fn.gated else x.shape[1]
    if x.shape[0] == 0 or width == 0:
        return torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    return backend.implementation(__name__, x).forward(fn, x, scales, bias, seed, end)


def backward(
    fn: Function,
    dy: Tensor,
    x: Tensor | None,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    wanted: Wanted = ONLY_X,
    end: Tensor | None = None,
) -> Gradients:
    """Compute the gradients named in `wanted`. `x` may be None unless `fn.remembers`. If `end` is given, rows from
    there on are not read: theirs of dx are undefined, and their scales have a gradient of zero. Sums for a bias would
    include them, so that the caller adds those up."""
    assert end is None or wanted.bias is None
    m, width = dy.shape
    sums_dy = not fn.changes and scales is None  # then dx equals dy, and the bias gradient needs no dx
    needs_dx = wanted.x or (wanted.bias is not None and not sums_dy)
    shape = (m, 2 * width if fn.gated else width)
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device) if needs_dx else None
    ds = torch.zeros(m, dtype=wanted.scales, device=dy.device) if wanted.scales is not None else None
    if m and width and (dx is not None or ds is not None):
        backend.implementation(__name__, dy).backward(fn, dy, Inputs(x, scales, bias, seed), dx, ds, end)
    source = dy if sums_dy else dx
    db = None if wanted.bias is None or source is None else column_sums(source, wanted.bias)
    return Gradients(dx if wanted.x else None, ds, db)
