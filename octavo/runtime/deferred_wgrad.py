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
    """Return the number of buffers for dy, whose columns `spec` quantizes."""
    return 1 if spec is None else 4 if spec.two_level else 3


def abstract_dy_buffers(q: QProto, rows: int, y: TensorProto) -> tuple[TensorProto, ...]:
    """Return buffers for column codes like q, of a dy with that many rows."""
    scale = TensorProto((math.prod(q.scale.shape),), q.scale.dtype, y.device)
    level2 = () if q.global_scale is None else (q.global_scale,)
    return (q.codes, scale, *level2, TensorProto((rows, 0), y.dtype, y.device))


# Bits of a NaN that no arithmetic makes, by dtype, and the integers that hold them. A scale of one byte, E8M0 or E4M3,
# has no NaN to spare: codes beside it begin with other bytes than those of a NaN.
_BITS = {
    torch.float32: (torch.int32, 0x7FC00C7A),
    torch.bfloat16: (torch.int16, 0x7FE5),
    torch.float16: (torch.int16, 0x7E65),
    torch.uint8: (torch.uint8, 255),
}
_CODE, _CODES = 0xA5, 16


def unfilled_dy_buffers(protos: Sequence[TensorProto]) -> tuple[Tensor, ...]:
    """Return the buffers, NaN until backward fills them: a dw computed without a backward must not look like a
    gradient."""
    buffers = tuple(p.empty() for p in protos)
    for integers, number in _marks(buffers):
        integers.fill_(number)
    return buffers


def are_unfilled(buffers: Sequence[Tensor]) -> Tensor | None:
    """Return whether no backward has filled the buffers, on their device; None where there is nothing to fill."""
    found = [(integers == number).all() for integers, number in _marks(buffers)]
    return torch.stack(found).all() if found else None


def _marks(buffers: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Return the parts of the buffers that tell whether they were filled, as integers, and what they are until then."""
    scales = [t for t in (buffers[1:] or buffers) if t.numel()]
    marks = []
    for scale in scales:
        integer, number = _BITS[torch.uint8 if scale.element_size() == 1 else scale.dtype]
        marks.append((scale.view(integer), number))
    if scales and all([t.element_size() == 1 for t in scales]):
        marks.append((buffers[0].view(torch.uint8).view(-1)[:_CODES], _CODE))
    return marks
