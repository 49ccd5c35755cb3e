"""The reference writes the gradient, then casts it: fusing them gains nothing in plain torch."""

from octavo.kernels.rotary.cast import plain_backward as backward

__all__ = ["backward"]
