"""Delayed scaling in a linear layer: what multiplies x, w and dy, and where their amaxes go.

A layer's `scaling` is flat: multipliers of x, w and dy, and where one of them is measured also what each of the three
has seen so far. The slot of one operand is every third of these; of an operand that is not measured, the first.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import CastArgs, QuantizerPair
from octavo.quant.state import warm_encode
from octavo.quant.tensorwise import Tensorwise
from octavo.recipes import Delayed, Recipe

X, W, DY = range(3)  # places in `scaling`
LETTERS = "xwd"  # of these in `measured`
Amax = Callable[[Tensorwise, Tensor], Tensor]  # a tensor's own, by a quantizer, unless a flag on the device says not to


class Amaxes(NamedTuple):
    """Where those of x and w go, if they are observed."""

    x: Tensor | None = None
    w: Tensor | None = None
    extra: Tensor | None = None  # both, to be returned


def slot_of(place: int, measured: str, scaling: Parts) -> Parts:
    """The part of `scaling` that an operand is cast with."""
    return scaling[place::3] if LETTERS[place] in measured else scaling[place : place + 1]


def observed(observe: str, seen: Parts, number: int, device: torch.device) -> Amaxes:
    """A graph's node returns them, `number` of each; elsewhere they are raised where they are remembered."""
    if observe == "returned":
        both = torch.zeros(2 * number, dtype=torch.float32, device=device)
        return Amaxes(both[:number], both[number:], both)
    return Amaxes(*seen)


def warm(recipe: Recipe, slot: Sequence[Tensor], observed: Tensor | None) -> CastArgs:
    """What a layer brings to a cast by the multiplier that a slot holds, whatever it has seen."""
    return CastArgs(encode=slot[0], observed=observed) if recipe.stateful else CastArgs()


def cast_args(
    recipe: Recipe,
    pair: QuantizerPair,
    slot: Sequence[Tensor],
    own: Amax,
    observed: Tensor | None,
    seed: Tensor | None = None,
) -> CastArgs:
    """The same, but of (multiplier, amaxes seen) the multiplier that the tensor's `own` amax leads to, as long as none
    was seen. Not delayed: a seed, if it rounds stochastically."""
    spec = pair[0] or pair[1]
    if spec is None or not recipe.stateful:
        return CastArgs(seed=seed)
    if len(slot) == 1:
        return warm(recipe, slot, observed)
    assert isinstance(spec, Tensorwise) and isinstance(recipe, Delayed)
    has_seen = slot[1] > 0
    encode = warm_encode(slot[0], has_seen, own(spec, has_seen), spec, recipe.margin)
    return CastArgs(encode=encode, observed=observed)


def kept_for(dy_pair: QuantizerPair, measured: str, scaling: Parts) -> tuple[Tensor | None, Tensor | None]:
    """dy's slot, if backward will cast it."""
    if not scaling or dy_pair == (None, None):
        return None, None
    encode, seen = (*slot_of(DY, measured, scaling), None)[:2]
    return encode, seen
