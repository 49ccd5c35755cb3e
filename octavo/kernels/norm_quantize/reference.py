"""In plain torch there is nothing to gain: y is written, and cast."""

from octavo.kernels.norm_quantize import plain_forward as forward

__all__ = ["forward"]
