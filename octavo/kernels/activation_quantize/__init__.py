"""Activations whose result is wanted as codes alone (`octavo.kernels.activation`, cast as it is computed).

    forward     y, in x's dtype, into the orientations of `pair`
    backward    dx, in dy's dtype, into those of `pair`; the columns of y once more, into `again`; and sums of dx down
                its columns

The value itself is never written: forward reads x and writes codes, backward reads x and dy and writes codes. What is
filled has the bits that `fill_pair` of the activation's own kernels would leave, `given.observed` among them; only the
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
from octavo.kernels.activation import Function
from octavo.kernels.tile_cast import QTensorPair
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs, Quantizer, fill_pair

_NONE = CastArgs()


def fuses(row: Quantizer | None, column: Quantizer | None, given_encode: bool, dtype: torch.dtype) -> str:
    """Empty where one pass over x makes these orientations, else a sentence why not. `given_encode`: whether the
    multiplier is given (delayed scaling)."""
    return tile_cast.fuses(row, column, given_encode, dtype, "the activation")


def forward(
    fn: Function,
    x: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    pair: QTensorPair,
    given: CastArgs,
) -> None:
    """Fill `pair`, (row, column) of y, as `fill_pair(activation.forward(fn, x, scales, bias, seed), pair, given)`."""
    _check_sizes(pair, given, x.shape[0], x.shape[1] // 2 if fn.gated else x.shape[1], "y")
    if pair == (None, None):
        return
    backend.twin(__name__, x).forward(fn, x, scales, bias, seed, pair, given)


def backward(
    fn: Function,
    dy: Tensor,
    x: Tensor | None,
    scales: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    pair: QTensorPair,
    given: CastArgs,
    again: QTensor | None = None,
    again_given: CastArgs | None = None,
    bias_grad: torch.dtype | None = None,
) -> Tensor | None:
    """Fill `pair`, (row, column) of dx, and `again`, the column orientation of y. The gradient of the bias in this
    dtype, if one is named. `x` may be missing where `fn.remembers` nothing and there is no `again`."""
    m, width = dy.shape
    _check_sizes(pair, given, m, 2 * width if fn.gated else width, "dx")
    again_given = _NONE if again_given is None else again_given
    _check_sizes((None, again), again_given, m, width, "y")
    assert x is not None or (again is None and not fn.remembers)
    if pair == (None, None) and again is None and bias_grad is None:
        return None
    found: Tensor | None = backend.twin(__name__, dy).backward(
        fn, dy, x, scales, bias, seed, pair, given, again, again_given, bias_grad
    )
    return found


def plain_forward(
    fn: Function,
    x: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    pair: QTensorPair,
    given: CastArgs,
) -> None:
    """By way of y."""
    fill_pair(activation.forward(fn, x, scales, bias, seed), pair, given)


def plain_backward(
    fn: Function,
    dy: Tensor,
    x: Tensor | None,
    scales: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    pair: QTensorPair,
    given: CastArgs,
    again: QTensor | None,
    again_given: CastArgs,
    bias_grad: torch.dtype | None,
) -> Tensor | None:
    """By way of dx, and of y."""
    wanted = pair != (None, None)
    found = activation.backward(fn, dy, x, scales, bias, seed, x_grad=wanted, bias_grad=bias_grad)
    if found.x is not None:
        fill_pair(found.x, pair, given)
    if again is not None:
        assert x is not None
        plain_forward(fn, x, scales, bias, seed, (None, again), again_given)
    return found.bias


def _check_sizes(pair: QTensorPair, given: CastArgs, m: int, k: int, what: str) -> None:
    """Rows in groups have the shapes of `octavo.quant.grouped`, which are the caller's."""
    if given.groups is not None:
        return
    for q, shape in zip(pair, ((m, k), (k, m)), strict=True):
        if q is not None and (q.rows, q.columns) != shape:
            raise UnsupportedShape(
                f"{what} is {m} x {k}, so that codes of {shape[0]} x {shape[1]} are filled; got {q!r}. "
                "Allocate it with proto().empty()."
            )
