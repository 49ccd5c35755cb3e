"""The compilations of the amax of a tensor, or of each group."""

import torch

from octavo.quant.tile import AMAX_CONFIGS, EXAMPLE, POINTERS, Variant, _amax_launch, variant_of


def variants() -> list[Variant]:
    return [
        variant_of(
            f"tensor_amax {dtype} {config}", _amax_launch(*EXAMPLE, None, config), x=POINTERS[dtype], out="*fp32"
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for config in AMAX_CONFIGS
    ]
