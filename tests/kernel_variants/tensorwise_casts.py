"""The compilations of casts by one scale, given or measured."""

import torch

from octavo.formats import E4M3, E5M2
from octavo.quant import tile
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.tensorwise.triton import CONFIGS, _cast_launch, is_transposable
from octavo.quant.tile import Variant
from tests.kernel_variants import pointer_types


def variants() -> list[Variant]:
    given = {"inverse_scale": "*fp32", "running_amax": "*fp32"}
    return [
        tile.variant_of(
            f"tensorwise {dtype} {fmt} {'given' if is_given else 'current'} {config}",
            _cast_launch(Tensorwise(fmt), *tile.EXAMPLE, None, 0, config, is_transposable(config)),
            **pointer_types.cast_pointers(dtype, fmt.dtype),
            **(given if is_given else {"amax": "*fp32"}),
        )
        for config in CONFIGS
        for dtype, fmt, is_given in (
            (torch.bfloat16, E4M3, False),
            (torch.bfloat16, E5M2, True),
            (torch.float16, E4M3, True),
            (torch.float32, E5M2, False),
        )
    ]
