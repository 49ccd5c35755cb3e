"""Functions of single elements, and of pairs of them: activations, and what goes along with them in the same pass.

    y = keep(f(x + bias) · scales)                          x [M, K] -> y [M, K]
    y = keep(f(a) · (h(b) + offset) · scales)               gated: x [M, 2H] holds a and b, y [M, H]

`a` is the first half of a row and is the half that is activated (`torch.nn.functional.glu` activates the second), or
with `interleave` = k every other k columns. `bias` has an element for each column of x, `scales` one for each row;
`keep` is dropout: which elements stay is a function of where they are and of `seed`, never of when they are computed,
so that backward finds the same ones and nothing but the seed is kept.

f and h are curves: functions of the same name in `reference.py` and in `triton.py` that return value and slope, entered
in CURVES of both. An activation is an entry of ACTIVATIONS; kernels and layer know no other list of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo import backend
from octavo.kernels.column_sums import column_sums


class Function(NamedTuple):
    """What is done to every element, or pair."""

    curve: str
    gated: bool = False
    alpha: float = 1.0  # the curve's own setting
    limit: float | None = None  # gated: a is at most this, b at most this in magnitude
    gate: str = "linear"  # gated: the curve of b, after it was clamped
    beta: float = 1.0  # that curve's own setting
    offset: float = 0.0  # gated: added to that
    interleave: int = 0  # gated: a and b take turns, so many columns each; 0: by halves
    drop: float = 0.0  # how likely an element is left out; the others are divided by how likely they are kept

    @property
    def remembers(self) -> bool:
        """Whether the gradient depends on x."""
        return self.gated or self.curve != "linear"

    @property
    def changes(self) -> bool:
        """Whether dx differs from dy, where there are no scales."""
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

DRAWN_BITS = 30  # of randomness for each element
DRAWS = 1 << DRAWN_BITS
STREAM = 2  # of the generator: stochastic rounding draws from 0 and 1


def threshold(drop: float) -> int:
    """An element whose random bits are below this is left out."""
    return round(drop * DRAWS)


def kept_scale(drop: float) -> float:
    """By what an element that is kept is multiplied: nothing is added to or taken from the sum on average."""
    left = DRAWS - threshold(drop)
    return DRAWS / left if left else 0.0


class Inputs(NamedTuple):
    """The tensors of a forward. Its backward takes x too, unless the function remembers nothing."""

    x: Tensor | None
    scales: Tensor | None = None
    bias: Tensor | None = None
    seed: Tensor | None = None


class Wanted(NamedTuple):
    """The gradients that a backward makes: dx, and in these dtypes those of scales and bias."""

    x: bool = True
    scales: torch.dtype | None = None
    bias: torch.dtype | None = None


ONLY_X = Wanted()


class Gradients(NamedTuple):
    x: Tensor | None
    scales: Tensor | None
    bias: Tensor | None


def forward(
    fn: Function, x: Tensor, scales: Tensor | None = None, bias: Tensor | None = None, seed: Tensor | None = None
) -> Tensor:
    """y, contiguous, in x's dtype."""
    width = x.shape[1] // 2 if fn.gated else x.shape[1]
    if x.shape[0] == 0 or width == 0:
        return torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    y: Tensor = backend.twin(__name__, x).forward(fn, x, scales, bias, seed)
    return y


def backward(
    fn: Function,
    dy: Tensor,
    x: Tensor | None,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    wanted: Wanted = ONLY_X,
) -> Gradients:
    """The gradients that are wanted. `x` may be missing where `fn.remembers` nothing."""
    m, width = dy.shape
    sums_dy = not fn.changes and scales is None  # then dx is not needed for the gradient of the bias
    needs_dx = wanted.x or (wanted.bias is not None and not sums_dy)
    shape = (m, 2 * width if fn.gated else width)
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device) if needs_dx else None
    ds = torch.zeros(m, dtype=wanted.scales, device=dy.device) if wanted.scales is not None else None
    if m and width and (dx is not None or ds is not None):
        backend.twin(__name__, dy).backward(fn, dy, Inputs(x, scales, bias, seed), dx, ds)
    source = dy if sums_dy else dx
    db = None if wanted.bias is None or source is None else column_sums(source, wanted.bias)
    return Gradients(dx if wanted.x else None, ds, db)
