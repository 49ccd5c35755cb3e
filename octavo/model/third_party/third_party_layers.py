"""What converted modules of other packages run: layers that read the parameters of the module around them.

ThirdPartyLinear           one weight of the module
ThirdPartyGroupedLinear    one stacked weight of the module
ThirdPartyAttention        the projections of an nn.MultiheadAttention
ThirdPartyExperts          tokens, and the experts of each: an `octavo.moe.Experts`
ThirdPartyMLP              rows that are sorted by expert, and their numbers
ThirdPartyRows             the same, if the gate and the other half are two parameters
"""

import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from octavo.errors import UnsupportedConfig
from octavo.fusion.rules.moe_experts import RULES
from octavo.fusion.sequential import Sequential
from octavo.model.third_party.known_experts import Weight
from octavo.model.third_party.owned import Owned
from octavo.moe.experts import Experts
from octavo.ops.grouped_linear import GroupedLinear
from octavo.ops.linear import Linear
from octavo.ops.permute import Permute, Unpermute
from octavo.recipes import Recipe
from octavo.weights.quantized_parameters import parameter
from octavo.weights.quantized_weight import QuantizedWeight

NAME = "octavo"  # of the submodule of converted experts


class _OnOwner(Owned):
    """What layers share whose weight is a parameter of another module; they hold the state of their recipe alone.

    A layer asks that module for the parameter at every use: torch.export, functional_call and FSDP replace parameters,
    and the table that holds them. A weight in another layout is laid out anew at each call, and its gradient comes back
    in the parameter's layout.
    """

    num_groups: int = 0  # of a layer of experts

    def _take(
        self, owner: nn.Module, place: Weight, experts: int, recipe: Recipe, strict: bool, path: str, **settings: Any
    ) -> None:
        """Set up what the layers' constructors would, with their other attributes, and without parameters."""
        layer: Any = self
        nn.Module.__init__(layer)
        self._owner, self._place_in_owner = weakref.ref(owner), place
        *groups, layer.out_features, layer.in_features = place.shape(owner.get_parameter(place.name), experts)
        if groups:
            layer.num_groups = layer.scales_per_operand = groups[0]
        for name, value in {"keep_weight_codes": True, **settings}.items():
            setattr(layer, name, value)
        layer.train(owner.training)
        layer._set_up(recipe, strict=strict, path=f"{path}.{place.name}" if path else place.name)

    @property
    def weight(self) -> Tensor:
        """The other module's parameter, or what follows from it."""
        return self._place_in_owner.seen(self._found(self._place_in_owner.name), self.num_groups)

    @property
    def bias(self) -> Tensor | None:
        """The other module's bias; None if it has none."""
        place = self._place_in_owner
        whole = self._found(place.bias) if place.bias else None
        return whole if whole is None or place.bias_part is None else whole.chunk(3)[place.bias_part]

    def _found(self, path: str) -> Tensor:
        """Return a parameter of the owner, or what a parametrization makes of it, such as a low-rank update."""
        module, name = self._holder(path)
        found: Tensor | None = None if module is None else module._parameters.get(name)
        if found is None and module is not None and is_parametrized(module, name):
            # in a graph not from torch's cache: a frame that fills it is guarded by the entry's absence
            found = module.parametrizations[name]() if torch.compiler.is_compiling() else getattr(module, name)
        if found is None:
            raise UnsupportedConfig(
                f"{path} is no longer a parameter of the module that octavo.convert took. Call octavo.revert(model) "
                "before it is removed."
            )
        return found

    def _holder(self, path: str) -> tuple[Any, str]:
        """Return the module that holds a parameter of the owner, and the parameter's name there."""
        *parts, name = path.split(".")
        module: Any = self._owner()
        for part in parts if module is not None else ():
            module = module._modules[part]
        return module, name

    def reset_parameters(self) -> None:
        layer: Any = self
        layer._reset_seed()  # the weight is the other module's to initialise

    def _trained_by(self) -> list[nn.Parameter]:
        module, name = self._holder(self._place_in_owner.name)
        own = None if module is None else module._parameters.get(name)
        if own is not None:
            return [own]
        return [p for p in module.parametrizations[name].parameters() if p.requires_grad]

    def _parametrized_weights(self) -> list[str]:
        module, name = self._holder(self._place_in_owner.name)
        own = None if module is None else module._parameters.get(name)
        return [] if own is not None and self._place_in_owner.is_whole(own, self.num_groups) else ["weight"]

    def _why_parametrized(self, option: str) -> str:
        if not self._parametrized_weights():
            return ""
        return (
            f"{option} needs a weight that stays from call to call, and this one is laid out anew for each, of "
            f"{self._place_in_owner.name}. Leave it out"
        )

    def _check_may_be_codes(self) -> None:
        layer: Any = self
        raise UnsupportedConfig(
            f"quantize_weights does not take {layer._path}, a parameter of another module. Leave it out of "
            "octavo.convert, with exclude=."
        )

    def _set_weights(self, whole: Tensor) -> None:
        """Replace the other module's parameter."""
        layer: Any = self
        module, name = self._holder(self._place_in_owner.name)
        old = module._parameters.get(name)
        if old is None or not self._place_in_owner.is_whole(old, self.num_groups):
            raise UnsupportedConfig(
                f"{layer._path} is laid out in another way than codes are, which have the shape {tuple(whole.shape)}. "
                "Leave it out of octavo.convert, with exclude=."
            )
        new = parameter(whole, old) if isinstance(whole, QuantizedWeight) else nn.Parameter(whole, old.requires_grad)
        module.register_parameter(name, new)
        layer._codes.drop(layer)
        layer._codes.has_quantized_weight = isinstance(new, QuantizedWeight)

    def _place(self) -> torch.device:
        return self._found(self._place_in_owner.name).device

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        layer: Any = self
        on_meta, rest = layer._on_meta, cast(Any, super())
        rest._apply(fn, recurse)
        # the other module moves its parameters after those of its submodules
        layer._on_meta = layer._on_meta or (on_meta and self._place().type == "meta")
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save nothing: the other module has saved its parameter just before. One that is codes becomes values."""
        layer: Any = self
        if layer._codes.has_quantized_weight:
            home = prefix.rpartition(f"{NAME}.")[0]
            destination[home + self._place_in_owner.name] = layer._codes.values(layer)

    def _stored_elsewhere(self, path: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the other module's parameters with their keys in a state dict."""
        home, place = path.rpartition(f"{NAME}.")[0], self._place_in_owner
        for name in (place.name, place.bias):
            if name:
                yield home + name, self._owner().get_parameter(name)  # type: ignore[union-attr]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        layer, others = cast(Any, self), cast(Any, super())
        others._load_from_state_dict(state_dict, prefix, *rest)
        layer._weights_loaded()  # by the other module, just before


class ThirdPartyLinear(_OnOwner, Linear):  # type: ignore[misc, override]
    """A Linear on a parameter [out, in] of another module, or one that is laid out as it.

    Args:
        owner: the module.
        place: the name and layout of the parameters.
        recipe: the recipe.
        strict: as in Linear.
        path: the owner's name in the model, for messages.
    """

    def __init__(self, owner: nn.Module, place: Weight, recipe: Recipe, strict: bool, path: str) -> None:
        self._take(owner, place, 0, recipe, strict, path, parallel=None, column_blocks=1)


class ThirdPartyGroupedLinear(_OnOwner, GroupedLinear):
    """A GroupedLinear on stacked parameters of another module.

    Args:
        owner: the module.
        place: the name and layout of the parameters.
        experts: the number of experts.
        recipe: the recipe.
        strict: as in GroupedLinear.
        path: the owner's name in the model, for messages.
        tail: as in GroupedLinear.
    """

    def __init__(
        self, owner: nn.Module, place: Weight, experts: int, recipe: Recipe, strict: bool, path: str, tail: str
    ) -> None:
        names = {"_weight_names": ["weight"], "_bias_names": ["bias"] if place.bias else []}
        self._take(owner, place, experts, recipe, strict, path, tail=tail, scale_bias=False, **names)


class ThirdPartyAttention(nn.Module):
    """The projections of a converted attention.

    Args:
        query: the layer of the queries.
        key: the layer of the keys.
        value: the layer of the values.
        out: the layer after the attention.
    """

    def __init__(
        self, query: ThirdPartyLinear, key: ThirdPartyLinear, value: ThirdPartyLinear, out: ThirdPartyLinear
    ) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = query, key, value, out


class ThirdPartyExperts(Experts):
    """The `octavo.moe.Experts` of a converted module: layers on that module's parameters, without any of its own.

    Args:
        fc1: the first layer.
        activation: the activation between the layers.
        fc2: the second layer.
    """

    def __init__(self, fc1: ThirdPartyGroupedLinear, activation: nn.Module, fc2: ThirdPartyGroupedLinear) -> None:
        fc2.scales_dy_alone = True
        self.num_experts, self.fc1_output_storage = fc1.num_groups, "unquantized"
        modules: dict[str, nn.Module] = {
            "permute": Permute(), "fc1": fc1, "activation": activation, "fc2": fc2, "unpermute": Unpermute(),
        }  # fmt: skip
        Sequential.__init__(self, modules, rules=RULES[self.fc1_output_storage])


class ThirdPartyMLP(Sequential):
    """The experts of a converted module that is called with rows.

    Args:
        fc1: the first layer.
        activation: the activation between the layers.
        fc2: the second layer.
    """

    def __init__(self, fc1: ThirdPartyGroupedLinear, activation: nn.Module, fc2: ThirdPartyGroupedLinear) -> None:
        super().__init__({"fc1": fc1, "activation": activation, "fc2": fc2})

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:  # type: ignore[override]
        """Return y for the rows of all experts, one expert after the other."""
        y: Any = super().forward(x, sizes, sizes)
        return y.to(x.dtype)


class ThirdPartyRows(nn.Module):
    """The gated experts of a converted module whose gate and other half are two parameters.

    Stacking the two would copy both at every step, so each has its own layer, and x is quantized for each.

    Args:
        gate: the layer of the gate.
        up: the layer of the other half.
        down: the second layer.
        activation: what activates the gate.
    """

    def __init__(
        self, gate: ThirdPartyGroupedLinear, up: ThirdPartyGroupedLinear, down: ThirdPartyGroupedLinear,
        activation: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate, self.up, self.down, self.activation = gate, up, down, activation

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Return y for the rows of all experts, one expert after the other."""
        h = self.activation(self.gate(x, sizes)) * self.up(x, sizes)
        y: Tensor = self.down(h, sizes)
        return y.to(x.dtype)
