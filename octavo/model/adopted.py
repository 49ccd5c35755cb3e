"""Classes for instances of a subclass of nn.Linear that became an `octavo.Linear`.

Such an instance stays one of its own class, with that class's methods and attributes; forward, and what a recipe keeps,
are `octavo.Linear`'s.
"""

from typing import Any

from torch import nn

from octavo.modules.linear import Linear


def is_plain(module: nn.Linear) -> bool:
    """Whether its class has nn.Linear's forward."""
    return type(module).forward is nn.Linear.forward


def is_patched(module: nn.Linear) -> bool:
    """Whether the instance has a forward that is not its class's: the class would not be asked."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def unpatch(module: nn.Linear) -> None:
    """Take away a forward that hooks of other libraries left on the instance: it is the one of the class."""
    if not is_patched(module):
        module.__dict__.pop("forward", None)


def stock_class(module: nn.Linear) -> type[nn.Linear]:
    """The class that the module has when it is not converted."""
    return getattr(type(module), "_adopted", nn.Linear)


def clashes(module: nn.Linear) -> list[str]:
    """Names that both the module, beyond nn.Linear, and `octavo.Linear` define. A method of nn.Module or nn.Linear that
    both override is none: ours calls the other one."""
    theirs = {name for parent in type(module).__mro__ if parent not in nn.Linear.__mro__ for name in vars(parent)}
    theirs |= set(vars(module))
    both = {name for name in _OURS & theirs if not hasattr(nn.Linear, name) and name not in _PLAIN}
    return sorted(both | (theirs & {"__reduce__", "__reduce_ex__"}))  # a pickle of ours has its own


_OURS = frozenset(
    {name for parent in Linear.__mro__ if parent not in nn.Linear.__mro__ for name in vars(parent)}
    | set(vars(Linear(1, 1, device="meta")))
)
_PLAIN = frozenset(vars(nn.Linear(1, 1, device="meta"))) | {"__orig_bases__", "__parameters__", "__annotations__"}


_CLASSES: dict[type, type[Linear]] = {nn.Linear: Linear}


def class_for(stock: type[nn.Linear]) -> type[Linear]:
    """`octavo.Linear`, or for a subclass of nn.Linear a class that is both: the same one at every call."""
    if stock not in _CLASSES:
        names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
        both = type(stock.__name__, (Linear, stock), {**names, "_adopted": stock, "__reduce_ex__": _reduce})
        _CLASSES[stock] = both
    return _CLASSES[stock]


def _reduce(module: Linear, protocol: Any) -> Any:
    """A pickle names the class that can be imported."""
    reduced: Any = super(Linear, module).__reduce_ex__(protocol)
    return (_blank, (stock_class(module),), *reduced[2:])


def _blank(stock: type[nn.Linear]) -> Linear:
    made = class_for(stock)
    return made.__new__(made)
