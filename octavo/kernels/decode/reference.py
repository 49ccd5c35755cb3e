"""Decoding in plain torch. Its bits are the definition; `triton.py` matches them."""

import torch
from torch import Tensor

from octavo.formats import E5M2
from octavo.quant import scale_blocks
from octavo.quant.groups import Groups
from octavo.quant.groups.reference import pack
from octavo.quant.qtensor import QTensor


def decode(q: QTensor, groups: Groups | None) -> Tensor:
    values = q.spec.values(q)
    limited = scale_blocks.no_larger(values, torch.finfo(torch.bfloat16).max)
    if q.spec.fmt == E5M2:  # a code of Inf stays one
        limited = torch.where(q.spec.code_values(q).isinf(), values, limited)
    values = limited.to(torch.bfloat16)
    return values if groups is None else pack(values, groups)
