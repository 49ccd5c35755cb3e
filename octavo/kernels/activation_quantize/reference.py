"""In plain torch there is nothing to gain: the value is written, and cast."""

from octavo.kernels.activation_quantize import plain_backward as backward
from octavo.kernels.activation_quantize import plain_forward as forward

__all__ = ["backward", "forward"]
