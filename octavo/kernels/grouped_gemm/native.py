"""Tells which pairs of operands the Hopper kernels multiply. Imports no Triton, since reports use it too."""

from functools import cache

import torch

from octavo.quant.blocks import Block
from octavo.quant.groups import BLOCK
from octavo.quant.quantizer import Quantizer

_FINE: Block = (1, BLOCK)
_COARSE: Block = (BLOCK, BLOCK)


@cache
def is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def rows(a: Quantizer, b: Quantizer, device: torch.device) -> bool:
    return is_hopper(device) and (_reach_over_all(a, b) or (a.block, b.block) == (_FINE, _COARSE))


def grouped_wgrad(a: Quantizer, b: Quantizer, device: torch.device) -> bool:
    return is_hopper(device) and (_reach_over_all(a, b) or (a.block, b.block) == (_FINE, _FINE))


def _reach_over_all(a: Quantizer, b: Quantizer) -> bool:
    return a.block[1] is None and b.block[1] is None
