"""What is done to a whole model, once a step or once a run: every layer of ours in it, by its path."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo._torch.modules import WRAPPERS
from octavo.delayed_scaling.checkpoint import check_state
from octavo.delayed_scaling.memory import SIDES, look
from octavo.errors import UnsupportedConfig, UnsupportedDtype
from octavo.modules.quantized import Quantized
from octavo.quant import DelayedState
from octavo.quant.state import update_all

_KEY = re.compile(r"(?:(?P<path>.*)\.)?(?P<name>(?:scaling|rounding)\..+)")  # of a state


def layers(model: nn.Module) -> Iterator[tuple[str, Quantized]]:
    """(path, layer), each once."""
    for path, module in model.named_modules():
        if isinstance(module, Quantized):
            yield path, module


def step(model: nn.Module, group: Any = None) -> None:
    """End a training step: delayed scales follow the amaxes that were observed since the last one.

    With a process `group` the amaxes are first reduced by maximum over it, so that its ranks keep equal scales; every
    rank must then hold the same layers. None reduces nothing."""
    step_layers([module for _, module in layers(model)], group)


def step_layers(found: Iterable[Quantized], group: Any = None) -> None:
    """`step` of some layers."""
    batches: dict[tuple[Any, ...], list[DelayedState]] = {}
    cold: list[Quantized] = []
    in_graph = torch.compiler.is_compiling() or _is_capturing()  # which cannot wait for an answer, nor count
    for module in found:
        module._codes.end_step()
        scaling = module._scaling
        if scaling.recipe is not None:
            recipe, states = scaling.recipe, [scaling.state(module, side) for side in SIDES]
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


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _maximum_over(group: Any) -> Any:
    return lambda amaxes: dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)


def refresh_weights(model: nn.Module) -> None:
    """Quantize again every weight that is cached, in place: after the optimizer changed them."""
    refresh_layers([module for _, module in layers(model)])


def refresh_layers(found: Iterable[Quantized]) -> None:
    """`refresh_weights` of some layers."""
    for module in found:
        stored = module._codes
        if stored.recipe is not None and not stored.held:
            observe = stored.recipe.stateful and module.training
            module._refresh(stored.recipe, column=False, observe=observe)


def quantize_weights(model: nn.Module) -> None:
    """Hold the weights as codes only, in both orientations, for weights that no optimizer updates: a step on one
    raises. The parameters read as the values of their codes, and quantize what is written to them."""
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


# -- checkpoints -----------------------------------------------------------------------------------------------------


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What a resumed run needs besides the weights, as plain tensors: delayed scaling's windows and multipliers, and
    the counters of stochastic rounding. Empty for recipes that remember nothing."""
    found = ((path, module.recipe_state() | module.pending_state()) for path, module in layers(model))
    return {_key(path, name): tensor for path, state in found for name, tensor in state.items()}


def load_state_dict(model: nn.Module, state: dict[str, Tensor], strict: bool = True) -> None:
    """Take over what `state_dict` gave, of the model itself or compiled. A layer that follows `octavo.autocast` and has
    not run yet, or is on the meta device, keeps its part until it has. Strict: the model must want exactly these
    tensors. All of them are checked before any is written."""
    given, strange = _by_layer(state)
    plan = [(path, module, given.pop(_plain(path), {})) for path, module in layers(model)]
    made = [(path, module.recipe, list(module.recipe_state()), own) for path, module, own in plan]
    missing = [_key(path, name) for path, _, names, own in made for name in names if name not in own]
    unknown = [*strange, *(_key(path, name) for path, own in given.items() for name in own)]
    unknown += [_key(path, name) for path, recipe, names, own in made if recipe for name in own if name not in names]
    if strict and (missing or unknown):
        raise UnsupportedConfig(
            f"This model's recipes and the state do not match: missing {_some(missing)}, unknown {_some(unknown)}. "
            "Convert the model with the recipe it was saved with, or pass strict=False."
        )
    for path, module, own in plan:
        check_state(own, module.slots, path)
    for _, module, own in plan:
        left = module.load_recipe_state(own)
        waits = module.recipe is None or module._unborn
        module._pending = {name: tensor.detach().clone() for name, tensor in left.items()} if waits else {}


def _key(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _plain(path: str) -> str:
    """A path without what wrappers put into it."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _by_layer(state: Any) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """A state's tensors, by the path of their layer and their names in it; and keys that no layer's state has."""
    if not isinstance(state, Mapping):
        raise UnsupportedDtype(f"A state is the dict that octavo.state_dict gave, got {type(state).__name__}.")
    found: dict[str, dict[str, Tensor]] = {}
    strange = []
    for key, tensor in state.items():
        if not isinstance(key, str):
            raise UnsupportedDtype(f"The keys of a state are strings, got {key!r}. Pass what octavo.state_dict gave.")
        match = _KEY.fullmatch(_plain(key))
        if match is None:
            strange.append(key)
            continue
        own = found.setdefault(match["path"] or "", {})
        if match["name"] in own:
            raise UnsupportedConfig(
                f"The state has {_plain(key)!r} twice, with and without the name of a wrapper. Drop one."
            )
        own[match["name"]] = tensor
    return found, strange


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
