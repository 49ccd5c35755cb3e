"""Arguments of the casts of x, w and dy under delayed scaling: their inverse scales, and where their amaxes go.

A layer's `scaling` is a flat tuple: the inverse scales of x, w and dy; where one of the three is measured, also how
many amaxes each of them has seen. One operand's part is its inverse scale, and if it is measured also its count."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.quant.quantizer import CastArgs, QuantizerPair
from octavo.quant.tensorwise import Tensorwise
from octavo.recipes import Delayed, Recipe
from octavo.scaling.delayed_state import calibrated_inverse_scale

X, W, DY = range(3)  # places in `scaling`
LETTERS = "xwd"  # of these in `measured`
Measure = Callable[[Tensorwise, Tensor], Tensor]  # a tensor's amax by a quantizer, unless the flag is set


class RunningAmaxes(NamedTuple):
    """Tensors that the casts of x and w raise to their amaxes; None where amaxes are not observed."""

    x: Tensor | None = None
    w: Tensor | None = None


def part_of(place: int, measured: str) -> slice:
    """The slice of `scaling` that is an operand's part."""
    return slice(place, None, 3) if LETTERS[place] in measured else slice(place, place + 1)


def cast_args(
    recipe: Recipe,
    pair: QuantizerPair,
    part: Sequence[Tensor],
    measure: Measure,
    running_amax: Tensor | None,
    seed: Tensor | None = None,
) -> CastArgs:
    """The arguments of a cast by a pair of quantizers. A measured operand of which no part has seen an amax is
    scaled by its own. If scaling is not delayed: the seed, for stochastic rounding."""
    if not part:
        return CastArgs(seed=seed)
    if len(part) == 1:
        return CastArgs(inverse_scale=part[0], running_amax=running_amax)
    spec = pair[0] or pair[1]
    assert isinstance(spec, Tensorwise) and isinstance(recipe, Delayed)
    is_calibrated = part[1] > 0
    if is_calibrated.numel() > 1:  # experts that have seen an amax lend their inverse scales to those that have not
        is_calibrated = is_calibrated.any().expand(is_calibrated.shape)
    inverse_scale = calibrated_inverse_scale(part[0], is_calibrated, measure(spec, is_calibrated), spec, recipe.margin)
    return CastArgs(inverse_scale=inverse_scale, running_amax=running_amax)
