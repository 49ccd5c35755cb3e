"""The compilations of casts by blocks of 128."""

import torch

from octavo.formats import E4M3, E5M2
from octavo.quant import tile
from octavo.quant.block import BLOCK, Block1D, Block2D
from octavo.quant.block.triton import CONFIGS, _cast_launch
from octavo.quant.tile import Variant
from tests.kernel_variants import pointer_types


def variants() -> list[Variant]:
    shape, strides = tile.EXAMPLE
    scales = {
        Block1D: (1, shape[0]) * 2,
        Block2D: (shape[0] // BLOCK, 1) * 2,
    }  # strides of scales
    return [
        tile.variant_of(
            f"{kind.registered_name} {dtype} {fmt} {config}",
            _cast_launch(kind(fmt, scale), shape, (*strides, *scales[kind]), None, dtype, config),
            **pointer_types.cast_pointers(dtype, fmt.dtype),
        )
        for config in CONFIGS
        for kind in (Block1D, Block2D)
        for dtype, fmt, scale in (
            (torch.bfloat16, E4M3, "pow2"),
            (torch.float16, E4M3, "fp32"),
            (torch.float32, E5M2, "pow2"),
        )
    ]
