"""Launch arguments of a kernel with a tile cast. The kernel names its parameters

pointers    row, column, row_scale, column_scale, inverse_scale, running_amax
sizes       row_stride, row_block_stride, column_stride, column_block_stride, of the scales
constants   PUT, RULE, and a tile of ROWS by COLUMNS on W warps

A kernel stores the scale of a Tensorwise itself (`store_given_scale`). One that takes rows in groups has a pointer
`measured` besides: the amaxes from which inverse scales follow that are not given, as the caller gives them or a pass
before found them (`measure`).
"""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.tile_cast import QTensorPair
from octavo.quant import tile
from octavo.quant.block import BLOCK, _Blocks
from octavo.quant.block.triton import put as put_block
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.scale import FLOAT32_MAX
from octavo.quant.scale_blocks import is_square
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.tensorwise.triton import measure
from octavo.quant.tensorwise.triton import put as put_tensorwise
from octavo.quant.tile import Config


def spec_of(pair: QTensorPair) -> Quantizer:
    lead = pair[1] if pair[0] is None else pair[0]
    assert lead is not None
    return lead.spec


def is_block(spec: Quantizer) -> bool:
    """Return whether a tile must be exactly one 128x128 block."""
    return isinstance(spec, _Blocks)


def fitting(configs: tuple[Config, ...], *specs: Quantizer | None) -> Config:
    """Return the first of these tiles that serves all of these quantizers."""
    whole = any(spec is not None and is_block(spec) for spec in specs)
    return next(c for c in configs if not whole or (c.rows == BLOCK and c.columns == BLOCK))


MEASURE: dict[str, Any] = {"PUT": measure, "RULE": ()}  # the constants of the pass before a cast


def measures(pair: QTensorPair, cast_args: CastArgs) -> bool:
    """Return whether the inverse scale of a cast follows from an amax, which the caller gives or a pass before must
    find."""
    return cast_args.inverse_scale is None and isinstance(spec_of(pair), Tensorwise)


def constants(spec: Quantizer, dtype: torch.dtype, transpose_codes: bool, given: bool = True) -> dict[str, Any]:
    """Return the constants for values that the kernel rounds to this dtype before it casts them. `transpose_codes` is
    what `transposes_codes` says of the tile; `given` tells whether the caller gives the inverse scale of a
    Tensorwise."""
    if isinstance(spec, _Blocks):
        rule = (spec.fmt.max, spec.eps, torch.finfo(dtype).max, spec.pow2, is_square(spec.block))
        return {"PUT": put_block, "RULE": rule}
    assert isinstance(spec, Tensorwise)
    measured = (spec.fmt.max, spec.eps, FLOAT32_MAX, spec.pow2)
    return {"PUT": put_tensorwise, "RULE": (given, *measured, transpose_codes)}


def pointers(pair: QTensorPair, cast_args: CastArgs) -> tuple[Tensor | None, ...]:
    row, column = pair
    running_amax = cast_args.running_amax if isinstance(spec_of(pair), Tensorwise) else None  # block casts ignore it
    return *tile.codes_and_scales(row, column), cast_args.inverse_scale, running_amax


def strides(pair: QTensorPair) -> tuple[int, ...]:
    """Return the strides of the scales; zeros for tensorwise, which has only one scale."""
    if not is_block(spec_of(pair)):
        return (0, 0, 0, 0)
    return (*tile.scale_strides(pair[0]), *tile.scale_strides(pair[1]))
