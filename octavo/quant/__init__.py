"""Quantizers as values, one folder per scaling scheme, and the quantized matrix that they produce.

    Tensorwise    one scale for the tensor              FP8
    Rowwise       one for each row                      FP8
    Block1D       one for 128 elements of a row         FP8
    Block2D       one for a block of 128x128            FP8
    MX            a byte for 32 elements, or 32x32      FP8
    NVFP4         a byte for 16 elements, or 16x16      FP4

    row, column = octavo.quant.MX().quantize_both(x)    codes and scales of x and of x.T, from one read of x
    row.dequantize()                                    the values that the codes stand for

A recipe chooses a quantizer for each operand of a layer: `octavo.recipe("mxfp8").linear()`.

The protocol, and the values that it makes:

    quantizer           Quantizer, and CastArgs: the tensors that a caller passes to a cast
    qtensor             QTensor: codes, scales, and the quantizer that made them
    proto               shapes without data: each rule of a shape exists once
    orientation         row codes and column codes
    pairs               the pairs of quantizers that a GEMM multiplies
    cast_checks         what a cast refuses

A cast, of a matrix and of rows in groups:

    casts               allocate codes, then fill them: what layers run
    in_place            a cast into codes that exist
    groups              the places of ragged groups; only the device knows their sizes
    grouped             GroupedTensor, and the cast of rows in groups
    grouped_cast        the same with a gradient
    grouped_codes       codes that were cast elsewhere, put in groups
    gradient_codes      codes of a gradient, past autograd
    traced_cast         a cast in a graph

A scheme's bits, in plain torch and in Triton:

    scale               inverse scale and scale from an amax, the rule of FP8
    scale_blocks        the grid of blocks, and a value for each of them
    maxima              amaxes of schemes whose scales follow from their own blocks
    reference_cast      runs a scheme's reference over orientations and groups
    tile                building blocks of Triton kernels: a tile is read once and written in both orientations
    dual                the same in Gluon, where a tile is transposed before it is cast
    fp8_words           casts to FP8 four at a time
    byte_transpose      the transpose of codes, where blocks are square
    tensorwise          one scale for the tensor
    rowwise             one for each row
    block               blocks of 128
    mx                  blocks of 32, a byte each
    nvfp4               blocks of 16 and a second level

    x -> casts.quantize_pair -> Quantizer._fill -> the scheme's reference.py or triton.py -> QTensors, row and column

This room may import rooms up to `launch`.
"""

from typing import Any

from octavo.quant import grouped_cast as _grouped_cast  # noqa: F401  # a loaded graph finds its operator
from octavo.quant.block import Block1D, Block2D
from octavo.quant.gradient_codes import GradientCodes
from octavo.quant.grouped import GroupedTensor
from octavo.quant.grouped_codes import bytes_as_rows, rows_as_bytes
from octavo.quant.mx import MX
from octavo.quant.nvfp4 import NVFP4
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QProto, QTensor
from octavo.quant.quantizer import Quantizer
from octavo.quant.rowwise import Rowwise
from octavo.quant.tensorwise import Tensorwise
from octavo.values import register

__all__ = [
    "MX",
    "NVFP4",
    "Block1D",
    "Block2D",
    "DelayedState",
    "GradientCodes",
    "GroupedTensor",
    "QProto",
    "QTensor",
    "Quantizer",
    "Rowwise",
    "TensorProto",
    "Tensorwise",
    "bytes_as_rows",
    "register",
    "rows_as_bytes",
]


def __getattr__(name: str) -> Any:
    """Resolve `DelayedState`, which is built on these quantizers: octavo.scaling defines it."""
    if name != "DelayedState":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from octavo.scaling.delayed_state import DelayedState

    globals()[name] = DelayedState
    return DelayedState


def __dir__() -> list[str]:
    return __all__
