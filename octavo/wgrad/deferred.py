"""Weight gradients that a graph leaves to `backward_dw()`. A graph cannot hand over Python objects: forward makes
buffers for dy as dw needs it, and returns them beside x; backward fills them; `backward_dw()` reads both.

The buffers are one for dy itself where wgrad is unquantized. Otherwise they are column codes, their scale (flat), a
global scale where the scheme has one, and an empty tensor [rows, 0], which tells how many rows there are.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QProto
from octavo.quant.quantizer import Quantizer


def dy_buffer_count(spec: Quantizer | None) -> int:
    """The number of buffers for dy, whose columns `spec` quantizes."""
    return 1 if spec is None else 4 if spec.two_level else 3


def abstract_dy_buffers(q: QProto, rows: int, y: TensorProto) -> tuple[TensorProto, ...]:
    """Buffers for column codes like q, of a dy with that many rows."""
    scale = TensorProto((math.prod(q.scale.shape),), q.scale.dtype, y.device)
    level2 = () if q.global_scale is None else (q.global_scale,)
    return (q.codes, scale, *level2, TensorProto((rows, 0), y.dtype, y.device))


def unfilled_dy_buffers(protos: Sequence[TensorProto]) -> tuple[Tensor, ...]:
    """The buffers, NaN until backward fills them: a dw computed without a backward must not look like a gradient."""
    buffers = tuple(p.empty() for p in protos)
    for scale in buffers[1:] or buffers:
        scale.fill_(255 if scale.dtype == torch.uint8 else math.nan)  # NaN as an E8M0 and as an E4M3 too
    return buffers
