"""The compilations of MX casts."""

import torch

from octavo.formats import E4M3, E5M2
from octavo.quant import tile
from octavo.quant.mx import BLOCK, MX
from octavo.quant.mx.triton import CONFIGS, _cast_launch
from octavo.quant.tile import Variant
from tests.kernel_variants import pointer_types


def variants() -> list[Variant]:
    shape, strides = tile.EXAMPLE
    scales = {False: (1, shape[0]) * 2, True: (shape[0] // BLOCK, 1) * 2}  # strides of scales
    return [
        tile.variant_of(
            f"mx {dtype} {fmt} {rounding} {'32x32' if square else '1x32'} {config}",
            _cast_launch(MX(fmt, rounding, square), shape, (*strides, *scales[square]), config),
            **pointer_types.cast_pointers(dtype, fmt.dtype, "*u8"),
        )
        for config in CONFIGS
        for dtype, fmt, rounding, square in (
            (torch.bfloat16, E4M3, "rceil", False),
            (torch.bfloat16, E4M3, "rceil", True),
            (torch.float16, E4M3, "even", False),
            (torch.float32, E5M2, "floor", False),
            (torch.float32, E5M2, "ceil", True),
        )
    ]
