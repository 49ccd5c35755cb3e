"""The reference writes the value, then casts it: fusing them gains nothing in plain torch."""

from octavo.kernels.activation.cast import plain_backward as backward
from octavo.kernels.activation.cast import plain_forward as forward

__all__ = ["backward", "forward", "writes_dx"]


def writes_dx(*_: object) -> bool:
    return True
