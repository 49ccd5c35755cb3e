"""What a class of somebody's has to define, said when it is defined; and the name that it has in graphs."""

import hashlib
import inspect
from typing import Any


def defined(cls: type, name: str, base: type) -> Any:
    """What a class has under a name, if somebody wrote it."""
    for parent in cls.__mro__:
        if parent is base or not issubclass(parent, base):
            return None
        if name in parent.__dict__:
            return parent.__dict__[name]
    return None


def check_functions(cls: type, base: type, names: tuple[str, ...], legacy: str) -> bool:
    """Refuse a class with half of a contract. Whether it has it all."""
    own = [name for name in names[:2] if name in cls.__dict__]
    if own and legacy in cls.__dict__:
        raise TypeError(f"{cls.__name__} defines {legacy} and {own[0]}: one forward in one piece, or one in two.")
    compute, save = (defined(cls, name, base) for name in names[:2])
    if (compute is None) != (save is None):
        has, misses = (names[0], names[1]) if save is None else (names[1], names[0])
        raise TypeError(f"{cls.__name__} defines {has} and not {misses}. Define both, or {legacy} alone.")
    for name in names:
        found = defined(cls, name, base)
        if found is not None and name != names[2] and not isinstance(found, staticmethod):
            raise TypeError(
                f"{cls.__name__}.{name} must be a @staticmethod: it sees its arguments and not the module, which may "
                "have changed until backward."
            )
    return compute is not None


def nearest(cls: type, base: type, forwards: tuple[str, ...]) -> str:
    """Which of these a class runs: the first that somebody wrote, from the class up. Empty if there is none."""
    for parent in cls.__mro__:
        if parent is base:
            return ""
        for name in forwards:
            if name in parent.__dict__:
                return name
    return ""


def check_backward(cls: type, name: str, forward: str, legacy: bool) -> None:
    """Refuse a backward that a parent wrote for the other kind of forward: it has other arguments."""
    owner = next(parent for parent in cls.__mro__ if name in parent.__dict__)
    if owner is not cls and getattr(owner, "op_is_legacy", legacy) != legacy:
        raise TypeError(
            f"{cls.__name__} runs {forward}, and its {name} is that of {owner.__name__}, for a forward in "
            f"{'two pieces' if legacy else 'one piece'}. Define {name} too."
        )


def name_of(cls: type, known: Any) -> str:
    """The name of a class in graphs: the same in every process, and another for each class of this one."""
    name = f"{cls.__module__}.{cls.__qualname__}".replace("<locals>.", "").replace("<", "").replace(">", "")
    found = name = f"{name}.{digest_of(cls)}"
    count = 1
    while found in known:
        count += 1
        found = f"{name}.{count}"
    return found


def digest_of(cls: type) -> str:
    """Of the text of a class and its parents: the same name may stand for other code tomorrow."""
    text = ""
    for parent in cls.__mro__:
        if parent.__module__.startswith(("octavo.", "torch.")) or parent is object:
            continue
        try:
            text += inspect.getsource(parent)
        except (OSError, TypeError):
            text += parent.__qualname__
    return hashlib.sha256(text.encode()).hexdigest()[:8]
