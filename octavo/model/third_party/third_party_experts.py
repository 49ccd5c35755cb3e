"""Experts of other packages' models: modules that hold the weights of all experts as stacked parameters.

    is_experts            the module is of a known kind (`known_experts.py`)
    unsupported_reason    forward, shapes, dtype, recipe
    convert               gives the module a submodule `octavo`, whose layers (`third_party_layers.py`) read the
                          parameters from the module's table and hold only the state of the recipe, and a class whose
                          forward calls that submodule
    revert                undoes that

The module keeps its parameters and their names.
"""

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from octavo._torch.tensors import is_sharded
from octavo.errors import UnsupportedConfig
from octavo.model.third_party.derived_class import derived
from octavo.model.third_party.expert_activation import OwnActivation, activation_of
from octavo.model.third_party.forwards import FORWARDS
from octavo.model.third_party.known_experts import ATTENTION, TOKENS, Known, home, is_dispatched, known, own_class
from octavo.model.third_party.third_party_layers import (
    NAME,
    ThirdPartyAttention,
    ThirdPartyExperts,
    ThirdPartyGroupedLinear,
    ThirdPartyLinear,
    ThirdPartyMLP,
    ThirdPartyRows,
)
from octavo.model.third_party.third_party_linear import is_patched, patched_reason
from octavo.moe.dispatched_experts import DispatchedExperts
from octavo.ops.inputs import strange
from octavo.ops.published_codes import refuse_codes, unsupported_codes_reason
from octavo.ops.quantized import unsupported_dtype_reason
from octavo.quant.groups import MAX_GROUPS
from octavo.recipes import Recipe

_LAYERS = (ThirdPartyLinear, ThirdPartyGroupedLinear)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is of a known kind, converted or not."""
    return known(module) is not None


def _kind(module: nn.Module) -> Known:
    found = known(module)
    assert found is not None
    return found


def is_third_party(module: nn.Module) -> bool:
    """Return whether a module's experts were converted."""
    kinds = (DispatchedExperts, ThirdPartyExperts, ThirdPartyMLP, ThirdPartyRows, ThirdPartyAttention, *_LAYERS)
    return isinstance(module._modules.get(NAME), kinds)


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the stacked weights, in order of use."""
    return [module.get_parameter(name) for name in _kind(module).names]


def layers_of(module: nn.Module) -> list[ThirdPartyLinear | ThirdPartyGroupedLinear]:
    """Return the layers of a converted module; none if it is not converted."""
    if not is_third_party(module):
        return []
    return [layer for layer in module._modules[NAME].modules() if isinstance(layer, _LAYERS)]  # type: ignore[union-attr]


def layer_of(module: nn.Module, name: str) -> ThirdPartyLinear | ThirdPartyGroupedLinear | None:
    """Return the layer of a converted module whose weight is this parameter as it is; None if there is none."""
    found = [layer for layer in layers_of(module) if layer._place_in_owner.name == name]
    return found[0] if len(found) == 1 and not found[0]._parametrized_weights() else None


def is_weight(module: nn.Module, name: str) -> bool:
    """Return whether a layer of the converted module would read this parameter as it is, without another layout."""
    kind = known(module)
    places = [] if kind is None else [place for place in kind.weights if place.name == name]
    return len(places) == 1 and places[0].is_whole(module.get_parameter(name), _number(module))


def inside_of(module: nn.Module) -> list[nn.Module]:
    """Return the linear layers inside of a module that multiplies by their weights itself, and stands for them."""
    kind = known(module)
    holders = [] if kind is None else [_holder(module, name) for name in kind.names]
    return [*layers_of(module), *(holder for holder in holders if isinstance(holder, nn.Linear))]


def unsupported_reason(module: nn.Module, recipe: Recipe) -> str:
    """Return why experts cannot be converted; empty if they can."""
    kind, name = _kind(module), own_class(module).__name__
    for flag, value, why in kind.refused:
        if getattr(module, flag, not value) is value:
            return f"its class is {name}, and {why}"
    if any(is_parametrized(holder) for holder in {_holder(module, weight) for weight in kind.names}):
        return "it is parametrized. Convert it first, then register the parametrization"
    for weight in kind.names:
        if why := unsupported_codes_reason(_holder(module, weight), [weight.rpartition(".")[2]], own_forward=True):
            return why
    if why := _unsupported_forward(module, kind):
        return why
    if not is_third_party(module) and hasattr(module, NAME):
        return f"its class is {name}, and it has an attribute {NAME!r} of its own. Rename that"
    if why := _unsupported_shape(module, kind):
        return why
    return next((why for layer in layers_of(module) if (why := layer._recipe_unsupported_reason(recipe))), "")


def _holder(module: nn.Module, path: str) -> nn.Module:
    """Return the module that holds a parameter."""
    return module.get_submodule(path.rpartition(".")[0])


def _unsupported_forward(module: nn.Module, kind: Known) -> str:
    """Return why a module's forward may not be replaced; empty if it may."""
    stock, own = home(module), own_class(module)
    if stock is None:
        replaced = [] if is_dispatched(module) else ["forward"]
    else:
        replaced = [name for name in kind.parts if getattr(own, name, None) is not getattr(stock, name, None)]
    if not replaced and is_patched(module):
        return patched_reason(module, getattr(module.forward, "__qualname__", type(module.forward).__name__))
    if replaced or "forward" in module.__dict__:
        which = replaced[0] if replaced else "forward"
        return f"its class is {own.__name__}, with a {which} of its own. Convert it before that is replaced"
    return ""


def _unsupported_shape(module: Any, kind: Known) -> str:
    weights = weights_of(module)
    for name, weight in zip(kind.names, weights, strict=True):
        if is_sharded(weight):
            return f"{name} is sharded. Convert the model before fully_shard and tensor parallelism"
        if why := strange(weight):
            return f"{name} is {why}"
        if why := unsupported_dtype_reason(weight.dtype):
            return why
    if not kind.has_experts:
        return ""
    *first, last = [place.shape(weight, _number(module)) for place, weight in zip(kind.weights, weights, strict=True)]
    wide = 2 if kind.is_joined and kind.gated else 1
    if len(last) != 3 or any(len(shape) != 3 or last != (shape[0], shape[2], shape[1] // wide) for shape in first):
        shapes = ", ".join(f"{name} {list(weight.shape)}" for name, weight in zip(kind.names, weights, strict=True))
        return (
            f"it has {shapes}, which are not the weights [experts, {wide} · ffn, hidden] and [experts, hidden, ffn] of "
            "its class. Exclude it"
        )
    if not 1 <= last[0] <= MAX_GROUPS:
        return f"it has {last[0]} experts, and Octavo takes 1 to {MAX_GROUPS}"
    return ""


def _number(module: Any) -> int:
    """Return the number of experts as the module tells it, for weights that are not stacked."""
    number = getattr(module, "num_experts", 0)
    return number if isinstance(number, int) else 0


def convert(module: Any, path: str, recipe: Recipe, strict: bool) -> None:
    """Convert experts, or change the recipe of converted ones."""
    if is_third_party(module):
        for layer in layers_of(module):
            layer.recipe = recipe  # type: ignore[assignment]
            layer.strict = strict
        return
    kind = _kind(module)
    module._octavo_load_hook = module.register_load_state_dict_pre_hook(_before_load)
    if is_dispatched(module):
        module._octavo_implementation = getattr(module.config, "_experts_implementation", None) or "eager"
    tail = "untouched" if kind.takes == TOKENS and kind.is_joined else "zero"
    layers: list[Any] = [
        ThirdPartyGroupedLinear(module, place, _number(module), recipe, strict, path, tail)
        if kind.has_experts
        else ThirdPartyLinear(module, place, recipe, strict, path)
        for place in kind.weights
    ]
    module.add_module(NAME, _adopted(module, _submodule(module, kind, layers)).train(module.training))
    module.__class__ = derived(FORWARDS[kind.takes], type(module), named=type(module))


def _submodule(module: Any, kind: Known, layers: list[Any]) -> nn.Module:
    if len(layers) == 1:
        return layers[0]
    if kind.takes == ATTENTION:
        return ThirdPartyAttention(*layers)
    if not kind.is_joined:
        gate, up, down = layers
        return ThirdPartyRows(gate, up, down, OwnActivation(module, kind))
    if "_octavo_dispatcher" in module.__dict__:
        return DispatchedExperts({"fc1": layers[0], "activation": activation_of(module, kind), "fc2": layers[1]})
    made = ThirdPartyExperts if kind.takes == TOKENS else ThirdPartyMLP
    return made(layers[0], activation_of(module, kind), layers[1])


def _adopted(module: nn.Module, made: nn.Module) -> nn.Module:
    """Make every module inside an instance of the base class of the experts' package, which torchtitan's trainer
    checks."""
    stock = home(module)
    base = next((parent for parent in stock.__mro__ if nn.Module in parent.__bases__), stock) if stock else None
    for one in made.modules() if base is not stock else ():
        one.__class__ = derived(type(one), base, named=type(one))  # type: ignore[arg-type]
    return made


def revert(module: Any) -> None:
    """Undo `convert`."""
    if "_octavo_dispatcher" in module.__dict__:
        raise UnsupportedConfig(
            f"{own_class(module).__name__} has the experts of this rank alone, which only Octavo's forward sends rows "
            "to. Leave it out of octavo.revert, with exclude=, or load sharded_state_dict into a model of one process."
        )
    for layer in layers_of(module):
        layer._restore_weight()
    module.__dict__.pop("_octavo_load_hook").remove()
    module.__dict__.pop("_octavo_implementation", None)
    del module._modules[NAME]
    module.__class__ = own_class(module)


def _before_load(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    """Refuse published codes: converted experts load their parameters themselves."""
    refuse_codes(module, _kind(module).names, state_dict, prefix)
