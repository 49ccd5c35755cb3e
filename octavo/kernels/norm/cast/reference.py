"""The reference writes y, then casts it: fusing them gains nothing in plain torch."""

from octavo.kernels.norm.cast import plain_forward as forward

__all__ = ["forward"]
