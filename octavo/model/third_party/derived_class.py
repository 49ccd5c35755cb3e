"""Classes that derive from one of Octavo's and one of another package's, made when they are first needed.

A module that is converted keeps its identity, so its class changes, and other code must still find an instance of its
own class. Such a class cannot be imported by its name, so instances are pickled by the two classes it derives from.
"""

from typing import Any

_CLASSES: dict[tuple[type, type], type] = {}


def derived(ours: type, theirs: type, *, named: type) -> Any:
    """Return the class that derives from both, and bears the name of one of them, cached."""
    if (ours, theirs) not in _CLASSES:
        members = {name: getattr(named, name) for name in ("__module__", "__qualname__", "__doc__")}
        members |= {"_ours": ours, "_third_party": theirs, "_named": named, "__reduce_ex__": _reduce}
        _CLASSES[ours, theirs] = type(named.__name__, (ours, theirs), members)
    return _CLASSES[ours, theirs]


def _reduce(module: Any, protocol: Any) -> Any:
    kind = type(module)
    reduced: Any = super(kind._ours, module).__reduce_ex__(protocol)
    return (_blank, (kind._ours, kind._third_party, kind._named), *reduced[2:])


def _blank(ours: type, theirs: type, named: type) -> Any:
    made = derived(ours, theirs, named=named)
    return made.__new__(made)
