"""What Octavo refuses, and how it says so.

Every refusal is a sentence with three parts: the rule, the value that broke it, the way out. Each class is also the
built-in exception a caller would expect, so `except ValueError` keeps working.
"""

import difflib
import inspect
import warnings
from collections.abc import Iterable, Sequence


class Unsupported(Exception):
    """Base of every refusal. Catch this to catch them all."""


class UnsupportedShape(Unsupported, ValueError):
    """A size, a rank or a stride that the operation cannot take."""


class UnsupportedDtype(Unsupported, TypeError):
    """A dtype that the operation cannot take, or something that is not a tensor."""


class UnsupportedDevice(Unsupported, ValueError):
    """A tensor on a device that is not served, or two operands on two devices."""


class UnsupportedHardware(Unsupported, RuntimeError):
    """This chip, or this installation, lacks what was asked for."""


class UnsupportedConfig(Unsupported, ValueError):
    """A setting, or a combination of settings, that has no meaning."""


class UnknownSetting(UnsupportedConfig, TypeError):
    """A setting by a name that there is none of."""


class ModifiedInPlace(Unsupported, RuntimeError):
    """A tensor that backward needs was written to after forward."""


def warn_caller(message: str) -> None:
    """Warn at the line that called Octavo: the first frame that is neither Octavo's nor torch's."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in ("octavo", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def check_choice(value: object, allowed: tuple[object, ...], *, what: str) -> None:
    """Refuse a setting outside its list; the message is the list."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
        texts = [choice for choice in allowed if isinstance(choice, str)]
        hint = nearest(value, texts) if isinstance(value, str) else ""
        if not isinstance(value, str) and str(value) in texts:
            hint = f" Pass the string {str(value)!r}."
        raise UnsupportedConfig(f"{what} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{hint}")


def nearest(word: str, names: Iterable[str]) -> str:
    """ " Did you mean 'x'?", for a word that may be a misspelt name; empty if none is like it."""
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
    """Letters and digits alone, in small letters: how a name sounds."""
    return "".join([c for c in text.lower() if c.isalnum()])


def check_not_negative(value: object, *, what: str) -> None:
    """Refuse anything but a float from 0 up that float32 holds."""
    if type(value) is not float or not 0.0 <= value < 3.4e38:
        raise UnsupportedConfig(f"{what} must be a number from 0 up to 3.4e38, got {value!r}.")
