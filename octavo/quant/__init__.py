"""Quantizers as values, one folder per scaling scheme, and the quantized matrix that they produce."""

from octavo.quant.block import Block1D, Block2D
from octavo.quant.grouped import GroupedTensor
from octavo.quant.mx import MX
from octavo.quant.nvfp4 import NVFP4
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QProto, QTensor
from octavo.quant.quantizer import Quantizer
from octavo.quant.rowwise import Rowwise
from octavo.quant.state import DelayedState
from octavo.quant.tensorwise import Tensorwise
from octavo.values import register

__all__ = [
    "MX",
    "NVFP4",
    "Block1D",
    "Block2D",
    "DelayedState",
    "GroupedTensor",
    "QProto",
    "QTensor",
    "Quantizer",
    "Rowwise",
    "TensorProto",
    "Tensorwise",
    "register",
]
