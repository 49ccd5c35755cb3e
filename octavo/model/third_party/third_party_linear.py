"""Classes for converted instances of subclasses of nn.Linear.

A converted instance stays an instance of its own class and keeps that class's methods and attributes; its forward and
the state of its recipe are `octavo.Linear`'s.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from octavo.model.third_party.derived_class import derived
from octavo.ops.linear import Linear


def is_plain(module: nn.Linear) -> bool:
    """Return whether the module's class inherits nn.Linear's forward."""
    return type(module).forward is nn.Linear.forward


def is_patched(module: nn.Module) -> bool:
    """Return whether the instance has its own forward, which would hide the forward of its class."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def patched_reason(module: nn.Module, by: str) -> str:
    """Return why a module with a forward of its own on the instance cannot be converted."""
    if hasattr(module, "_hf_hook"):  # accelerate's, which also moves weights between devices
        return (
            "accelerate's hooks of device_map= replaced its forward. Load the model without device_map, convert it, "
            "then call accelerate.dispatch_model"
        )
    return f"its forward was replaced by {by} on the instance. Convert it before that"


# transformers' tensor parallelism wraps a forward to send what the layer needs
_PLANNED = "TensorParallelLayer.install_forward.<locals>.tp_forward"


def planned_forward(module: nn.Module) -> Callable[[], None] | None:
    """Return what wraps the forward of the module's class again, as transformers' tensor parallelism has wrapped it;
    None if it has not."""
    own: Any = module.__dict__.get("forward")
    if getattr(own, "__qualname__", "") != _PLANNED:
        return None
    held = {name: cell.cell_contents for name, cell in zip(own.__code__.co_freevars, own.__closure__, strict=True)}
    if getattr(held.get("original_forward"), "__func__", None) is not type(module).forward:
        return None

    def wrap() -> None:
        module.__dict__.pop("forward", None)
        held["self"].install_forward(module, held["mesh"])

    return wrap


def unpatch(module: nn.Linear) -> None:
    """Remove a forward that other libraries' hooks left on the instance, if it is the forward of the class."""
    if not is_patched(module):
        module.__dict__.pop("forward", None)


def class_for(stock: type[nn.Linear]) -> type[Linear]:
    """Return `octavo.Linear`, or for a subclass of nn.Linear a class that derives from both."""
    return Linear if stock is nn.Linear else derived(Linear, stock, named=stock)


def stock_class(module: nn.Linear) -> type[nn.Linear]:
    """Return the class that the module has when it is not converted."""
    return getattr(type(module), "_third_party", nn.Linear)


def clashes(module: nn.Linear) -> list[str]:
    """Return the names that both the module, beyond nn.Linear, and `octavo.Linear` define. A method of nn.Module or
    nn.Linear that both override does not clash: octavo.Linear's calls the other one."""
    theirs = _names(type(module), nn.Linear) | set(vars(module))
    both = {name for name in _own_names() & theirs if not hasattr(nn.Linear, name)}
    return sorted(both | (theirs & {"__reduce__", "__reduce_ex__"}))  # a derived class defines its own


@cache
def _own_names() -> frozenset[str]:
    """Return the names of `octavo.Linear` and of its instances that nn.Linear and its instances do not have."""
    layer, plain = (kind(1, 1, device="meta", dtype=torch.float32) for kind in (Linear, nn.Linear))
    everywhere = {"__orig_bases__", "__parameters__", "__annotations__", *vars(plain)}
    return frozenset(_names(Linear, nn.Linear) | set(vars(layer))) - everywhere


def _names(kind: type, base: type) -> set[str]:
    """Return the names that a class defines beyond those of a base class."""
    return {name for parent in kind.__mro__ if parent not in base.__mro__ for name in vars(parent)}
