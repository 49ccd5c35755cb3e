"""Writes the result of a reference cast into a QTensor, in place, unless the skip flag is set."""

import torch
from torch import Tensor

from octavo.quant.qtensor import QTensor


def write(q: QTensor, skip: Tensor | None, *, codes: Tensor, scale: Tensor, global_scale: Tensor | None = None) -> None:
    """Copies into q's own tensors. The device reads the flag, never the host."""
    pairs = [(q.codes.view(torch.uint8), codes.view(torch.uint8)), (q.scale, scale)]
    if q.global_scale is not None and global_scale is not None:
        pairs.append((q.global_scale, global_scale))
    for into, new in pairs:
        into.copy_(new if skip is None else torch.where(skip.reshape(()) != 0, into, new))


def put(into: Tensor, new: Tensor, skip: Tensor | None) -> None:
    into.copy_(new if skip is None else torch.where(skip.reshape(()) != 0, into, new))
