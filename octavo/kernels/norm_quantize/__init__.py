"""Norms whose result is wanted as codes alone (`octavo.kernels.norm`, cast as it is computed).

    forward     y, in x's dtype, into the orientations of `pair`; mean and rstd are returned, for backward

y itself is never written: one launch reads x for the statistics of its rows, another reads it again, tile by tile, and
writes codes. What is filled has the bits that `fill_pair` of the norm's own kernel would leave, observed amaxes among
them. `fuses` says where that is done. Everywhere else, and for rows in groups, y is written and cast, to the same bits.
"""

import torch
from torch import Tensor

from octavo import backend
from octavo.errors import UnsupportedShape
from octavo.kernels import norm as norms
from octavo.kernels import tile_cast
from octavo.kernels.norm import Norm
from octavo.kernels.tile_cast import QTensorPair
from octavo.quant.quantizer import CastArgs, Quantizer, fill_pair

Statistics = tuple[Tensor | None, Tensor]  # mean, rstd


def fuses(row: Quantizer | None, column: Quantizer | None, given_encode: bool, dtype: torch.dtype) -> str:
    """Empty where y is cast as it is made, else a sentence why not. `given_encode`: whether the multiplier is given
    (delayed scaling)."""
    return tile_cast.fuses(row, column, given_encode, dtype, "the normalised rows")


def forward(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, pair: QTensorPair, cast_args: CastArgs
) -> Statistics:
    """Fill `pair`, (row, column) of y, as `fill_pair(norm.forward(norm, x, weight, bias).y, pair, cast_args)`."""
    m, n = x.shape
    for q, shape in zip(pair, ((m, n), (n, m)), strict=True):
        if q is not None and cast_args.groups is None and (q.rows, q.columns) != shape:
            raise UnsupportedShape(
                f"y is {m} x {n}, so that codes of {shape[0]} x {shape[1]} are filled; got {q!r}. "
                "Allocate it with proto().empty()."
            )
    found: Statistics = backend.twin(__name__, x).forward(norm, x, weight, bias, pair, cast_args)
    return found


def plain_forward(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, pair: QTensorPair, cast_args: CastArgs
) -> Statistics:
    """By way of y."""
    y, mean, rstd = norms.forward(norm, x, weight, bias)
    fill_pair(y, pair, cast_args)
    return mean, rstd
