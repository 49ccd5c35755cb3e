"""`octavo.step`: end a training step by updating the delayed scales of a whole model from the step's amaxes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo._torch.cuda import is_capturing
from octavo._torch.operators import foreach_copy_
from octavo.communication import sharded_weights
from octavo.communication.collectives import gather, largest
from octavo.communication.groups import ALONE, Group, name_of, size_of
from octavo.errors import UnsupportedConfig
from octavo.model.layer_lookup import check_model, layers
from octavo.model.step_warnings import warn_of_step
from octavo.ops.quantized import Quantized
from octavo.scaling.delayed_scaling import DIRECTIONS, look
from octavo.scaling.delayed_state import DelayedState, update_all
from octavo.scaling.update_operators import read_amaxes, update_scales, write_amaxes


def step(model: nn.Module, group: Group = None) -> None:
    """End a training step: update delayed scales from the amaxes that the layers observed since the last call.

    Call it after each `optimizer.step()`, or let `octavo.attach` call it. Only fp8-delayed has scales to update. If a
    policy changes recipes at a step, the call counts the steps and changes them. It also warns of weight gradients that
    wait for `backward_dw()`, and of tokens that the dispatcher of an `octavo.MoE` dropped. It does not wait for a GPU
    to count the tokens, so that warning comes a step or more later.

    Args:
        model: a module with Octavo layers.
        group: the ranks that first agree on the amaxes, by maximum in one collective, so that they keep equal scales:
            a ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim). Every rank must hold the same layers. Pass
            the group of all data-parallel and tensor-parallel ranks; experts that are split over ranks then agree with
            those ranks that have the same ones. None agrees only on layers that are split over ranks, each over its own
            `tp_group`. Layers follow the group of `octavo.distributed.set_amax_group` instead.

    Raises:
        UnsupportedDtype: `model` is no module.
        UnsupportedConfig: the ranks of the group have different numbers of layers.

    Example:
        >>> model = nn.Sequential(octavo.Linear(16, 8, recipe="fp8-delayed"))
        >>> model(torch.ones(4, 16)).sum().backward()
        >>> octavo.step(model)
    """
    check_model(model, "step")
    ours = list(layers(model))
    step_layers([module for _, module in ours], group)
    warn_of_step(model, ours, group)


def step_layers(modules: Iterable[Quantized], group: Any = None) -> None:
    """Do the same as `step`, for the given layers."""
    batches: dict[tuple[Any, ...], list[tuple[DelayedState, int]]] = {}
    uncalibrated: list[Quantized] = []
    modules = list(modules)
    in_graph = torch.compiler.is_compiling() or is_capturing()  # a graph can neither read the device back nor count
    for module in modules:
        module._codes.end_step(module)
        scaling = module._scaling
        if scaling.recipe is not None:
            recipe, states = scaling.recipe, [scaling.state(module, direction) for direction in DIRECTIONS]
            key = (recipe.history, recipe.algorithm, recipe.margin, states[0].inverse_scale.device)
            batches.setdefault(key, []).extend([(state, scaling.slots) for state in states])
            if not in_graph:
                if scaling.origin == "weights":
                    scaling.say_unrestored()
                if scaling.looks():
                    uncalibrated.append(module)
            scaling.stepped()
    _all_reduce_amaxes(modules, group, in_graph)
    for (_, algorithm, margin, _), pairs in batches.items():
        updated, sharing = [state for state, _ in pairs], [slots for _, slots in pairs]
        if torch.compiler.is_compiling():
            update_scales(updated, algorithm, margin, sharing)
        else:
            update_all(updated, algorithm=algorithm, margin=margin, sharing=sharing)
    if not in_graph:
        sharded_weights.refresh(modules)
    if uncalibrated:
        look(uncalibrated)
    for module in modules:  # last: a new recipe may drop the memory that this step has updated
        module._end_scheduled_step(in_graph)


def _all_reduce_amaxes(modules: Sequence[Quantized], group: Any, in_graph: bool) -> None:
    """Take the maximum of all amaxes over ranks, in one collective for each group (and device)."""
    everyone = None if group is None else name_of(group)
    shared: dict[tuple[str, torch.device], list[Quantized]] = {}
    for module in modules:
        name = everyone if module.amax_group is None else module.amax_group
        if name is None and module.parallel is not None:
            name = module.parallel.group
        if name is None and module._sharded is not None:
            name = module._sharded.group
        if name in (None, ALONE) or module._scaling.recipe is None:
            continue
        if size_of(name) > 1:
            shared.setdefault((name, module._place()), []).append(module)
    for (name, _), members in shared.items():
        states = [m._scaling.state(m, direction) for m in members for direction in DIRECTIONS]
        amaxes = [state.running_amax for state in states]
        places = [_Place(m.scales_per_operand, *m._scales_of_all_ranks()) for m in members for _ in DIRECTIONS]
        if not in_graph:
            _check_number(members[0], name, sum([amax.numel() for amax in amaxes]))
        sizes = [amax.numel() for amax in amaxes]
        if torch.compiler.is_compiling():
            own = read_amaxes(amaxes)
            write_amaxes(amaxes, torch.cat(_all_reduced(torch.split(own, sizes), places, name)))
        else:
            foreach_copy_(amaxes, _all_reduced(amaxes, places, name))


class _Place(NamedTuple):
    """The scales of an operand on this rank, among those of all ranks: a rank may have a part of the experts."""

    number: int
    first: int
    all: int


def _all_reduced(amaxes: Sequence[Tensor], places: Sequence[_Place], name: str) -> list[Tensor]:
    """Return the maximum over ranks of each operand's amaxes. Experts that a rank does not have are zeros there."""
    wide = [
        F.pad(amax.view(-1, place.number), (place.first, place.all - place.first - place.number)).flatten()
        for amax, place in zip(amaxes, places, strict=True)
    ]
    found = torch.split(largest(torch.cat(wide), name, "octavo.step"), [t.numel() for t in wide])
    return [
        t.view(-1, place.all)[:, place.first : place.first + place.number].flatten()
        for t, place in zip(found, places, strict=True)
    ]


def _check_number(first: Quantized, name: str, number: int) -> None:
    """Raise if ranks have different numbers of amaxes: asked once, and again where the number changes."""
    scaling = first._scaling
    if scaling.all_reduced_number == number or first._place().type == "meta":
        return
    own = torch.tensor([number], device=first._place(), dtype=torch.int64)
    found = gather(own, size_of(name), name, "octavo.step").tolist()
    if any(n != number for n in found):
        raise UnsupportedConfig(
            f"octavo.step agrees on the amaxes of all ranks, which must hold the same layers in fp8-delayed. By rank "
            f"they have {found} amaxes. Give all ranks the same model and recipes, or step without a group."
        )
    scaling.all_reduced_number = number
