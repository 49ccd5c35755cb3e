"""Decoding in plain torch. Its bits are the definition; `triton.py` matches them."""

import torch
from torch import Tensor

from octavo.quant import blocks
from octavo.quant.groups import Groups
from octavo.quant.groups.reference import pack
from octavo.quant.qtensor import QTensor


def decode(q: QTensor, groups: Groups | None) -> Tensor:
    values = blocks.no_larger(q.spec.values(q), torch.finfo(torch.bfloat16).max).to(torch.bfloat16)
    return values if groups is None else pack(values, groups)
