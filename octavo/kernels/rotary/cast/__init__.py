"""The gradient of rows of q, k and v that writes its result as codes only (`octavo.kernels.rotary`, cast while it is
computed).

    backward    the gradients of q, k and v, rotated back and side by side, in their dtype, into codes

Codes, scales and running amaxes have the bits that `rotate_back` and `fill_pair` produce. Where no tile cast takes the
codes (`octavo.kernels.tile_cast`), for blocks of float32, and where a tile would reach over two of q, k and v, the
gradient is written, then cast.
"""

from torch import Tensor

from octavo import backend
from octavo.kernels.rotary import rotate_back
from octavo.kernels.tile_cast import TileCast
from octavo.quant.casts import fill_pair


def backward(dq: Tensor, dk: Tensor, dv: Tensor, own: Tensor, other: Tensor, target: TileCast) -> None:
    """Fill the codes of the gradient of qkv [B · T, (H + 2 S) D], to the bits of
    `fill_pair(rotate_back(dq, dk, dv, own, other).flatten(0, 1), *target)`."""
    backend.implementation(__name__, dq).backward(dq, dk, dv, own, other, target)


def plain_backward(dq: Tensor, dk: Tensor, dv: Tensor, own: Tensor, other: Tensor, target: TileCast) -> None:
    """Write the gradient, then cast it."""
    whole = rotate_back(dq, dk, dv, own, other)
    fill_pair(whole.view(-1, whole.shape[-1]) if whole.numel() else whole.flatten(0, 1), *target)
