"""The reference writes the value, then casts it: fusing them gains nothing in plain torch."""

from octavo.kernels.activation_quantize import plain_backward as backward
from octavo.kernels.activation_quantize import plain_forward as forward

__all__ = ["backward", "forward"]
