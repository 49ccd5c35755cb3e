"""The submodule of converted experts: layers that read the parameters of the module around them.

ThirdPartyExperts    tokens, and the experts of each: an `octavo.moe.Experts`
ThirdPartyRows       rows that are sorted by expert, and their numbers
"""

import copy
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig
from octavo.fusion.rules.moe_experts import RULES
from octavo.fusion.sequential import Sequential
from octavo.moe.experts import Experts
from octavo.ops.activation import Activation
from octavo.ops.grouped_linear import GroupedLinear
from octavo.ops.permute import Permute, Unpermute
from octavo.ops.quantized import Quantized
from octavo.recipes import Recipe


class ThirdPartyGroupedLinear(GroupedLinear):
    """A GroupedLinear whose weight is a parameter of another module; it holds the state of its recipe alone.

    It asks that module for the parameter at every use: torch.export, functional_call and FSDP replace parameters, and
    the table that holds them. The reference is weak: one that is not would keep a deleted model in memory until
    Python's garbage collector runs.

    Args:
        owner: the module.
        key: the name of the parameter, of shape [groups, out, in].
        recipe: the recipe.
        strict: as in GroupedLinear.
        path: the owner's name in the model, for messages.
        tail: as in GroupedLinear.
    """

    def __init__(
        self, owner: nn.Module, key: str, recipe: Recipe, strict: bool, path: str, tail: str = "untouched"
    ) -> None:
        nn.Module.__init__(self)
        self._owner, self._key = weakref.ref(owner), key
        self.num_groups, self.out_features, self.in_features = owner.get_parameter(key).shape
        self.scales_per_operand = self.num_groups
        self.tail, self.scale_bias, self.keep_weight_codes = tail, False, True
        self._weight_names, self._bias_names = ["weight"], []
        self.register_parameter("bias", None)
        self.train(owner.training)
        self._set_up(recipe, strict=strict, path=f"{path}.{key}" if path else key)

    @property
    def weight(self) -> nn.Parameter:
        """The other module's parameter."""
        owner = self._owner()
        found = None if owner is None else owner._parameters.get(self._key)
        if found is None:
            raise UnsupportedConfig(
                f"{self._path} is no longer a parameter of the experts that octavo.convert took. Call "
                "octavo.revert(model) before it is removed or parametrized."
            )
        return found

    def reset_parameters(self) -> None:
        self._reset_seed()  # the weight is the other module's to initialise

    def _trained_by(self) -> list[nn.Parameter]:
        return [self.weight]

    def _parametrized_weights(self) -> list[str]:
        return []

    def _check_holdable(self) -> None:
        raise UnsupportedConfig(
            f"quantize_weights does not take {self._path}, a parameter of another module's experts. Leave them out of "
            "octavo.convert, with exclude=."
        )

    def _place(self) -> torch.device:
        return self.weight.device

    def _apply(self, fn: Any, recurse: bool = True) -> "ThirdPartyGroupedLinear":
        on_meta = self._on_meta
        super()._apply(fn, recurse)
        # the other module moves its parameters after those of its submodules
        self._on_meta = self._on_meta or (on_meta and self._place().type == "meta")
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ThirdPartyGroupedLinear":
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        state = {name: value for name, value in self.__dict__.items() if name != "_owner"}
        owner = self._owner()  # a copy of the owner is on record before its parts are copied
        copied = weakref.ref(memo.get(id(owner), owner)) if owner is not None else self._owner
        Quantized.__setstate__(new, {**copy.deepcopy(state, memo), "_owner": copied})
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": self._owner()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_owner": weakref.ref(state["_owner"])})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._weights_loaded()  # by the other module, just before


class ThirdPartyExperts(Experts):
    """The `octavo.moe.Experts` of a converted module: layers on that module's parameters, without any of its own.

    Args:
        fc1: the first layer.
        activation: the activation between the layers.
        fc2: the second layer.
    """

    def __init__(self, fc1: ThirdPartyGroupedLinear, activation: Activation, fc2: ThirdPartyGroupedLinear) -> None:
        fc2.scales_dy_alone = True
        self.num_experts, self.fc1_output_storage = fc1.num_groups, "unquantized"
        modules: dict[str, nn.Module] = {
            "permute": Permute(), "fc1": fc1, "activation": activation, "fc2": fc2, "unpermute": Unpermute(),
        }  # fmt: skip
        Sequential.__init__(self, modules, rules=RULES[self.fc1_output_storage])


class ThirdPartyRows(nn.Module):
    """The SwiGLU experts of a converted module whose gate and other half are two parameters.

    Stacking the two would copy both at every step, so each has its own layer, and x is quantized for each.

    Args:
        gate: the layer of the gate.
        up: the layer of the other half.
        down: the second layer.
    """

    def __init__(
        self, gate: ThirdPartyGroupedLinear, up: ThirdPartyGroupedLinear, down: ThirdPartyGroupedLinear
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Return y for the rows of all experts, one expert after the other."""
        h = F.silu(self.gate(x, sizes)) * self.up(x, sizes)
        y: Tensor = self.down(h, sizes)
        return y.to(x.dtype)
