"""Classes for converted instances of subclasses of nn.Linear.

A converted instance stays an instance of its own class and keeps that class's methods and attributes; its forward and
the state of its recipe are `octavo.Linear`'s.
"""

from typing import Any

import torch
from torch import nn

from octavo.ops.linear import Linear


def is_plain(module: nn.Linear) -> bool:
    """Whether the module's class inherits nn.Linear's forward."""
    return type(module).forward is nn.Linear.forward


def is_patched(module: nn.Module) -> bool:
    """Whether the instance has its own forward, which would hide the forward of its class."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def unpatch(module: nn.Linear) -> None:
    """Removes a forward that other libraries' hooks left on the instance, if it is the forward of the class."""
    if not is_patched(module):
        module.__dict__.pop("forward", None)


def stock_class(module: nn.Linear) -> type[nn.Linear]:
    """Returns the class that the module has when it is not converted."""
    return getattr(type(module), "_third_party", nn.Linear)


def clashes(module: nn.Linear) -> list[str]:
    """Returns the names that both the module, beyond nn.Linear, and `octavo.Linear` define. A method of nn.Module or
    nn.Linear that both override does not clash: octavo.Linear's calls the other one."""
    theirs = {name for parent in type(module).__mro__ if parent not in nn.Linear.__mro__ for name in vars(parent)}
    theirs |= set(vars(module))
    both = {name for name in _OURS & theirs if not hasattr(nn.Linear, name) and name not in _PLAIN}
    return sorted(both | (theirs & {"__reduce__", "__reduce_ex__"}))  # class_for defines its own


_OURS = frozenset(
    {name for parent in Linear.__mro__ if parent not in nn.Linear.__mro__ for name in vars(parent)}
    | set(vars(Linear(1, 1, device="meta", dtype=torch.float32)))
)
_PLAIN = frozenset(
    {"__orig_bases__", "__parameters__", "__annotations__"}
    | set(vars(nn.Linear(1, 1, device="meta", dtype=torch.float32)))
)


_CLASSES: dict[type, type[Linear]] = {nn.Linear: Linear}


def class_for(stock: type[nn.Linear]) -> type[Linear]:
    """Returns `octavo.Linear`, or for a subclass of nn.Linear a class that derives from both, cached."""
    if stock not in _CLASSES:
        names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
        both = type(stock.__name__, (Linear, stock), {**names, "_third_party": stock, "__reduce_ex__": _reduce})
        _CLASSES[stock] = both
    return _CLASSES[stock]


def _reduce(module: Linear, protocol: Any) -> Any:
    """Pickles the module by its stock class, which can be imported."""
    reduced: Any = super(Linear, module).__reduce_ex__(protocol)
    return (_blank, (stock_class(module),), *reduced[2:])


def _blank(stock: type[nn.Linear]) -> Linear:
    made = class_for(stock)
    return made.__new__(made)
