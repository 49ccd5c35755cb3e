"""Experts of other libraries' models: modules that hold the weights of all experts as stacked parameters.

transformers' experts dispatch their forward by a registry. A converted module keeps its class, its parameters and their
names. It gets a submodule `octavo`, an `octavo.moe.Experts` whose layers read the parameters from the module's table
and hold only the state of the recipe, and a copy of its config that chooses the entry "octavo" of the registry. Other
modules share the original config, so a conversion of some experts leaves the others alone.

`octavo.model.third_party.torchtitan_experts` converts torchtitan's experts.
"""

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from octavo._torch.tensors import is_sharded
from octavo.errors import UnsupportedConfig
from octavo.fusion.blocks import KINDS
from octavo.fusion.rules.moe_experts import RULES
from octavo.fusion.sequential import Sequential
from octavo.model.third_party import torchtitan_experts
from octavo.model.third_party.third_party_grouped_linear import ThirdPartyGroupedLinear
from octavo.moe.experts import Experts
from octavo.moe.permutation import sort
from octavo.ops.activation import Activation
from octavo.ops.grouped_linear_layer import unsupported_reason as grouped_unsupported_reason
from octavo.ops.inputs import strange
from octavo.ops.permute import Permute, Unpermute
from octavo.ops.published_codes import refuse_codes, unsupported_codes_reason
from octavo.ops.quantized import unsupported_dtype_reason
from octavo.quant.groups import MAX_GROUPS
from octavo.recipes import Recipe

NAME = "octavo"  # of the entry in the registry, and of the submodule
_PACKAGE, _REGISTRY = "transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS"
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # set by the decorator of such classes
# the flag that must not be set, the value that is refused, why
_UNSUPPORTED = (
    ("is_transposed", True, "its weights are [in, out], and Octavo multiplies by [out, in]"),
    ("is_concatenated", False, "gate and up alternate in its weights, and Octavo takes two halves here"),
    ("has_bias", True, "its experts have biases"),
    ("has_post_expert_norm", True, "it normalizes the output of each expert"),
    ("_is_expert_parallel", True, "its experts are distributed over several processes"),
)
_GATE = "_apply_gate"  # the method of gated experts that activates the output of the first layer
_GATED = ("swiglu", "geglu", "reglu", "sreglu", "qgeglu")
_UNGATED = ("silu", "gelu", "relu", "srelu", "qgelu")
_LIMITS, _SLOPES = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")  # attributes of experts that clamp


class ThirdPartyExperts(Experts):
    """The `octavo.moe.Experts` of a converted module: layers on that module's parameters, without any of its own.

    Args:
        owner: the module.
        recipe: the recipe of both layers.
        strict: as in GroupedLinear.
        path: the module's name in the model, for messages.
    """

    def __init__(self, owner: nn.Module, recipe: Recipe, strict: bool, path: str) -> None:
        activation = activation_of(owner)
        assert activation is not None
        fc1, fc2 = (ThirdPartyGroupedLinear(owner, name, recipe, strict, path) for name in weight_names(owner))
        fc2.scales_dy_alone = True
        self.num_experts, self.fc1_output_storage = fc1.num_groups, "unquantized"
        modules: dict[str, nn.Module] = {
            "permute": Permute(),
            "fc1": fc1,
            "activation": activation,
            "fc2": fc2,
            "unpermute": Unpermute(),
        }
        Sequential.__init__(self, modules, rules=RULES[self.fc1_output_storage])
        self.train(owner.training)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register()  # the unpickling process may have converted nothing yet


# -- recognising -------------------------------------------------------------------------------------------------------


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts that may be converted: transformers' or torchtitan's."""
    return torchtitan_experts.is_experts(module) or (
        _registry() is not None
        and all(flag in module.__dict__ for flag in _FLAGS)
        and hasattr(module.__dict__.get("config"), "_experts_implementation")
        and all(hasattr(module, name) for name in weight_names(module))
    )


def is_third_party(module: nn.Module) -> bool:
    """Whether a module's experts were converted."""
    return isinstance(module._modules.get(NAME), (ThirdPartyExperts, torchtitan_experts.ThirdPartyRows))


def weight_names(module: nn.Module) -> list[str]:
    """Returns the names of the stacked weights, in order of use."""
    if torchtitan_experts.is_experts(module):
        return list(torchtitan_experts.WEIGHTS)
    return ["gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"]


def layers_of(module: nn.Module) -> list[ThirdPartyGroupedLinear]:
    """Returns the layers of a converted module; none if it is not converted."""
    if not is_third_party(module):
        return []
    return [layer for layer in module._modules[NAME].modules() if isinstance(layer, ThirdPartyGroupedLinear)]  # type: ignore[union-attr]


def unsupported_reason(module: nn.Module, recipe: Recipe) -> str:
    """Returns why experts cannot be converted; empty if they can."""
    name = type(module).__name__
    for flag, value, why in _UNSUPPORTED:
        if getattr(module, flag, not value) is value:
            return f"its class is {name}, and {why}"
    if is_parametrized(module):
        return "it is parametrized. Convert it first, then register the parametrization"
    if why := unsupported_codes_reason(module, weight_names(module), own_forward=True):
        return why
    titan = torchtitan_experts.is_experts(module)
    if titan and (why := torchtitan_experts.unsupported_forward(module)):
        return why
    if not titan and ("forward" in module.__dict__ or not hasattr(type(module).forward, "__wrapped__")):
        return f"its forward is not the one that transformers' registry of experts dispatches, but {name}'s own"
    if not is_third_party(module) and hasattr(module, NAME):
        return f"its class is {name}, and it has an attribute {NAME!r} of its own"
    if why := _unsupported_shape(module):
        return why
    if not titan and not is_third_party(module) and activation_of(module) is None:
        known = ", ".join((*_GATED, "clamped-swiglu") if module.has_gate else _UNGATED)
        return f"its class is {name}, and its activation is none of Octavo's: {known}"
    return next(
        (why for layer in layers_of(module) if (why := layer._recipe_unsupported_reason(recipe))),
        grouped_unsupported_reason(recipe),
    )


def _unsupported_shape(module: nn.Module) -> str:
    names = weight_names(module)
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


# -- the activation ----------------------------------------------------------------------------------------------------


def activation_of(module: Any) -> Activation | None:
    """Returns the activation that computes what the module's own does; None if there is none. It calls the module's
    own on numbers up to 1000 in magnitude, which also reach clamps."""
    numbers: Any = {"device": "cpu", "dtype": torch.float32}
    with torch.no_grad(), torch.device("cpu"):  # the module's own code may make tensors on the default device
        extremes = torch.tensor([-1000.0, -100.0, 40.0, 200.0, 1000.0], **numbers)
        x = torch.cat([torch.linspace(-12, 12, 97, **numbers), extremes])
        up = torch.ones(1, **numbers)
        if module.has_gate:
            up = torch.tensor([-500.0, -0.7, 1.3, 30.0], **numbers).repeat_interleave(len(x))
            x = torch.cat([x.repeat(4), up])
        try:
            wanted = getattr(module, _GATE if module.has_gate else "act_fn")(x[None])
        except Exception:  # it may need tensors elsewhere
            return None
        bound = 1e-5 * (wanted.abs() + up.abs())
        return next((one for one in _candidates(module) if bool(((one(x[None]) - wanted).abs() <= bound).all())), None)


def _candidates(module: Any) -> list[Activation]:
    """Returns the activations that a module may have."""
    found: list[Activation] = [KINDS[name]() for name in (_GATED if module.has_gate else _UNGATED)]
    if module.has_gate:
        limit, alpha = (_first_number(module, names) for names in (_LIMITS, _SLOPES))
        if limit is not None and limit > 0:
            kind = KINDS["clamped-swiglu"]
            found.append(kind(limit=limit, alpha=1.0, glu_linear_offset=0.0))
            if alpha is not None:
                found.append(kind(limit=limit, alpha=alpha, glu_linear_offset=1.0))
    return found


def _first_number(module: Any, names: tuple[str, ...]) -> float | None:
    values = (getattr(module, name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, (int, float))), None)


# -- converting --------------------------------------------------------------------------------------------------------


def adopt(module: Any, path: str, recipe: Recipe, strict: bool) -> None:
    """Converts experts, or changes the recipe of converted ones."""
    if is_third_party(module):
        for layer in layers_of(module):
            layer.recipe = recipe  # type: ignore[assignment]
            layer.strict = strict
        return
    module._octavo_load_hook = module.register_load_state_dict_pre_hook(_before_load)
    if torchtitan_experts.is_experts(module):
        torchtitan_experts.adopt(module, path, recipe, strict)
        return
    register()
    module.add_module(NAME, ThirdPartyExperts(module, recipe, strict, path))
    module._octavo_config = module.config
    module.config = copy.copy(module.config)
    nested = {key: getattr(module.config, key, None) for key in getattr(module.config, "sub_configs", ())}
    for key, inner in nested.items():  # the setter also changes the configs inside
        setattr(module.config, key, copy.copy(inner))
    module.config._experts_implementation = NAME


def release(module: Any) -> None:
    """Undoes `adopt`."""
    module.__dict__.pop("_octavo_load_hook").remove()
    if torchtitan_experts.is_experts(module):
        torchtitan_experts.release(module)
        return
    del module._modules[NAME]
    module.config = module.__dict__.pop("_octavo_config")


def _before_load(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    """The hook of converted experts, which load their parameters themselves."""
    refuse_codes(module, weight_names(module), state_dict, prefix)


def register() -> None:
    """Adds the entry "octavo" to transformers' registry of experts, if transformers is imported."""
    registry = _registry()
    if registry is not None and NAME not in registry:
        registry.register(NAME, experts_forward)


def _registry() -> Any:
    return getattr(sys.modules.get(_PACKAGE), _REGISTRY, None)


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any
) -> Tensor:
    """The entry of the registry: runs the converted experts of a module."""
    experts: Any = module._modules.get(NAME)
    if experts is None:
        raise UnsupportedConfig(
            f"This {type(module).__name__} has no recipe yet. octavo.convert(model, recipe) gives it one, and chooses "
            f"the experts implementation {NAME!r} itself."
        )
    if top_k_weights.dtype != hidden_states.dtype:
        top_k_weights = top_k_weights.float()
    # transformers writes the number of experts for slots of other processes: `sort` drops them, Experts would refuse
    y: Tensor = experts(hidden_states, sort(top_k_index, experts.num_experts), top_k_weights)
    return y.to(hidden_states.dtype)
