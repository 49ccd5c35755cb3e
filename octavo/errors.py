"""What Octavo refuses, and how it says so.

Every refusal is a sentence with three parts: the rule, the value that broke it, the way out. Each class is also the
built-in exception a caller would expect, so `except ValueError` keeps working.
"""


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


def check_choice(value: object, allowed: tuple[object, ...], *, what: str) -> None:
    """Refuse a setting outside its list; the message is the list."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
        raise UnsupportedConfig(f"{what} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")


def check_not_negative(value: object, *, what: str) -> None:
    """Refuse anything but a float from 0 up that float32 holds."""
    if type(value) is not float or not 0.0 <= value < 3.4e38:
        raise UnsupportedConfig(f"{what} must be a number from 0 up to 3.4e38, got {value!r}.")
