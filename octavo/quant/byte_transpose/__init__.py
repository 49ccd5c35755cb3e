"""The transpose of a matrix of codes, byte for byte. Where a scheme's blocks are square, it turns row codes into the
column codes that a cast of the same values writes, without those values: half the bytes of a cast from bfloat16."""

import torch
from torch import Tensor

from octavo import backend
from octavo._torch.fakes import is_fake


def transpose_bytes(codes: Tensor, out: Tensor) -> None:
    """Write the transpose of codes [M, K] to out [K, M], both uint8."""
    if torch.compiler.is_compiling() or is_fake(codes):  # a tracer sees one operator of torch's
        out.copy_(codes.T)
    else:
        backend.implementation(__name__, codes).transpose(codes, out)
