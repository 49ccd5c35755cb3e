"""Codes that kernels fill: schemes, empty pairs of rows and columns, and what is in them afterwards, as bytes."""

import math

import torch

from octavo.formats import E4M3, E5M2
from octavo.quant import Block1D, Block2D, TensorProto, Tensorwise
from octavo.quant.quantizer import CastArgs
from tests.support.same_tensors import poison

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECS = [Tensorwise(), Tensorwise(E5M2), Block1D(), Block1D(E5M2, "fp32"), Block2D(), Block2D(E4M3, "fp32")]


def empty_pair(spec, m, k, dtype, device, sides="rc", column=None):
    """Orientations to be filled, poisoned."""
    like = TensorProto((m, k), dtype, torch.device(device))
    row = spec.proto(like).empty() if "r" in sides else None
    other = (column or spec).proto(like, 0).empty() if "c" in sides else None
    return tuple(None if q is None else poison(q) for q in (row, other))


def given_to(spec, device, inverse_scale=0.37):
    """Delayed scaling for a scheme that takes it, with an amax to be raised. Without a multiplier: current scaling."""
    if not spec.takes_inverse_scale or inverse_scale is None:
        return CastArgs()
    return CastArgs(
        inverse_scale=torch.tensor([inverse_scale], device=device), running_amax=torch.full((1,), 1e-3, device=device)
    )


def contents(pair, given):
    """Bytes of all that is filled. An amax of NaN is one NaN, whichever the kernels had."""
    filled = [t for q in pair if q is not None for t in q.tensors()]
    filled += [given.running_amax.nan_to_num(-1.0)] if given.running_amax is not None else []
    return [t.cpu().contiguous().view(-1).view(torch.uint8) for t in filled]


def assert_same_bytes(found, want, what=""):
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape, what
        assert torch.equal(a, b), f"{what}: {int((a != b).sum())} of {a.numel()} bytes differ"


ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 60.0, -60.0, 1e-30, 3e38)
