"""A grouped MLP as one Sequential, and batches for it."""

import torch

import octavo
from octavo import ops
from tests.support.linear_oracle import spiky
from tests.support.sequentials import fill

G, H, FFN = 3, 48, 32
SIZES, SPARE = (30, 0, 17), 6
USED = sum(SIZES)
ROWS = USED + SPARE
RULES = ("grouped-mlp",)


def gated(act):
    return not isinstance(act, ops.SReLU | ops.GELU)


def mlp(recipe, make=ops.ScaledSwiGLU, *, rules=(), bias=False, groups=G, hidden=H, second=None, **settings):
    """The experts of a mixture; `second`: settings of the second layer alone."""
    act = make()
    common = {"bias": bias, "recipe": recipe, **settings}
    layers = (
        octavo.GroupedLinear(groups, hidden, FFN * (2 if gated(act) else 1), **common),
        act,
        octavo.GroupedLinear(groups, FFN, hidden, **(common | (second or {}))),
    )
    return fill(octavo.Sequential(*layers, rules=rules))


def sizes(of=SIZES):
    return torch.tensor(of)


def batch(of=SIZES, spare=SPARE, seed=1, scaled=True, hidden=H, dtype=torch.float32, poison=float("nan")):
    """x, sizes, probabilities (where the activation takes them), sizes; and dy. The tails hold NaN."""
    rows = sum(of) + spare
    x, dy = (spiky(rows, hidden, seed=seed + i, size=8.0, dtype=dtype) for i in (0, 50))
    probs = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) + 0.1
    x[sum(of) :] = dy[sum(of) :] = poison
    probs[sum(of) :] = poison
    return (x, sizes(of), *((probs,) if scaled else ()), sizes(of)), dy
