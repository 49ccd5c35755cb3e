"""One step of AdamW on one tensor: it updates values and moments in place, and measures the new values.

The arithmetic is float32, in the order of torch.optim.AdamW. Values are float32, or bfloat16 with stochastic rounding.
Moments are float32, bfloat16, or 8-bit codes in blocks of 128 elements with a float32 scale each:

    first moment     E4M3, rounded to nearest
    second moment    its square root in E4M3. A root that would round to zero takes the smallest code instead: a root
                     of zero beside a first moment that is not zero would divide by `eps` alone
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo import backend

BLOCK = 128  # elements that share a scale of 8-bit moments
SETTINGS = ("decay", "step_size", "root", "blend1", "beta2", "blend2", "eps", "unscale", "skip")


class Moments(NamedTuple):
    """The running averages of a gradient and of its square, of as many elements as the values."""

    average: Tensor  # float32, bfloat16 or uint8 codes
    square: Tensor
    average_scale: Tensor | None = None  # [blocks] float32, of codes
    square_scale: Tensor | None = None

    @classmethod
    def zeros(cls, like: Tensor, kind: str) -> "Moments":
        """Allocate moments of a tensor's shape: `kind` is "float32", "bfloat16" or "8bit"."""
        if kind == "8bit":
            codes = [torch.zeros(like.shape, dtype=torch.uint8, device=like.device) for _ in range(2)]
            blocks = -(-like.numel() // BLOCK)
            scales = [torch.zeros(blocks, dtype=torch.float32, device=like.device) for _ in range(2)]
            return cls(*codes, *scales)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[kind]
        return cls(*[torch.zeros(like.shape, dtype=dtype, device=like.device) for _ in range(2)])


def adamw(
    values: Tensor, grad: Tensor, moments: Moments, settings: Tensor, *, seed: Tensor | None = None,
    copy: Tensor | None = None, amaxes: int = 1,
) -> Tensor | None:  # fmt: skip
    """Update contiguous values and moments by a gradient, and return the amaxes of the new values, float32 [amaxes], of
    as many equal parts one after the other; None if that is 0.

    `settings` is float32 [9] on the same device, in the order of SETTINGS: a CUDA graph reads it at each replay.
    Gradients are multiplied by `unscale`; with `skip` other than 0 nothing changes. `seed`
    is int64 [2], seed and step, for values that are rounded stochastically. `copy` receives the new values in its own
    dtype."""
    update = backend.implementation(__name__, values).adamw
    return update(values, grad, moments, settings, seed, copy, amaxes)
