"""Experts of other packages' models: modules that hold the weights of all experts as stacked parameters.

    is_experts            a row of KNOWN (`known_experts.py`) recognises the module
    unsupported_reason    layout, forward, shapes, dtype, activation, recipe
    convert               gives the module a submodule `octavo`, whose layers (`third_party_layers.py`) read the
                          parameters from the module's table and hold only the state of the recipe; its forward then
                          calls that submodule
    revert                undoes that

The module keeps its parameters and their names.
"""

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from octavo._torch.tensors import is_sharded
from octavo.model.third_party.expert_activation import GATED, UNGATED
from octavo.model.third_party.known_experts import KNOWN, NAME, Known
from octavo.model.third_party.third_party_layers import ThirdPartyExperts, ThirdPartyGroupedLinear, ThirdPartyRows
from octavo.ops.grouped_linear_layer import unsupported_reason as grouped_unsupported_reason
from octavo.ops.inputs import strange
from octavo.ops.published_codes import refuse_codes, unsupported_codes_reason
from octavo.ops.quantized import unsupported_dtype_reason
from octavo.quant.groups import MAX_GROUPS
from octavo.recipes import Recipe


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds experts of a known kind, converted or not."""
    return any(kind.recognise(module) for kind in KNOWN)


def _kind(module: nn.Module) -> Known:
    return next(kind for kind in KNOWN if kind.recognise(module))


def is_third_party(module: nn.Module) -> bool:
    """Return whether a module's experts were converted."""
    return isinstance(module._modules.get(NAME), (ThirdPartyExperts, ThirdPartyRows))


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the stacked weights, in order of use."""
    return _kind(module).weights(module)


def layers_of(module: nn.Module) -> list[ThirdPartyGroupedLinear]:
    """Return the layers of a converted module; none if it is not converted."""
    if not is_third_party(module):
        return []
    return [layer for layer in module._modules[NAME].modules() if isinstance(layer, ThirdPartyGroupedLinear)]  # type: ignore[union-attr]


def unsupported_reason(module: nn.Module, recipe: Recipe) -> str:
    """Return why experts cannot be converted; empty if they can."""
    kind, name = _kind(module), type(module).__name__
    for flag, value, why in kind.refused:
        if getattr(module, flag, not value) is value:
            return f"its class is {name}, and {why}"
    if is_parametrized(module):
        return "it is parametrized. Convert it first, then register the parametrization"
    if why := unsupported_codes_reason(module, kind.weights(module), own_forward=True) or kind.own_forward(module):
        return why
    if not is_third_party(module) and hasattr(module, NAME):
        return f"its class is {name}, and it has an attribute {NAME!r} of its own"
    if why := _unsupported_shape(module, kind.weights(module)):
        return why
    if not is_third_party(module) and kind.activation(module) is None:
        known = ", ".join((*GATED, "clamped-swiglu") if module.has_gate else UNGATED)
        return f"its class is {name}, and its activation is none of Octavo's: {known}"
    return next(
        (why for layer in layers_of(module) if (why := layer._recipe_unsupported_reason(recipe))),
        grouped_unsupported_reason(recipe),
    )


def _unsupported_shape(module: nn.Module, names: tuple[str, ...]) -> str:
    weights = [module.get_parameter(name) for name in names]
    for name, weight in zip(names, weights, strict=True):
        if is_sharded(weight):
            return f"{name} is sharded. Convert the model before fully_shard and tensor parallelism"
        if why := strange(weight):
            return f"{name} is {why}"
        if why := unsupported_dtype_reason(weight.dtype):
            return why
    *first, last = [tuple(weight.shape) for weight in weights]
    wide = 2 if len(first) == 1 and getattr(module, "has_gate", True) else 1
    if any(len(shape) != 3 or last != (shape[0], shape[2], shape[1] // wide) for shape in first):
        shapes = ", ".join(f"{name} {list(weight.shape)}" for name, weight in zip(names, weights, strict=True))
        return f"it has {shapes}, and Octavo takes [experts, {wide} · ffn, hidden] and [experts, hidden, ffn]"
    if not 1 <= last[0] <= MAX_GROUPS:
        return f"it has {last[0]} experts, and Octavo takes 1 to {MAX_GROUPS}"
    return ""


def convert(module: Any, path: str, recipe: Recipe, strict: bool) -> None:
    """Convert experts, or change the recipe of converted ones."""
    if is_third_party(module):
        for layer in layers_of(module):
            layer.recipe = recipe  # type: ignore[assignment]
            layer.strict = strict
        return
    kind = _kind(module)
    module._octavo_load_hook = module.register_load_state_dict_pre_hook(_before_load)

    def layer_on(layer: type[ThirdPartyGroupedLinear], weight: str, tail: str) -> ThirdPartyGroupedLinear:
        return layer(module, weight, recipe, strict, path, tail)

    module.add_module(NAME, kind.layers(module, layer_on).train(module.training))
    kind.install(module)


def revert(module: Any) -> None:
    """Undo `convert`."""
    kind = _kind(module)
    module.__dict__.pop("_octavo_load_hook").remove()
    del module._modules[NAME]
    kind.uninstall(module)


def _before_load(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    """Refuse published codes: converted experts load their parameters themselves."""
    refuse_codes(module, weight_names(module), state_dict, prefix)
