"""The compilations of NVFP4 casts, and of the amaxes before them."""

import itertools

import torch

from octavo.quant import tile
from octavo.quant.nvfp4 import NVFP4
from octavo.quant.nvfp4.triton import CONFIGS, _amax_launch, _cast_launch
from octavo.quant.tile import Variant
from tests.kernel_variants import pointer_types


def variants() -> list[Variant]:
    cases = (  # dtype, the settings of both orientations
        (torch.bfloat16, NVFP4(), NVFP4(rht=True)),
        (torch.bfloat16, NVFP4(stochastic=True), NVFP4(rht=True, stochastic=True)),
        (torch.float32, NVFP4(square=True), NVFP4(square=True)),
        (torch.bfloat16, NVFP4(square=True), NVFP4(square=True)),
    )
    found, ((m, k), strides) = [], tile.EXAMPLE
    more = dict.fromkeys(("row_global", "column_global", "row_amax", "column_amax"), "*fp32")
    for config, (dtype, row, column) in itertools.product(CONFIGS, cases):
        rht, random = (row.rht, column.rht), (row.stochastic, column.stochastic)
        if not row.stochastic:
            launch, name = _amax_launch(*rht, (m, k), strides, config), f"nvfp4 amax {dtype} rht={rht} {config}"
            found.append(tile.variant_of(name, launch, x=tile.POINTERS[dtype], row="*i32", column="*i32"))
        pointers = (
            pointer_types.cast_pointers(dtype, torch.uint8, "*u8") | more | ({"seed": "*i64"} if row.stochastic else {})
        )
        name = f"nvfp4 {dtype} {'16x16' if row.square else '1x16'} rht={rht} stochastic={random} {config}"
        for shape, part in (((m + 1, k), ""), ((m, k), ", whole")):
            launch = _cast_launch(row, column, shape, strides, 0, config)
            found.append(tile.variant_of(name + part, launch, **pointers))
    drawn = next(v for v in found if v.constants.get("SR_ROW"))
    found.append(drawn._replace(name=f"{drawn.name}, far", constants=drawn.constants | {"FAR": True}))
    return found
