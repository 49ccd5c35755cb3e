"""The experts of other packages that `octavo.convert` takes: `KNOWN`, a row for each kind.

A row says how a module is recognised, where its weights lie, which layouts of them Octavo does not take, what its
activation is, and how its forward comes to call the submodule `octavo` (`third_party_layers.py`) in place of its own
code. `third_party_experts.py` has what is the same for every row.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from octavo.errors import UnsupportedConfig
from octavo.model.third_party.derived_class import derived
from octavo.model.third_party.expert_activation import activation_of
from octavo.model.third_party.third_party_layers import ThirdPartyExperts, ThirdPartyGroupedLinear, ThirdPartyRows
from octavo.moe.permutation import sort

NAME = "octavo"  # of the submodule, and of the entry in transformers' registry
Refused = tuple[tuple[str, bool, str], ...]  # layouts: an attribute, the value that is refused, why
MakeLayer = Callable[[Any, str, str], Any]  # makes a layer of this class, for this weight, with this tail


class Known(Protocol):
    """A kind of experts of another package, whose weights are stacked parameters [experts, out, in]."""

    refused: Refused

    def recognise(self, module: Any) -> bool:
        """Return whether a module is of this kind, converted or not."""

    def weights(self, module: Any) -> tuple[str, ...]:
        """Return the names of the weights in order of use: the last one makes y."""

    def own_forward(self, module: Any) -> str:
        """Return why a module's forward may not be replaced; empty if it may."""

    def activation(self, module: Any) -> Any:
        """Return the activation; None if Octavo has none that computes the same."""

    def layers(self, module: Any, layer: MakeLayer) -> nn.Module:
        """Return the submodule for a module."""

    def install(self, module: Any) -> None:
        """Make a module's forward call its submodule."""

    def uninstall(self, module: Any) -> None:
        """Undo `install`."""


class TransformersExperts:
    """The experts of transformers, which dispatch their forward by a registry.

    A converted module keeps its class, and gets a copy of its config that chooses the entry "octavo". Other modules
    share the original config, so a conversion of some experts leaves the others alone.
    """

    FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # set by the decorator of such classes
    refused: Refused = (
        ("is_transposed", True, "its weights are [in, out], and Octavo multiplies by [out, in]"),
        ("is_concatenated", False, "gate and up alternate in its weights, and Octavo takes two halves here"),
        ("has_bias", True, "its experts have biases"),
        ("has_post_expert_norm", True, "it normalizes the output of each expert"),
        ("_is_expert_parallel", True, "its experts are distributed over several processes"),
    )

    def recognise(self, module: Any) -> bool:
        return (
            _registry() is not None
            and all(flag in module.__dict__ for flag in self.FLAGS)
            and hasattr(module.__dict__.get("config"), "_experts_implementation")
            and all(hasattr(module, name) for name in self.weights(module))
        )

    def weights(self, module: Any) -> tuple[str, ...]:
        return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"

    def own_forward(self, module: Any) -> str:
        if "forward" in module.__dict__ or not hasattr(type(module).forward, "__wrapped__"):
            name = type(module).__name__
            return f"its forward is not the one that transformers' registry of experts dispatches, but {name}'s own"
        return ""

    def activation(self, module: Any) -> Any:
        return activation_of(module)

    def layers(self, module: Any, layer: MakeLayer) -> nn.Module:
        fc1, fc2 = (layer(ThirdPartyGroupedLinear, name, "untouched") for name in self.weights(module))
        return DispatchedExperts(fc1, self.activation(module), fc2)

    def install(self, module: Any) -> None:
        _register()
        module._octavo_config = module.config
        module.config = copy.copy(module.config)
        nested = {key: getattr(module.config, key, None) for key in getattr(module.config, "sub_configs", ())}
        for key, inner in nested.items():  # the setter also changes the configs inside
            setattr(module.config, key, copy.copy(inner))
        module.config._experts_implementation = NAME

    def uninstall(self, module: Any) -> None:
        module.config = module.__dict__.pop("_octavo_config")


class TorchtitanExperts:
    """The experts of torchtitan, which are called with rows and sizes, and compute SwiGLU.

    A converted module changes its class, to one that derives from its own.
    """

    HOME = ("torchtitan.models.common.moe", "GroupedExperts")
    WEIGHTS = ("w1_EFD", "w3_EFD", "w2_EDF")  # gate, up, down
    refused: Refused = ()

    def recognise(self, module: Any) -> bool:
        return self._stock_class(module) is not None and all(hasattr(module, name) for name in self.WEIGHTS)

    def _stock_class(self, module: Any) -> Any:
        """Return torchtitan's class that a module is an instance of, and no class that is derived from it and bears
        the same name; None if the module is of another kind."""
        home = (kind for kind in type(module).__mro__ if (kind.__module__, kind.__qualname__) == self.HOME)
        return next((kind for kind in home if not hasattr(kind, "_third_party")), None)

    def weights(self, module: Any) -> tuple[str, ...]:
        return self.WEIGHTS

    def own_forward(self, module: Any) -> str:
        stock, own = self._stock_class(module), getattr(type(module), "_third_party", type(module))
        parts = ("forward", "_grouped_mm")
        names = [name for name in parts if getattr(own, name, None) is not getattr(stock, name, None)]
        if names or "forward" in module.__dict__:
            which = names[0] if names else "forward"
            return f"it is a {type(module).__name__} with a {which} of its own. Convert it before that is replaced"
        return ""

    def activation(self, module: Any) -> Any:
        return "swiglu"  # ThirdPartyRows computes it

    def layers(self, module: Any, layer: MakeLayer) -> nn.Module:
        home = self._stock_class(module)
        base = next(parent for parent in home.__mro__ if nn.Module in parent.__bases__)
        # torchtitan's trainer checks that every module of a model is an instance of its own base class
        linear, rows = (
            kind if base is home else derived(kind, base, named=kind)
            for kind in (ThirdPartyGroupedLinear, ThirdPartyRows)
        )
        made: nn.Module = rows(*(layer(linear, name, "zero") for name in self.WEIGHTS))
        return made

    def install(self, module: Any) -> None:
        module.__class__ = derived(_CallsRows, type(module), named=type(module))

    def uninstall(self, module: Any) -> None:
        module.__class__ = type(module)._third_party


KNOWN: tuple[Known, ...] = (TorchtitanExperts(), TransformersExperts())


class _CallsRows(nn.Module):
    """The forward of converted experts of torchtitan. It is a module so that instances can change their class to one
    that derives from it."""

    octavo: ThirdPartyRows

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        y: Tensor = self.octavo(x_RD, num_tokens_per_expert_E)
        return y


# -- the registry of transformers --------------------------------------------------------------------------------------


def _registry() -> Any:
    return getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", None)


def _register() -> None:
    """Add the entry "octavo" to transformers' registry of experts, if transformers is imported."""
    registry = _registry()
    if registry is not None and NAME not in registry:
        registry.register(NAME, experts_forward)


class DispatchedExperts(ThirdPartyExperts):
    """The experts that the entry of the registry runs."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _register()  # the unpickling process may have converted nothing yet


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
