"""The functions that a user's class runs, checked when the class is defined; and the name of the class in graphs."""

import hashlib
import inspect
import re
from inspect import getattr_static
from typing import Any

from octavo.runtime.contract import LAYERS

OP = ("op_forward_compute", "op_forward_save_ctx", "op_backward")
FUSER = ("fuser_forward_compute", "fuser_forward_save_ctx", "fuser_backward")
SEES_ARGUMENTS = "it sees its arguments and not the module, which may have changed until backward"


def forward_of(cls: type, forms: tuple[tuple[str, ...], ...], legacy: str) -> str:
    """Return the name of the forward that a class runs, the first in its MRO: split in two, as in one of `forms`, or
    legacy; empty if there is none. Refuse a class that defines only one function of a split forward."""
    for names in forms:
        _check_split(cls, names[:2], legacy)
    forwards = (legacy, *[names[0] for names in forms])
    return next((name for parent in cls.__mro__ for name in forwards if name in parent.__dict__), "")


def _check_split(cls: type, names: tuple[str, ...], legacy: str) -> None:
    own = [name for name in names if name in cls.__dict__]
    if own and legacy in cls.__dict__:
        raise TypeError(f"{cls.__name__} defines {legacy} and {own[0]}: a legacy forward and a split one. Define one.")
    has = [name for name in names if getattr_static(cls, name, None) is not None]
    if len(has) == 1:
        misses = next(name for name in names if name not in has)
        raise TypeError(f"{cls.__name__} defines {has[0]} and not {misses}. Define both, or {legacy} alone.")
    for name in has:
        check_static(cls, name, SEES_ARGUMENTS)


def check_static(cls: type, name: str, why: str) -> None:
    if not isinstance(getattr_static(cls, name), staticmethod):
        raise TypeError(f"{cls.__name__}.{name} must be a @staticmethod: {why}.")


def check_backward(cls: type, name: str, forward: str, legacy: bool) -> None:
    """Refuse a forward without a backward, or with a parent's backward for the other kind of forward, which takes other
    arguments."""
    owner: Any = next((parent for parent in cls.__mro__ if name in parent.__dict__), None)
    if owner is None:
        raise TypeError(f"{cls.__name__} defines {forward} and no {name}. Define it.")
    if owner is not cls and getattr(owner, "op_is_legacy", legacy) != legacy:
        raise TypeError(
            f"{cls.__name__} runs {forward}, and its {name} is that of {owner.__name__}, for a "
            f"{'split' if legacy else 'legacy'} forward. Define {name} too."
        )


def name_of(cls: type, kind: str) -> str:
    """Return the name of a class in graphs: equal in every process, and unique among the classes of this process."""
    name = f"{kind}.{cls.__module__}.{cls.__qualname__}".replace("<locals>.", "")
    found = name = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{name}.{_digest_of(cls)}")
    count = 1
    while found in LAYERS:
        count += 1
        found = f"{name}.{count}"
    return found


def _digest_of(cls: type) -> str:
    """Return a digest of the source of a class and its parents, because the code behind a name may change."""
    text = ""
    for parent in cls.__mro__:
        if parent.__module__.startswith(("octavo.", "torch.")) or parent is object:
            continue
        try:
            text += inspect.getsource(parent)
        except (OSError, TypeError):
            text += parent.__qualname__
    return hashlib.sha256(text.encode()).hexdigest()[:8]
