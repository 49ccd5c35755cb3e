"""Gradients put off in a graph, which cannot hand Python objects over: forward makes room for dy as dw needs it, which
leaves the graph beside x; backward fills it in; whoever computes dw reads both.

The room is dy itself where wgrad is unquantized; otherwise column codes, their scale (flat), a second-level scale where
the scheme has one, and an empty tensor [rows, 0], which tells how many rows there are.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QProto
from octavo.quant.quantizer import Quantizer


def slots(delay: str, spec: Quantizer | None) -> int:
    """How many tensors wait for dy, whose columns `spec` quantizes."""
    return 0 if delay != "post" else 1 if spec is None else 4 if spec.two_level else 3


def slots_of_x(kept: str, spec: Quantizer | None) -> int:
    """How many tensors x is beside them."""
    return 1 if kept == "plain" else 0 if spec is None else 3 if spec.two_level else 2


def room(q: QProto, rows: int, y: TensorProto) -> tuple[TensorProto, ...]:
    """The slots of codes like these."""
    scale = TensorProto((math.prod(q.scale.shape),), q.scale.dtype, y.device)
    level2 = () if q.global_scale is None else (q.global_scale,)
    return (q.codes, scale, *level2, TensorProto((rows, 0), y.dtype, y.device))


def unfilled(protos: Sequence[TensorProto]) -> tuple[Tensor, ...]:
    """NaN until backward comes: a dw that is asked for without one must not look like one."""
    made = tuple(p.empty() for p in protos)
    for scale in made[1:] or made:
        scale.fill_(255 if scale.dtype == torch.uint8 else math.nan)  # NaN as an E8M0 and as an E4M3 too
    return made
