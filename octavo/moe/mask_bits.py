"""Routing masks as bits: eight experts in a byte, the first in the lowest bit."""

import torch
from torch import Tensor

from octavo.errors import UnsupportedDtype, UnsupportedShape, check_whole
from octavo.ops.inputs import arrived

BITS = 8


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a mask of experts into bits, an eighth of its bytes.

    Args:
        mask: bool [..., E], True where a token goes to an expert.

    Returns:
        The bits [..., E / 8], rounded up, in uint8: expert 0 is the lowest bit of the first byte. `sort` and `permute`
            take them, with `num_experts`.

    Raises:
        UnsupportedDtype: the mask is not bool.
        UnsupportedShape: the mask has no dims.

    Example:
        >>> octavo.moe.pack_mask(torch.tensor([[True, False, True], [False, True, True]]))
        tensor([[5],
                [6]], dtype=torch.uint8)
    """
    mask = arrived(mask)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedDtype(f"pack_mask takes a mask, bool [..., E], got {got}. Cast it by .bool().")
    if mask.dim() < 1:
        raise UnsupportedShape("pack_mask takes a mask [..., E], got one without dims.")
    wide = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % BITS))
    bytes_ = wide.reshape(*mask.shape[:-1], wide.shape[-1] // BITS, BITS)
    return (bytes_ << _places(mask.device)).sum(-1, dtype=torch.uint8)


def unpack_mask(bits: Tensor, num_experts: int) -> Tensor:
    """Unpack bits that `pack_mask` made, or another library with the first expert in the lowest bit.

    Args:
        bits: the bits [..., E / 8], rounded up, in uint8. Those after the last expert are not read.
        num_experts: the number of experts.

    Returns:
        The mask [..., num_experts], bool.

    Raises:
        UnsupportedDtype: the bits are not uint8.
        UnsupportedShape: the bits have no dims, or not as many bytes as the experts need.
        UnsupportedConfig: `num_experts` is no number from 1 up.

    Example:
        >>> octavo.moe.unpack_mask(torch.tensor([[5], [6]], dtype=torch.uint8), 3)
        tensor([[ True, False,  True],
                [False,  True,  True]])
    """
    bits = arrived(bits)
    check_whole(num_experts, what="The number of experts")
    if not isinstance(bits, Tensor) or bits.dtype != torch.uint8:
        got = bits.dtype if isinstance(bits, Tensor) else type(bits).__name__
        raise UnsupportedDtype(f"Bits of a mask are uint8 [..., E / 8], got {got}. octavo.moe.pack_mask makes them.")
    needed = -(-num_experts // BITS)
    if bits.dim() < 1 or bits.shape[-1] != needed:
        raise UnsupportedShape(
            f"Bits of a mask of {num_experts} experts have {needed} bytes in their last dim, got {tuple(bits.shape)}."
        )
    found = (bits[..., None] >> _places(bits.device)) & 1
    return found.flatten(-2)[..., :num_experts].bool()


def _places(device: torch.device) -> Tensor:
    return torch.arange(BITS, dtype=torch.uint8, device=device)
