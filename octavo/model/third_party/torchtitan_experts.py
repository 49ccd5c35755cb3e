"""Experts of torchtitan's models: modules with stacked weights w1, w2 and w3, called with rows and sizes.

A converted module changes its class, to one that derives from its own. It gets a submodule `octavo` with a layer for
each weight, which holds the state of the recipe alone. The gate w1 and the other half w3 are two parameters. Stacking
them would copy both at every step, so each has its own layer, and x is quantized for each.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.model.third_party.third_party_grouped_linear import ThirdPartyGroupedLinear
from octavo.recipes import Recipe

NAME = "octavo"  # of the submodule
WEIGHTS = ("w1_EFD", "w3_EFD", "w2_EDF")  # gate, up, down
_HOME, _CLASS = "torchtitan.models.common.moe", "GroupedExperts"


class ThirdPartyRows(nn.Module):
    """The layers of converted experts: rows in, rows out.

    Args:
        owner: the module with the weights.
        recipe: the recipe of all layers.
        strict: as in GroupedLinear.
        path: the module's name in the model, for messages.
    """

    def __init__(self, owner: nn.Module, recipe: Recipe, strict: bool, path: str) -> None:
        super().__init__()
        layer = _with_protocol(ThirdPartyGroupedLinear, owner)
        self.gate, self.up, self.down = (layer(owner, name, recipe, strict, path, "zero") for name in WEIGHTS)
        self.train(owner.training)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Returns y for the rows of all experts, one expert after the other."""
        h = F.silu(self.gate(x, sizes)) * self.up(x, sizes)
        y: Tensor = self.down(h, sizes)
        return y.to(x.dtype)


def stock_class(module: nn.Module) -> type | None:
    """Returns torchtitan's class of experts that a module is an instance of; None if it is of another kind."""
    home = (kind for kind in type(module).__mro__ if (kind.__module__, kind.__qualname__) == (_HOME, _CLASS))
    return next((kind for kind in home if not hasattr(kind, "_third_party")), None)


def is_experts(module: nn.Module) -> bool:
    """Whether a module is torchtitan's experts, converted or not."""
    return stock_class(module) is not None and all(hasattr(module, name) for name in WEIGHTS)


def unsupported_forward(module: Any) -> str:
    """Returns why a module's forward may not be replaced; empty if it may."""
    stock: Any = stock_class(module)
    own: Any = getattr(type(module), "_third_party", type(module))
    names = [name for name in ("forward", "_grouped_mm") if getattr(own, name, None) is not getattr(stock, name, None)]
    if names or "forward" in module.__dict__:
        which = names[0] if names else "forward"
        return f"it is a {type(module).__name__} with a {which} of its own. Convert it before that is replaced"
    return ""


def adopt(module: Any, path: str, recipe: Recipe, strict: bool) -> None:
    """Converts experts that are not converted yet."""
    module.add_module(NAME, _with_protocol(ThirdPartyRows, module)(module, recipe, strict, path))
    module.__class__ = _class_for(type(module))


def release(module: Any) -> None:
    """Undoes `adopt`."""
    del module._modules[NAME]
    module.__class__ = type(module)._third_party


# -- classes -----------------------------------------------------------------------------------------------------------

_CLASSES: dict[tuple[type, ...], type] = {}


def _forward(module: Any, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
    y: Tensor = module.octavo(x_RD, num_tokens_per_expert_E)
    return y


def _class_for(stock: type) -> type:
    """Returns the class of converted instances of a class, cached."""
    if (stock,) not in _CLASSES:
        names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
        members = {**names, "_third_party": stock, "forward": _forward, "__reduce_ex__": _reduce}
        _CLASSES[stock,] = type(stock.__name__, (stock,), members)
    return _CLASSES[stock,]


def _with_protocol(kind: type, owner: nn.Module) -> Any:
    """Returns a class that derives from `kind` and from torchtitan's base class of modules, cached: its trainer checks
    that every module of a model does."""
    home: Any = stock_class(owner)
    base = next(parent for parent in home.__mro__ if nn.Module in parent.__bases__)
    if base is home:
        return kind
    return _combined(kind, base)


def _combined(kind: type, base: type) -> type:
    if (kind, base) not in _CLASSES:
        members: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        members |= {"__doc__": kind.__doc__, "_kind": (kind, base), "__reduce_ex__": _reduce}
        _CLASSES[kind, base] = type(kind.__name__, (kind, base), members)
    return _CLASSES[kind, base]


def _reduce(module: Any, protocol: Any) -> Any:
    """Pickles a module by classes that can be imported."""
    reduced: Any = super(type(module), module).__reduce_ex__(protocol)
    key = type(module)._kind if "_kind" in vars(type(module)) else (type(module)._third_party,)
    return (_blank, key, *reduced[2:])


def _blank(kind: type, base: type | None = None) -> Any:
    made: Any = _class_for(kind) if base is None else _combined(kind, base)
    return made.__new__(made)
