"""One scale for the rows of all experts, on which their ranks agree before the cast: of codes on the wire.

fp8-current takes it from the largest amax of the ranks. fp8-delayed takes the smallest inverse scale that a rank's
experts remember, and has all experts of all ranks observe the largest amax, so that they remember alike from then on.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.communication import collectives
from octavo.moe.expert_exchange import Ranks
from octavo.quant.quantizer import Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.recipes import Delayed
from octavo.recipes.ambient import process
from octavo.scaling.delayed_state import calibrated_inverse_scale


class History(NamedTuple):
    """What the experts of this rank remember of an operand, x of the first layer or dy of the second."""

    layer: Any  # a GroupedLinear
    recipe: Delayed
    direction: str  # "forward" for x, "backward" for dy

    def observes(self) -> bool:
        return self.layer.training and process.dry == 0


def largest_of_ranks(amax: Tensor, ranks: Ranks) -> Tensor:
    """Return the largest of each number over the ranks."""
    return amax if ranks.size == 1 else collectives.largest(amax, ranks.group, ranks.where)


def remembered(amax: Tensor, spec: Quantizer, history: History, observes: bool, ranks: Ranks) -> Tensor:
    """Return the inverse scale of all rows [1], and have the experts observe the largest amax of the ranks."""
    layer, recipe, direction = history
    assert isinstance(spec, Tensorwise)
    layer._prepare(recipe)
    state, number = layer._scaling.state(layer, direction), layer.num_groups  # x comes before w
    scales = state.inverse_scale[:number]
    if recipe.cold_start == "current":
        scales = torch.where(state.head[:number] > 0, scales, float("inf"))
    found = largest_of_ranks(torch.stack([amax.flatten()[0].float(), -scales.min()]), ranks)
    largest, least = found[:1], -found[1:]
    if observes:
        running = state.running_amax[:number]
        running.copy_(torch.maximum(running, largest))
    return calibrated_inverse_scale(least, least.isfinite(), largest, spec, recipe.margin)
