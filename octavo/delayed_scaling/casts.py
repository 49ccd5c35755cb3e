"""Arguments of the casts of x, w and dy under delayed scaling: their multipliers, and where their amaxes go.

A layer's `scaling` is a flat tuple: the multipliers of x, w and dy; where one of the three is measured, also how many
amaxes each of them has seen. One operand's part is its multiplier, and if it is measured also its count.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.quant.quantizer import CastArgs, QuantizerPair
from octavo.quant.state import warm_encode
from octavo.quant.tensorwise import Tensorwise
from octavo.recipes import Delayed, Recipe

X, W, DY = range(3)  # places in `scaling`
LETTERS = "xwd"  # of these in `measured`
Measure = Callable[[Tensorwise, Tensor], Tensor]  # a tensor's amax by a quantizer, unless the flag is set


class Amaxes(NamedTuple):
    """Tensors that the casts of x and w raise to their amaxes; None where amaxes are not observed."""

    x: Tensor | None = None
    w: Tensor | None = None


def part_of(place: int, measured: str) -> slice:
    """The slice of `scaling` that is an operand's part."""
    return slice(place, None, 3) if LETTERS[place] in measured else slice(place, place + 1)


def known_scale(part: Sequence[Tensor], observed: Tensor | None) -> CastArgs:
    """The arguments of a cast by the current multiplier, whether or not an amax was seen. Empty if scaling is not
    delayed."""
    return CastArgs(encode=part[0], observed=observed) if part else CastArgs()


def cast_args(
    recipe: Recipe,
    pair: QuantizerPair,
    part: Sequence[Tensor],
    measure: Measure,
    observed: Tensor | None,
    seed: Tensor | None = None,
) -> CastArgs:
    """The arguments of a cast by a pair of quantizers. A measured operand of which no part has seen an amax is
    scaled by its own. If scaling is not delayed: the seed, for stochastic rounding."""
    if not part:
        return CastArgs(seed=seed)
    if len(part) == 1:
        return CastArgs(encode=part[0], observed=observed)
    spec = pair[0] or pair[1]
    assert isinstance(spec, Tensorwise) and isinstance(recipe, Delayed)
    has_seen = part[1] > 0
    if has_seen.numel() > 1:  # experts that have seen an amax lend their multipliers to those that have not
        has_seen = has_seen.any().expand(has_seen.shape)
    encode = warm_encode(part[0], has_seen, measure(spec, has_seen), spec, recipe.margin)
    return CastArgs(encode=encode, observed=observed)
