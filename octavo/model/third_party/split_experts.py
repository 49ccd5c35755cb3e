"""Experts of another package over ranks: a converted module with a part of its experts, and the way there and back.

The module keeps its forward's arguments. Rows that are sorted by expert travel as tokens with one assignment each.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.communication.groups import rank_of
from octavo.errors import UnsupportedConfig
from octavo.model.third_party import third_party_experts
from octavo.model.third_party.known_experts import ROWS, TOKENS, known, own_class
from octavo.moe.dispatched_experts import dispatched

DISPATCHER = "_octavo_dispatcher"


def split(module: Any, dispatcher: Any) -> None:
    """Leave the module the experts of this rank, and have a dispatcher move rows to the others."""
    kind, layers = known(module), third_party_experts.layers_of(module)
    assert kind is not None
    name, path = own_class(module).__name__, layers[0]._path.rpartition(".")[0]
    if DISPATCHER in module.__dict__:
        raise UnsupportedConfig(f"The experts of {path or name} are split already. Name them once in the plan.")
    if kind.takes not in (TOKENS, ROWS) or len(layers) == 1:
        raise UnsupportedConfig(
            f"ExpertwiseParallel does not take the experts of {path or name}, a {name}, which are called one layer at "
            "a time or with as many rows for each expert. Leave them out of the plan."
        )
    number = layers[0].num_groups
    local = dispatcher.local_experts(number)
    if local == number:
        return
    recipe, strict, rank = layers[0]._recipe, layers[0].strict, rank_of(dispatcher.group)
    assert recipe is not None  # a conversion has one
    if any([layer._codes.has_quantized_weight for layer in layers]):
        raise UnsupportedConfig(f"The weights of {path or name} are codes. Split the experts before quantize_weights.")
    third_party_experts.revert(module)
    for parameter in {place for weight in kind.weights for place in (weight.name, weight.bias) if place}:
        holder, _, key = parameter.rpartition(".")
        owner = module.get_submodule(holder)
        whole = owner._parameters[key]
        part = whole.detach().chunk(dispatcher.ranks)[rank].clone()
        owner.register_parameter(key, nn.Parameter(part, whole.requires_grad))
    if isinstance(getattr(module, "num_experts", None), int):
        module.num_experts = local
    module.__dict__[DISPATCHER] = dispatcher
    third_party_experts.convert(module, path, recipe, strict)
    for layer in third_party_experts.layers_of(module):
        layer.ep_group = dispatcher.group
        layer._own_groups, layer._all_groups = range(rank * local, (rank + 1) * local), number


def through(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Run the experts of all ranks on tokens [T, hidden]; return their weighted sums."""
    dispatcher = module.__dict__[DISPATCHER]
    layer = third_party_experts.layers_of(module)[0]
    return dispatched(dispatcher, module.octavo, x, index, weights, layer.num_groups * dispatcher.ranks)


def through_rows(module: Any, x: Tensor, sizes: Tensor) -> Tensor:
    """Run the experts of all ranks on rows that are sorted by expert, and of which each has `sizes`."""
    row = torch.arange(x.shape[0], dtype=torch.int64, device=x.device)
    expert = torch.searchsorted(sizes.long().cumsum(0), row, right=True)  # one after the last is none
    return through(module, x, expert[:, None], x.new_ones((x.shape[0], 1), dtype=torch.float32))
