"""Norms that write their result as codes only (`octavo.kernels.norm`, cast while it is computed).

    forward     y, in x's dtype, into the orientations of `pair`; mean and rstd are returned, for backward

The kernels never write y itself: one launch reads x for the statistics of its rows, another reads it again, tile by
tile, and writes codes. With a `Residual` the first launch adds it and writes the sum, which the second one reads.
Codes, scales and running amaxes have the bits that the norm's own kernel and `fill_pair` produce. `fuses` tells which
casts do that. All others, and rows in groups, write y and cast it, to the same bits.
"""

import torch
from torch import Tensor

from octavo import backend
from octavo.errors import UnsupportedShape
from octavo.kernels import norm as norms
from octavo.kernels import tile_cast
from octavo.kernels.norm import Norm, Residual
from octavo.kernels.tile_cast import QTensorPair
from octavo.quant.casts import fill_pair
from octavo.quant.quantizer import CastArgs, Quantizer

Statistics = tuple[Tensor | None, Tensor]  # mean, rstd


def fuses(row: Quantizer | None, column: Quantizer | None, given_inverse_scale: bool, dtype: torch.dtype) -> str:
    """Return "" if y is cast while it is computed, else a sentence with the reason. `given_inverse_scale` tells
    whether the caller gives the inverse scale (delayed scaling)."""
    return tile_cast.fuses(row, column, given_inverse_scale, dtype, "the normalised rows")


def forward(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, pair: QTensorPair, cast_args: CastArgs,
    residual: Residual | None = None,
) -> Statistics:  # fmt: skip
    """Fill (row, column) of y, to the bits of
    `fill_pair(norm.forward(norm, x, weight, bias, residual).y, pair, cast_args)`."""
    m, n = x.shape
    for q, shape in zip(pair, ((m, n), (n, m)), strict=True):
        if q is not None and cast_args.groups is None and (q.rows, q.columns) != shape:
            raise UnsupportedShape(
                f"y is {m} x {n}, so that codes of {shape[0]} x {shape[1]} are filled; got {q!r}. "
                "Allocate it with proto().empty()."
            )
    return backend.implementation(__name__, x).forward(norm, x, weight, bias, pair, cast_args, residual)


def plain_forward(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, pair: QTensorPair, cast_args: CastArgs,
    residual: Residual | None = None,
) -> Statistics:  # fmt: skip
    """Write y, then cast it."""
    # in x's dtype, as the fused kernel rounds before it casts
    y, mean, rstd = norms.forward(norm, x, weight, bias, residual)
    fill_pair(y, pair, cast_args)
    return mean, rstd
