"""Activations whose result is wanted as codes alone (`octavo.kernels.activation`, cast as it is computed).

    forward     y, in x's dtype, into codes
    backward    dx, in dy's dtype, into codes; the column codes of y once more; and sums of dx down its columns

The value itself is never written: forward reads x and writes codes, backward reads x and dy and writes codes. What is
filled has the bits that `fill_pair` of the activation's own kernels would leave, observed amaxes among them; only the
sums are in another order. `fuses` says where one pass does it. Everywhere else the value is written and cast, to the
same bits; so it is for rows in groups, and in backward, of a gated function, for blocks, and for columns that take
turns in float32 or with dropout.

The gradient of row scales is not here: it is a sum over rows, which `activation.backward` makes.
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
    """Empty where one pass over x makes these orientations, else a sentence why not. `given_encode`: whether the
    multiplier is given (delayed scaling)."""
    return tile_cast.fuses(row, column, given_encode, dtype, "the activation")


def forward(fn: Function, inputs: Inputs, y: Target) -> None:
    """Fill the codes of y, as `fill_pair(activation.forward(fn, *inputs), *y)`."""
    x = inputs.x
    assert x is not None
    _check_sizes(y, x.shape[0], x.shape[1] // 2 if fn.gated else x.shape[1], "y")
    if y.pair == (None, None):
        return
    backend.twin(__name__, x).forward(fn, inputs, y)


def backward(
    fn: Function, dy: Tensor, inputs: Inputs, dx: Target, y: Target = NOTHING, bias_grad: torch.dtype | None = None
) -> Tensor | None:
    """Fill the codes of dx, and once more the column codes of y. The gradient of the bias in this dtype, if one is
    named. x may be missing where `fn.remembers` nothing and y is not filled."""
    m, width = dy.shape
    _check_sizes(dx, m, 2 * width if fn.gated else width, "dx")
    _check_sizes(y, m, width, "y")
    assert y.pair[0] is None and (inputs.x is not None or (y.pair[1] is None and not fn.remembers))
    if dx.pair == (None, None) and y.pair[1] is None and bias_grad is None:
        return None
    db: Tensor | None = backend.twin(__name__, dy).backward(fn, dy, inputs, dx, y, bias_grad)
    return db


def plain_forward(fn: Function, inputs: Inputs, y: Target) -> None:
    """By way of y."""
    x, scales, bias, seed = inputs
    assert x is not None
    fill_pair(activation.forward(fn, x, scales, bias, seed), y.pair, y.cast_args)


def plain_backward(
    fn: Function, dy: Tensor, inputs: Inputs, dx: Target, y: Target, bias_grad: torch.dtype | None
) -> Tensor | None:
    """By way of dx, and of y."""
    gradients = activation.backward(fn, dy, *inputs, Wanted(dx.pair != (None, None), bias=bias_grad))
    if gradients.x is not None:
        fill_pair(gradients.x, dx.pair, dx.cast_args)
    if y.pair[1] is not None:
        plain_forward(fn, inputs, y)
    return gradients.bias


def _check_sizes(target: Target, m: int, k: int, what: str) -> None:
    """Rows in groups have the shapes of `octavo.quant.grouped`, which are the caller's."""
    if target.cast_args.groups is not None:
        return
    for q, shape in zip(target.pair, ((m, k), (k, m)), strict=True):
        if q is not None and (q.rows, q.columns) != shape:
            raise UnsupportedShape(
                f"{what} is {m} x {k}, so that codes of {shape[0]} x {shape[1]} are filled; got {q!r}. "
                "Allocate it with proto().empty()."
            )
