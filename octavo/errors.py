"""Octavo's exceptions, and the checks that raise them.

Every message is a sentence with three parts: the rule, the value that broke it, the way out. Each class also derives
from the built-in exception that a caller would expect, so `except ValueError` keeps working.
"""

import difflib
import inspect
import warnings
from collections.abc import Iterable, Sequence


class Unsupported(Exception):
    """Base class of all these exceptions. Catch it to catch them all."""


class UnsupportedShape(Unsupported, ValueError):
    """A size, a rank or a stride that the operation cannot take."""


class UnsupportedDtype(Unsupported, TypeError):
    """A dtype that the operation cannot take, or something that is not a tensor."""


class UnsupportedDevice(Unsupported, ValueError):
    """A tensor on a device that Octavo does not support, or two operands on two devices."""


class UnsupportedHardware(Unsupported, RuntimeError):
    """This chip, or this installation, lacks a feature that the call needs."""


class UnsupportedConfig(Unsupported, ValueError):
    """A setting, or a combination of settings, that has no meaning."""


class UnknownSetting(UnsupportedConfig, TypeError):
    """A setting whose name does not exist."""


class ModifiedInPlace(Unsupported, RuntimeError):
    """A tensor that backward needs was written to after forward."""


def warn_caller(message: str) -> None:
    """Warns at the line that called Octavo: the first frame that is neither Octavo's nor torch's."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in ("octavo", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def check_choice(value: object, allowed: tuple[object, ...], *, what: str) -> None:
    """Raises for a setting outside `allowed`, with that list in the message."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
        texts = [choice for choice in allowed if isinstance(choice, str)]
        hint = nearest(value, texts) if isinstance(value, str) else ""
        if not isinstance(value, str) and str(value) in texts:
            hint = f" Pass the string {str(value)!r}."
        raise UnsupportedConfig(f"{what} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{hint}")


def nearest(word: str, names: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for a word that may be a misspelt name; "" if no name is like it."""
    wanted, known = _letters(word), {name: _letters(name) for name in names}
    alike = [name for name, letters in known.items() if letters == wanted]
    alike = alike or [name for name, letters in known.items() if wanted and letters.startswith(wanted)]
    alike = alike or [name for name, letters in known.items() if wanted and wanted in letters]
    if not alike:
        close = difflib.get_close_matches(wanted, known.values(), 1)
        alike = [name for name, letters in known.items() if letters in close]
    return did_you_mean(alike)


def did_you_mean(names: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(map(repr, names))}?" if names else ""


def _letters(text: str) -> str:
    """Returns only the letters and digits, in lower case, so that spellings of a name compare equal."""
    return "".join([c for c in text.lower() if c.isalnum()])


def check_not_negative(value: object, *, what: str) -> None:
    """Raises for anything but a float of at least 0 that float32 holds."""
    if type(value) is not float or not 0.0 <= value < 3.4e38:
        raise UnsupportedConfig(f"{what} must be a number from 0 up to 3.4e38, got {value!r}.")
