"""Activations that write their result as codes only (`octavo.kernels.activation`, cast while it is computed).

    forward     y, in x's dtype, into codes
    backward    dx, in dy's dtype, into codes; the column codes of y again; and sums of dx down its columns

The kernels never write the value itself: forward reads x and writes codes, backward reads x and dy and writes codes.
Codes, scales and observed amaxes have the bits that the activation's own kernels and `fill_pair` produce; only the
column sums are added in another order. `fuses` tells which casts take one pass. All other cases write the value, then
cast it, to the same bits. These include rows in groups, and in the backward of a gated function block scaling and
interleaved columns in float32 or with dropout.

The gradient of row scales is a sum along each row; `activation.backward` computes it.
"""

import torch
from torch import Tensor

from octavo import backend
from octavo.errors import UnsupportedShape
from octavo.kernels import activation, tile_cast
from octavo.kernels.activation import Function, Inputs, Wanted
from octavo.kernels.tile_cast import NOTHING, Target
from octavo.quant.quantizer import Quantizer, fill_pair


def fuses(row: Quantizer | None, column: Quantizer | None, given_encode: bool, dtype: torch.dtype) -> str:
    """Returns "" if one pass over x writes these orientations, else a sentence with the reason. `given_encode` tells
    whether the caller gives the multiplier (delayed scaling)."""
    return tile_cast.fuses(row, column, given_encode, dtype, "the activation")


def forward(fn: Function, inputs: Inputs, y: Target) -> None:
    """Fills the codes of y, to the bits of `fill_pair(activation.forward(fn, *inputs), *y)`."""
    x = inputs.x
    assert x is not None
    _check_sizes(y, x.shape[0], x.shape[1] // 2 if fn.gated else x.shape[1], "y")
    if y.pair == (None, None):
        return
    backend.twin(__name__, x).forward(fn, inputs, y)


def backward(
    fn: Function, dy: Tensor, inputs: Inputs, dx: Target, y: Target = NOTHING, bias_grad: torch.dtype | None = None
) -> Tensor | None:
    """Fills the codes of dx, and the column codes of y again if `y` has them. Returns the gradient of the bias if
    `bias_grad` names its dtype. x may be None unless `fn.remembers` or y is filled."""
    m, width = dy.shape
    _check_sizes(dx, m, 2 * width if fn.gated else width, "dx")
    _check_sizes(y, m, width, "y")
    assert y.pair[0] is None and (inputs.x is not None or (y.pair[1] is None and not fn.remembers))
    if dx.pair == (None, None) and y.pair[1] is None and bias_grad is None:
        return None
    db: Tensor | None = backend.twin(__name__, dy).backward(fn, dy, inputs, dx, y, bias_grad)
    return db


def plain_forward(fn: Function, inputs: Inputs, y: Target) -> None:
    """Writes y, then casts it."""
    x, scales, bias, seed = inputs
    assert x is not None
    fill_pair(activation.forward(fn, x, scales, bias, seed), y.pair, y.cast_args)


def plain_backward(
    fn: Function, dy: Tensor, inputs: Inputs, dx: Target, y: Target, bias_grad: torch.dtype | None
) -> Tensor | None:
    """Writes dx and casts it; then, if `y` has column codes, writes y and casts it."""
    gradients = activation.backward(fn, dy, *inputs, Wanted(dx.pair != (None, None), bias=bias_grad))
    if gradients.x is not None:
        fill_pair(gradients.x, dx.pair, dx.cast_args)
    if y.pair[1] is not None:
        plain_forward(fn, inputs, y)
    return gradients.bias


def _check_sizes(target: Target, m: int, k: int, what: str) -> None:
    """Raises if the codes do not fit. The caller answers for rows in groups (`octavo.quant.grouped`)."""
    if target.cast_args.groups is not None:
        return
    for q, shape in zip(target.pair, ((m, k), (k, m)), strict=True):
        if q is not None and (q.rows, q.columns) != shape:
            raise UnsupportedShape(
                f"{what} is {m} x {k}, so that codes of {shape[0]} x {shape[1]} are filled; got {q!r}. "
                "Allocate it with proto().empty()."
            )
