"""Types of the pointers and sizes of casts, which lists of compilations share."""

from typing import Any

import torch

from octavo.kernels.tile_cast.triton import is_block
from octavo.quant import tile
from octavo.quant.quantizer import Quantizer
from octavo.quant.scale_blocks import is_square
from octavo.quant.tile import POINTERS

SIZES = {"M": "i32", "K": "i32", "stride_m": "i32"}
CONTIGUOUS = {"stride_k": 1}
STRIDES = ("row_stride", "row_block_stride", "column_stride", "column_block_stride")


def signature(spec: Quantizer, row: bool = True, column: bool = True) -> tuple[dict[str, str], dict[str, Any]]:
    """Return (signature, constants) of pointers and sizes, for the record of compilations."""
    block, codes = is_block(spec), tile.POINTERS[spec.fmt.dtype]
    there = {
        "row": codes if row else None, "column": codes if column else None, "row_scale": "*fp32" if row else None,
        "column_scale": "*fp32" if column else None, "inverse_scale": None if block else "*fp32",
        "running_amax": None if block else "*fp32",
    }  # fmt: skip
    square = block and is_square(spec.block)
    fastest = dict.fromkeys(STRIDES[1::2] if square else STRIDES[::2], 1) if block else dict.fromkeys(STRIDES, 0)
    numbers = {name: "i32" for name in STRIDES if name not in fastest}
    missing = {name: None for name, kind in there.items() if kind is None}
    return {name: kind for name, kind in there.items() if kind is not None} | numbers, missing | fastest


def cast_pointers(dtype: torch.dtype, codes: torch.dtype, scale: str = "*fp32") -> dict[str, str]:
    """Return the types of the pointers of a cast in both orientations."""
    written = {"row": POINTERS[codes], "column": POINTERS[codes], "row_scale": scale, "column_scale": scale}
    return {"x": POINTERS[dtype], **written}
