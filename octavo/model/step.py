"""`octavo.step`: ends a training step by updating the delayed scales of a whole model from the step's amaxes."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from octavo._torch.cuda import is_capturing
from octavo.delayed_scaling.memory import DIRECTIONS, look
from octavo.model.layers import check_model, layers
from octavo.model.overflow import warn_of_overflow
from octavo.modules.quantized import Quantized
from octavo.quant import DelayedState
from octavo.quant.state import update_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch have none


def step(model: nn.Module, group: "ProcessGroup | None" = None) -> None:
    """Ends a training step: updates delayed scales from the amaxes that the layers observed since the last call.

    Call it after each `optimizer.step()`, or let `octavo.attach` call it. Only fp8-delayed has scales to update. If a
    policy changes recipes at a step, the call counts the steps and changes them. It also warns of tokens that the
    dispatcher of an `octavo.MoE` dropped. It does not wait for a GPU to count them, so the warning comes a step or more
    later.

    Args:
        model: a module with Octavo layers.
        group: the process group over which the amaxes are first reduced by maximum, so that its ranks keep equal
            scales. Every rank must then hold the same layers. None reduces nothing.

    Raises:
        UnsupportedDtype: `model` is no module.

    Example:
        >>> model = nn.Sequential(octavo.Linear(16, 8, recipe="fp8-delayed"))
        >>> model(torch.ones(4, 16)).sum().backward()
        >>> octavo.step(model)
    """
    check_model(model, "step")
    step_layers([module for _, module in layers(model)], group)
    warn_of_overflow(model)


def step_layers(modules: Iterable[Quantized], group: Any = None) -> None:
    """Does the same as `step`, for the given layers."""
    batches: dict[tuple[Any, ...], list[DelayedState]] = {}
    cold: list[Quantized] = []
    modules = list(modules)
    in_graph = torch.compiler.is_compiling() or is_capturing()  # a graph can neither read the device back nor count
    for module in modules:
        module._codes.end_step()
        scaling = module._scaling
        if scaling.recipe is not None:
            recipe, states = scaling.recipe, [scaling.state(module, direction) for direction in DIRECTIONS]
            key = (recipe.history, recipe.algorithm, recipe.margin, states[0].encode.device)
            batches.setdefault(key, []).extend(states)
            if not in_graph:
                if scaling.origin == "weights":
                    scaling.say_unrestored()
                if scaling.looks():
                    cold.append(module)
            scaling.stepped()
    for (_, algorithm, margin, _), states in batches.items():
        update_all(states, algorithm=algorithm, margin=margin, reduce=None if group is None else _maximum_over(group))
    if cold:
        look(cold)
    for module in modules:  # last: a new recipe may drop the memory that this step has updated
        module.end_scheduled_step(in_graph)


def _maximum_over(group: Any) -> Any:
    return lambda amaxes: dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
