"""The experts of other packages that `octavo.convert` takes: `KNOWN`, a row for each kind.

A row says how a module is recognised, where its weights lie, which layouts of them Octavo does not take, what its
activation is, and how its forward comes to call the submodule `octavo` (`third_party_layers.py`) in place of its own
code. `third_party_experts.py` has what is the same for every row.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from octavo.errors import UnsupportedConfig
from octavo.model.third_party.derived_class import derived
from octavo.model.third_party.expert_activation import activation_of
from octavo.model.third_party.third_party_layers import ThirdPartyExperts, ThirdPartyGroupedLinear, ThirdPartyRows
from octavo.moe.permutation import sort

NAME = "octavo"  # of the submodule, and of the entry in transformers' registry


@dataclass(frozen=True)
class Known:
    """A kind of experts of another package, whose weights are stacked parameters [experts, out, in]."""

    recognise: Callable[[Any], bool]  # whether a module is of this kind, converted or not
    weights: Callable[[Any], tuple[str, ...]]  # the names of the weights in order of use: the last one makes y
    refused: tuple[tuple[str, bool, str], ...]  # layouts: an attribute, the value that is refused, why
    own_forward: Callable[[Any], str]  # why a module's forward may not be replaced; empty if it may
    activation: Callable[[Any], Any]  # None: Octavo has none that computes the same
    layers: Callable[[Any, Callable[..., Any]], nn.Module]  # makes the submodule, from what makes the layer of a weight
    install: Callable[[Any], None]  # makes the module's forward call the submodule
    uninstall: Callable[[Any], None]


# -- transformers ------------------------------------------------------------------------------------------------------
# Its experts dispatch their forward by a registry. A converted module keeps its class, and gets a copy of its config
# that chooses the entry "octavo". Other modules share the original config, so a conversion of some experts leaves the
# others alone.

_PACKAGE, _REGISTRY = "transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS"
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # set by the decorator of such classes


def _registry() -> Any:
    return getattr(sys.modules.get(_PACKAGE), _REGISTRY, None)


def _is_dispatched(module: Any) -> bool:
    return (
        _registry() is not None
        and all(flag in module.__dict__ for flag in _FLAGS)
        and hasattr(module.__dict__.get("config"), "_experts_implementation")
        and all(hasattr(module, name) for name in _dispatched_weights(module))
    )


def _dispatched_weights(module: Any) -> tuple[str, ...]:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"


def _not_dispatched(module: Any) -> str:
    if "forward" in module.__dict__ or not hasattr(type(module).forward, "__wrapped__"):
        name = type(module).__name__
        return f"its forward is not the one that transformers' registry of experts dispatches, but {name}'s own"
    return ""


class DispatchedExperts(ThirdPartyExperts):
    """The experts that the entry of transformers' registry runs."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _register()  # the unpickling process may have converted nothing yet


def _dispatched_layers(module: Any, layer: Callable[..., Any]) -> nn.Module:
    activation = activation_of(module)
    assert activation is not None  # else the module was refused
    fc1, fc2 = (layer(ThirdPartyGroupedLinear, name, "untouched") for name in _dispatched_weights(module))
    return DispatchedExperts(fc1, activation, fc2)


def _choose_entry(module: Any) -> None:
    _register()
    module._octavo_config = module.config
    module.config = copy.copy(module.config)
    nested = {key: getattr(module.config, key, None) for key in getattr(module.config, "sub_configs", ())}
    for key, inner in nested.items():  # the setter also changes the configs inside
        setattr(module.config, key, copy.copy(inner))
    module.config._experts_implementation = NAME


def _restore_config(module: Any) -> None:
    module.config = module.__dict__.pop("_octavo_config")


def _register() -> None:
    """Add the entry "octavo" to transformers' registry of experts, if transformers is imported."""
    registry = _registry()
    if registry is not None and NAME not in registry:
        registry.register(NAME, experts_forward)


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any
) -> Tensor:
    """Run the converted experts of a module: the entry of the registry."""
    experts: Any = module._modules.get(NAME)
    if experts is None:
        raise UnsupportedConfig(
            f"This {type(module).__name__} has no recipe yet. octavo.convert(model, recipe) gives it one, and chooses "
            f"the experts implementation {NAME!r} itself."
        )
    if top_k_weights.dtype != hidden_states.dtype:
        top_k_weights = top_k_weights.float()
    # transformers gives assignments to experts of other processes the index num_experts: `sort` drops them, and Experts
    # would refuse them
    y: Tensor = experts(hidden_states, sort(top_k_index, experts.num_experts), top_k_weights)
    return y.to(hidden_states.dtype)


# -- torchtitan --------------------------------------------------------------------------------------------------------
# Its experts are called with rows and sizes. A converted module changes its class, to one that derives from its own.

_HOME, _CLASS = "torchtitan.models.common.moe", "GroupedExperts"
_TITAN_WEIGHTS = ("w1_EFD", "w3_EFD", "w2_EDF")  # gate, up, down


class _CallsRows(nn.Module):
    """The forward of converted experts of torchtitan. It is a module so that instances can change their class to one
    that derives from it."""

    octavo: ThirdPartyRows

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        y: Tensor = self.octavo(x_RD, num_tokens_per_expert_E)
        return y


def _titan_class(module: nn.Module) -> Any:
    """Return torchtitan's class of experts that a module is an instance of; None if it is of another kind."""
    home = (kind for kind in type(module).__mro__ if (kind.__module__, kind.__qualname__) == (_HOME, _CLASS))
    return next((kind for kind in home if not hasattr(kind, "_third_party")), None)  # a derived class has that name too


def _is_titan(module: Any) -> bool:
    return _titan_class(module) is not None and all(hasattr(module, name) for name in _TITAN_WEIGHTS)


def _titan_forward(module: Any) -> str:
    stock, own = _titan_class(module), getattr(type(module), "_third_party", type(module))
    names = [name for name in ("forward", "_grouped_mm") if getattr(own, name, None) is not getattr(stock, name, None)]
    if names or "forward" in module.__dict__:
        which = names[0] if names else "forward"
        return f"it is a {type(module).__name__} with a {which} of its own. Convert it before that is replaced"
    return ""


def _titan_layers(module: Any, layer: Callable[..., Any]) -> nn.Module:
    """Return the layers, of classes that derive from torchtitan's base class of modules: its trainer checks that every
    module of a model does."""
    home = _titan_class(module)
    base = next(parent for parent in home.__mro__ if nn.Module in parent.__bases__)
    linear, rows = (
        kind if base is home else derived(kind, base, named=kind) for kind in (ThirdPartyGroupedLinear, ThirdPartyRows)
    )
    made: nn.Module = rows(*(layer(linear, name, "zero") for name in _TITAN_WEIGHTS))
    return made


def _derive(module: Any) -> None:
    module.__class__ = derived(_CallsRows, type(module), named=type(module))


def _underive(module: Any) -> None:
    module.__class__ = type(module)._third_party


# -- the table ---------------------------------------------------------------------------------------------------------

KNOWN = (
    Known(
        recognise=_is_titan,
        weights=lambda _: _TITAN_WEIGHTS,
        refused=(),
        own_forward=_titan_forward,
        activation=lambda _: "SwiGLU",  # always, which ThirdPartyRows computes
        layers=_titan_layers,
        install=_derive,
        uninstall=_underive,
    ),
    Known(
        recognise=_is_dispatched,
        weights=_dispatched_weights,
        refused=(
            ("is_transposed", True, "its weights are [in, out], and Octavo multiplies by [out, in]"),
            ("is_concatenated", False, "gate and up alternate in its weights, and Octavo takes two halves here"),
            ("has_bias", True, "its experts have biases"),
            ("has_post_expert_norm", True, "it normalizes the output of each expert"),
            ("_is_expert_parallel", True, "its experts are distributed over several processes"),
        ),
        own_forward=_not_dispatched,
        activation=activation_of,
        layers=_dispatched_layers,
        install=_choose_entry,
        uninstall=_restore_config,
    ),
)
