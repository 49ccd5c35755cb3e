"""Octavo's exceptions, and the checks that raise them.

Every message is a sentence with three parts: the rule, the value that broke it, the way out. Each class also derives
from the built-in exception that a caller would expect, so `except ValueError` keeps working.
"""

import difflib
import inspect
import logging
import warnings
from collections.abc import Iterable, Sequence

import torch

from octavo.text import printable

__all__ = [
    "CollectiveFailed",
    "InvalidCheckpoint",
    "ModifiedInPlace",
    "UnknownSetting",
    "Unsupported",
    "UnsupportedConfig",
    "UnsupportedDevice",
    "UnsupportedDtype",
    "UnsupportedHardware",
    "UnsupportedShape",
]


log = logging.getLogger("octavo")
log.addHandler(logging.NullHandler())  # without it Python prints warnings of a program that set up no logging


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__


class Unsupported(Exception):
    """The base class of Octavo's exceptions. Catch it to catch them all.

    Example:
        >>> try:
        ...     octavo.Linear(4, 4, recipe="fp8")
        ... except octavo.errors.Unsupported as error:
        ...     print(type(error).__name__)
        UnsupportedConfig
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class UnsupportedShape(Unsupported, ValueError):
    """A tensor has a size, a number of dims or strides that the operation does not take.

    Example:
        >>> try:
        ...     octavo.Linear(8, 4)(torch.ones(2, 6))
        ... except octavo.errors.UnsupportedShape as error:
        ...     print(error)
        This Linear takes inputs [..., 8], got (2, 6). Check the layer before it, or in_features.
    """


class UnsupportedDtype(Unsupported, TypeError):
    """A tensor has a dtype that the operation does not take, or an argument has the wrong type.

    Example:
        >>> try:
        ...     octavo.Linear(8, 4)(torch.ones(2, 8, dtype=torch.float64))
        ... except octavo.errors.UnsupportedDtype as error:
        ...     print("float64" in str(error))
        True
    """


class UnsupportedDevice(Unsupported, ValueError):
    """A tensor is on a device that Octavo does not support, or two operands are on two devices.

    Example:
        >>> try:
        ...     octavo.Linear(8, 4)(torch.ones(2, 8, device="meta"))
        ... except octavo.errors.UnsupportedDevice as error:
        ...     print(error)
        x is on meta and the weight on cpu. Move them together.
    """


class UnsupportedHardware(Unsupported, RuntimeError):
    """This GPU, or this installation, lacks a feature that the call needs.

    Example:
        >>> with octavo.backend.use("triton"):
        ...     try:
        ...         octavo.backend.choose(torch.device("cpu"))
        ...     except octavo.errors.UnsupportedHardware as error:
        ...         print(str(error).split(":")[0])
        No Triton kernels here
    """


class UnsupportedConfig(Unsupported, ValueError):
    """An argument has a value that its function does not take, or two settings exclude each other.

    Example:
        >>> try:
        ...     octavo.recipe("fp8-curent")
        ... except octavo.errors.UnsupportedConfig as error:
        ...     print(str(error).split(". ")[-1])
        Did you mean 'fp8-current'?
    """


class CollectiveFailed(Unsupported, RuntimeError):
    """A collective did not complete: another rank has ended, or takes part with other shapes or in another order.

    The message names the layer that waited, the collective and this rank.

    Example:
        >>> issubclass(octavo.errors.CollectiveFailed, RuntimeError)
        True
    """


class UnknownSetting(UnsupportedConfig, TypeError):
    """A recipe or a quantizer has no setting of this name.

    Example:
        >>> try:
        ...     octavo.recipes.Delayed(window=16)
        ... except octavo.errors.UnknownSetting as error:
        ...     print(type(error).__name__)
        UnknownSetting
    """


class ModifiedInPlace(Unsupported, RuntimeError):
    """The program wrote to a tensor after forward, and backward needs the tensor as it was.

    Example:
        >>> layer = octavo.Linear(8, 4, recipe="bf16")
        >>> y = layer(torch.ones(2, 8, requires_grad=True))
        >>> with torch.no_grad():
        ...     _ = layer.weight.zero_()
        >>> try:
        ...     y.sum().backward()
        ... except octavo.errors.ModifiedInPlace as error:
        ...     print(type(error).__name__)
        ModifiedInPlace
    """


class InvalidCheckpoint(Unsupported, ValueError):
    """A checkpoint is not there, is incomplete, or has a file that is damaged or of another kind.

    Example:
        >>> try:
        ...     octavo.load_checkpoint("nowhere", nn.Linear(4, 4))
        ... except octavo.errors.InvalidCheckpoint as error:
        ...     print(error)
        There is no folder nowhere. Pass the folder that octavo.save_checkpoint was given, or a checkpoint in it.
    """


def warn(message: str, stacklevel: int = 2) -> None:
    """Warn as `warnings.warn` does, and say the same to the logger "octavo". A graph could not hold the logger."""
    message = printable(message)
    warnings.warn(message, stacklevel=stacklevel + 1)
    if not torch.compiler.is_compiling():
        log.warning(message)


def warn_caller(message: str) -> None:
    """Warn at the line that called Octavo: the first frame that is neither Octavo's nor torch's."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in ("octavo", "torch"):
        frame, level = frame.f_back, level + 1
    warn(message, stacklevel=level)


def check_choice(value: object, allowed: tuple[object, ...], *, what: str) -> None:
    """Raise for a setting outside `allowed`, with that list in the message."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
        texts = [choice for choice in allowed if isinstance(choice, str)]
        hint = nearest(value, texts) if isinstance(value, str) else ""
        if not isinstance(value, str) and str(value) in texts:
            hint = f" Pass the string {str(value)!r}."
        raise UnsupportedConfig(f"{what} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{hint}")


def nearest(word: str, names: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for a word that may be a misspelt name; "" if no name is like it."""
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
    """Return only the letters and digits, in lower case, so that spellings of a name compare equal."""
    return "".join([c for c in text.lower() if c.isalnum()])


def check_not_negative(value: object, *, what: str) -> None:
    """Raise for anything but a float of at least 0 that float32 holds."""
    if type(value) is not float or not 0.0 <= value < 3.4e38:
        raise UnsupportedConfig(f"{what} must be a number from 0 up to 3.4e38, got {value!r}.")


def check_factor(value: object, *, what: str) -> None:
    """Raise for anything but a number of at least 0 that float32 holds. A graph may have a symbol for it."""
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    if isinstance(value, bool) or not isinstance(value, numbers) or not 0 <= value < 3.4e38:  # type: ignore[operator]
        raise UnsupportedConfig(f"{what} must be a finite number from 0 up, got {value!r}. Pass a Python number.")


def check_whole(value: object, *, what: str, least: int = 1) -> None:
    """Raise for anything but a whole number of at least `least`."""
    if not is_whole(value) or value < least:  # type: ignore[operator]
        raise UnsupportedConfig(f"{what} must be a whole number from {least} up, got {value!r}. Pass an int.")


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number: an int, numpy's too, or the symbol that a graph has for one."""
    return not isinstance(value, (bool, torch.Tensor)) and (isinstance(value, int) or hasattr(value, "__index__"))
