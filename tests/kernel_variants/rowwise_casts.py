"""The compilations of casts by rows, and of the amaxes before them."""

import torch

from octavo.formats import E4M3, E5M2
from octavo.quant import tile
from octavo.quant.rowwise import Rowwise
from octavo.quant.rowwise.triton import AMAX_CONFIGS, CONFIGS, _amax_launch, _cast_launch
from octavo.quant.tile import Variant
from tests.kernel_variants import pointer_types


def variants() -> list[Variant]:
    casts = [
        tile.variant_of(
            f"rowwise {dtype} {fmt} {config}",
            _cast_launch(Rowwise(fmt), *tile.EXAMPLE, 0, config),
            **pointer_types.cast_pointers(dtype, fmt.dtype),
            row_amax="*fp32",
            column_amax="*fp32",
        )
        for config in CONFIGS
        for dtype, fmt in ((torch.bfloat16, E4M3), (torch.float16, E4M3), (torch.float32, E5M2))
    ]
    pointers = {"row": "*i32", "column": "*i32"}
    return casts + [
        tile.variant_of(
            f"rowwise amax {dtype} {config}", _amax_launch(*tile.EXAMPLE, config), x=tile.POINTERS[dtype], **pointers
        )
        for config in AMAX_CONFIGS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
