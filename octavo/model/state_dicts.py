"""The state of a model besides the values of its weights: delayed scaling's windows, the counters of stochastic
rounding and of steps, and the codes and scales of weights that are codes."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from octavo._torch.modules import plain_name
from octavo.errors import UnsupportedConfig, UnsupportedDtype
from octavo.model.layer_lookup import check_model, joined, layers
from octavo.ops.quantized import Quantized
from octavo.ops.schedule import STEP, check_step
from octavo.scaling.saved_state import check_state
from octavo.text import plural, some
from octavo.weights.saved_codes import PREFIX, check_codes_of, export_codes, unfit_names

State = dict[str, Tensor]  # of one layer: its tensors by their names in the layer
DELAYED, ROUNDED = "fp8-delayed", "nvfp4, or another that rounds stochastically"  # the recipes with state
# a key of a model's state; a path may have line breaks
_KEY = re.compile(r"(?:(?P<path>.*)\.)?(?P<name>(?:scaling|rounding|schedule|codes)\..+)", re.DOTALL)


class Load(NamedTuple):
    """A layer, and its part of the loaded state."""

    path: str
    layer: Quantized
    state: State


def state_dict(model: nn.Module, *, codes: bool = True) -> dict[str, Tensor]:
    """Return the state that a resumed run needs besides the values of the weights.

    `model.state_dict()` holds these values alone. This state is that of the recipes: the windows and inverse scales of
    fp8-delayed, the counters of stochastic rounding (nvfp4), and the number of steps if a policy changes recipes at
    a step. Of weights that are codes it has every bit: codes, scales, and the float32 values that Octavo keeps for an
    optimizer other than its own. A run that loads both resumes bit for bit.

    Args:
        model: a module with Octavo layers.
        codes: False leaves the weights out: for a model that has other weights, such as an average.

    Returns:
        Copies of plain tensors, by name. It is empty for recipes without state.

    Raises:
        UnsupportedDtype: `model` is no module.

    Example:
        >>> model = nn.Sequential(octavo.Linear(16, 8, recipe="nvfp4"))
        >>> list(octavo.state_dict(model))
        ['0.rounding.seed']
    """
    check_model(model, "state_dict")
    states = (
        (path, layer._recipe_state() | (export_codes(layer) if codes else {}) | layer._pending_state())
        for path, layer in layers(model)
    )
    return {joined(path, name): tensor for path, state in states for name, tensor in state.items()}


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Load the state that `octavo.state_dict` returned for a model.

    It checks all tensors before it writes any. A state without codes leaves weights that are codes as they are. A
    layer that is on the meta device, or follows `octavo.autocast` and has not run yet, keeps its part of the state
    until it has buffers for it.

    Args:
        model: a module with Octavo layers, compiled or not.
        state: the state.
        strict: raise unless the state has exactly the tensors that the model needs. With False other tensors are
            ignored, and missing ones stay as they are.

    Raises:
        UnsupportedConfig: the state does not match the recipes of the model and `strict` is set, or holds values that
            no run produces.
        UnsupportedDtype: `model` is no module, or `state` is no dict from strings.
        UnsupportedShape: a tensor has the wrong shape or dtype.
        UnsupportedDevice: a tensor is on the meta device.

    Example:
        >>> model = nn.Sequential(octavo.Linear(16, 8, recipe="nvfp4"))
        >>> state = octavo.state_dict(model)
        >>> octavo.load_state_dict(model, state)
    """
    check_model(model, "load_state_dict", state)
    write_state(checked_loads(model, state, strict))


def checked_loads(
    model: nn.Module, state: Mapping[str, Tensor], strict: bool = True, way: str = ", or pass strict=False"
) -> list[Load]:
    """Return what `load_state_dict` would write, by layer. It raises what that raises, and writes nothing. `way` is
    the caller's other way out where names differ."""
    by_path, unknown = _by_layer(state)
    loads = [Load(path, layer, by_path.pop(plain_name(path), {})) for path, layer in layers(model)]
    unknown += [joined(path, name) for path, left in by_path.items() for name in left]
    for load in loads:  # first: at another step the layer has another recipe, and other names
        if STEP in load.state:
            check_step(load.state[STEP], load.layer._schedule, load.path)
    if strict:
        _check_names(loads, unknown, way)
    for load in loads:
        check_state(load.state, load.layer.scales_per_operand, load.path)
        check_codes_of(load.layer, load.state, load.path)
    return loads


def write_state(loads: list[Load]) -> None:
    """Write the state that `checked_loads` returned."""
    for _, layer, part in loads:
        left = layer._load_recipe_state(part)
        waits = layer.recipe is None or layer._on_meta or layer._place().type == "meta"
        layer._pending = {name: tensor.detach().clone() for name, tensor in left.items()} if waits else {}


def _check_names(loads: list[Load], unknown: list[str], way: str) -> None:
    """Raise if the state lacks a tensor that a layer needs, or has one that no layer needs; `unknown` are keys without
    a layer."""
    missing, unknown = [], list(unknown)
    for path, layer, state in loads:
        wanted = layer._recipe_state()
        missing += [joined(path, name) for name in wanted if name not in state]
        if layer.recipe is not None:  # without a recipe the layer may need them later
            lacking, left = unfit_names(layer, state)
            missing += [joined(path, name) for name in lacking]
            known = {*wanted, *(name for name in state if name.startswith(PREFIX) and name not in left)}
            unknown += [joined(path, name) for name in state if name not in known]
    if missing or unknown:
        first, second = (some(names, 3) or "nothing" for names in (missing, unknown))
        hint = ""
        if any(name.endswith(STEP) for name in (*missing, *unknown)):
            hint = " If its policy changes recipes at a step, pass the step of the state: convert(..., step=)."
        if any(PREFIX in name for name in unknown):
            hint += (
                " The state has codes of weights: call octavo.quantize_weights as for the saved model before you load."
            )
        what = _other_recipe(loads, unknown) or f"missing {first}, unknown {second}"
        raise UnsupportedConfig(
            f"This model's recipes and the state do not match: {what}. Convert the model with the recipe it was saved "
            f"with{way}.{hint}"
        )


def _other_recipe(loads: list[Load], unknown: list[str]) -> str:
    """Return a sentence on the first layer whose state is another recipe's; empty if the state does not tell.
    `unknown` are keys that no layer needs."""
    if not loads and (kind := _recipe_of(match["name"] for key in unknown if (match := _KEY.fullmatch(key)))):
        return f"the state is of {kind}, and the model has no layer of Octavo's"
    different = []
    for path, layer, state in loads:
        found, wanted = _recipe_of(state), _recipe_of(layer._recipe_state())
        if layer.recipe is not None and found != wanted and (found or wanted == DELAYED):
            of = path or "the model"
            what = f"the state of {of} is of {found}" if found else f"the state has no scales of {of}"
            different.append(f"{what}, and the layer is in {layer.recipe}")
    if not different:
        return ""
    more = len(different) - 1
    return different[0] + (f"; {plural(more, 'more layer')} differ{'s' * (more == 1)} too" if more else "")


def _recipe_of(names: Iterable[str]) -> str:
    """Return the recipe whose state has tensors of these names in a layer; empty for one without state."""
    kinds = {name.partition(".")[0] for name in names}
    return DELAYED if "scaling" in kinds else ROUNDED if "rounding" in kinds else ""


def _by_layer(state: Any) -> tuple[dict[str, State], list[str]]:
    """Return a state's tensors, by layer path and by name in the layer, and the keys that no layer's state has."""
    if not isinstance(state, Mapping):
        raise UnsupportedDtype(
            f"octavo.load_state_dict takes a state as a dict, got {type(state).__name__}. Pass what octavo.state_dict "
            "returned."
        )
    by_path: dict[str, State] = {}
    unknown = []
    for key, tensor in state.items():
        if not isinstance(key, str):
            raise UnsupportedDtype(
                f"The keys of a state are strings, got {key!r}. Pass what octavo.state_dict returned."
            )
        match = _KEY.fullmatch(plain_name(key))
        if match is None:
            unknown.append(key)
            continue
        of_layer = by_path.setdefault(match["path"] or "", {})
        if match["name"] in of_layer:
            raise UnsupportedConfig(
                f"The state has {plain_name(key)!r} twice, with and without the name of a wrapper. Drop one."
            )
        of_layer[match["name"]] = tensor
    return by_path, unknown
