"""What is done to a whole model, once a step or once a run: every layer of ours in it, by its path."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig
from octavo.modules.quantized import Quantized
from octavo.modules.scaling import SIDES, look
from octavo.quant import DelayedState
from octavo.quant.state import update_all


def layers(model: nn.Module) -> Iterator[tuple[str, Quantized]]:
    """(path, layer), each once."""
    for path, module in model.named_modules():
        if isinstance(module, Quantized):
            yield path, module


def step(model: nn.Module, group: Any = None) -> None:
    """End a training step: delayed scales follow the amaxes that were observed since the last one.

    With a process `group` the amaxes are first reduced by maximum over it, so that its ranks keep equal scales; every
    rank must then hold the same layers. None reduces nothing."""
    batches: dict[tuple[Any, ...], list[DelayedState]] = {}
    cold: list[Quantized] = []
    for _, module in layers(model):
        scaling = module._scaling
        if scaling.recipe is not None:
            recipe, states = scaling.recipe, [scaling.state(module, side) for side in SIDES]
            key = (recipe.history, recipe.algorithm, recipe.margin, states[0].encode.device)
            batches.setdefault(key, []).extend(states)
            scaling.stepped()
            if scaling.looks():
                cold.append(module)
    for (_, algorithm, margin, _), states in batches.items():
        update_all(states, algorithm=algorithm, margin=margin, reduce=None if group is None else _maximum_over(group))
    if cold and not torch.compiler.is_compiling() and not _is_capturing():  # a graph cannot wait for an answer
        look(cold)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _maximum_over(group: Any) -> Any:
    return lambda amaxes: dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)


def refresh_weights(model: nn.Module) -> None:
    """Quantize again every weight that is cached, in place: after the optimizer changed them."""
    for _, module in layers(model):
        stored = module._codes
        if stored.recipe is not None and not stored.held:
            observe = stored.recipe.stateful and module.training
            module._refresh(stored.recipe, column=False, observe=observe)


def quantize_weights(model: nn.Module) -> None:
    """Hold the weights as codes only, in both orientations: for weights that nobody trains, or that are trained by one
    who updates codes: an optimizer that writes to them raises."""
    found = [
        (path, module)
        for path, module in layers(model)
        if module.recipe is not None and module.recipe.linear().fprop.right is not None
    ]
    if not found:
        raise UnsupportedConfig(
            "quantize_weights found no layer whose own recipe quantizes. Call octavo.convert(model, recipe) first."
        )
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append(_key(path, name))
    for path, module in found:
        module.check_holdable()
        for weight in module.weight_parts():
            names = owners[id(weight)]
            if len(names) > 1:
                own, *others = sorted(names, key=lambda name: not name.startswith(path))
                raise UnsupportedConfig(
                    f"{own} is also {', '.join(others)}, which would go on with a weight of its own. Untie them, or "
                    "convert that layer with recipe bf16."
                )
    for _, module in found:
        module.hold_codes()


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> Any:
    """After every `optimizer.step()`: `step(model, group)` and `refresh_weights(model)`. Returns a handle with
    `.remove()`."""

    def after(*_: Any) -> None:
        step(model, group)
        refresh_weights(model)

    return optimizer.register_step_post_hook(after)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What a resumed run needs besides the weights, as plain tensors: delayed scaling's windows and multipliers, and
    the counters of stochastic rounding. Empty for recipes that remember nothing."""
    return {_key(path, name): t for path, module in layers(model) for name, t in module.recipe_state().items()}


def load_state_dict(model: nn.Module, state: dict[str, Tensor], strict: bool = True) -> None:
    """Take over what `state_dict` gave. A layer that follows `octavo.autocast` and has not run yet keeps its part until
    it does. Strict: the model must want exactly these tensors."""
    plan, rest = [], dict(state)
    for path, module in layers(model):
        plan.append((path, module, {name: rest.pop(key) for key in list(rest) if (name := _name(path, key))}))
    missing = [_key(path, n) for path, module, own in plan for n in module.recipe_state() if n not in own]
    unknown = [*rest, *(_key(path, n) for path, module, own in plan if module.recipe for n in own
                        if n not in module.recipe_state())]  # fmt: skip
    if strict and (missing or unknown):
        raise UnsupportedConfig(
            f"This model's recipes and the state do not match: missing {_some(missing)}, unknown {_some(unknown)}. "
            "Convert the model with the recipe it was saved with, or pass strict=False."
        )
    for _, module, own in plan:
        module.check_recipe_state(own)  # all of them before any is written
    for _, module, own in plan:
        left = module.load_recipe_state(own)
        module._pending = left if module.recipe is None else {}


def _key(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _name(path: str, key: str) -> str:
    """The key's name within the layer at this path; empty if it is not of that layer."""
    name = key.removeprefix(f"{path}.") if path else key
    mine = name != key or not path
    return name if mine and name.startswith(("scaling.", "rounding.")) else ""


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
