"""Activations that write their result as codes only (`octavo.kernels.activation`, cast while it is computed).

    forward     y, in x's dtype, into codes
    backward    dx, in dy's dtype, into codes; the column codes of y again; and the gradients of bias and row scales

The kernels never write the value itself: forward reads x and writes codes, backward reads x and dy and writes codes.
Codes, scales and running amaxes have the bits that the activation's own kernels and `fill_pair` produce; only sums,
for the gradients of bias and scales, are added in another order. `fuses` tells which casts need no value written. All
other cases write the value, then cast it, to the same bits. These include, in the backward of a gated function, block
scaling and interleaved columns in float32 or with dropout. A Tensorwise without an inverse scale takes a pass before,
which computes the values for their amax and writes nothing else. `forward` returns that amax: given to `backward` as
the one of y, it saves the pass that would measure y again.

Rows in groups (`octavo.quant.groups`) come as `groups` of a target's cast arguments. x, dy and row scales are packed,
and the kernels do not read their tail; codes are in the padded layout. Each group is cast as if it were alone, with a
inverse scale and a running amax of its own.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import backend
from octavo.errors import UnsupportedShape
from octavo.kernels import activation, grouped_gemm, tile_cast
from octavo.kernels.activation import Function, Inputs, Wanted
from octavo.kernels.tile_cast import NOTHING, TileCast
from octavo.quant.casts import fill_pair
from octavo.quant.groups import Groups
from octavo.quant.quantizer import Quantizer


class VectorGradients(NamedTuple):
    """The gradients besides that of x, where they are wanted."""

    bias: Tensor | None = None  # [N], or with groups [G, N]: sums of dx, in its own dtype, over the rows of each group
    scales: Tensor | None = None  # [rows]; zero in the tail


def fuses(row: Quantizer | None, column: Quantizer | None, dtype: torch.dtype) -> str:
    """Return "" if these orientations are written without the value itself, else a sentence with the reason."""
    return tile_cast.fuses(row, column, True, dtype, "the activation")


def forward(fn: Function, inputs: Inputs, y: TileCast) -> Tensor | None:
    """Fill the codes of y, to the bits of `fill_pair(activation.forward(fn, *inputs), *y)`. Return the amax that the
    scale of a Tensorwise follows from, [1, 1] or one for each group; None if an inverse scale is given."""
    x = inputs.x
    assert x is not None
    _check_sizes(y, x.shape[0], x.shape[1] // 2 if fn.gated else x.shape[1], "y")
    if y.pair == (None, None):
        return None
    return backend.implementation(__name__, x).forward(fn, inputs, y)


def backward(
    fn: Function,
    dy: Tensor,
    inputs: Inputs,
    dx: TileCast,
    y: TileCast = NOTHING,
    bias_grad: torch.dtype | None = None,
    scales_grad: torch.dtype | None = None,
) -> VectorGradients:
    """Fill the codes of dx, and the column codes of y again if `y` has them. Return the gradients of bias and scales
    whose dtypes are given. x may be None unless `fn.remembers`, y is filled or scales want a gradient. Groups are those
    of dx's cast arguments, also where dx has no codes; y's must be the same."""
    m, width = dy.shape
    _check_sizes(dx, m, 2 * width if fn.gated else width, "dx")
    _check_sizes(y, m, width, "y")
    assert y.pair[0] is None and (y.pair[1] is None or y.cast_args.groups is dx.cast_args.groups)
    needs_x = fn.remembers or y.pair[1] is not None or scales_grad is not None
    assert inputs.x is not None or not needs_x
    if dx.pair == (None, None) and y.pair[1] is None and bias_grad is None and scales_grad is None:
        return VectorGradients()
    return backend.implementation(__name__, dy).backward(fn, dy, inputs, dx, y, bias_grad, scales_grad)


def writes_dx(fn: Function, dy: Tensor, inputs: Inputs, spec: Quantizer | None) -> bool:
    """Return whether `backward` writes dx and then casts it by `spec`. A caller that is to free dy and x in between
    calls `value` and `fill` in its place, to the same bits."""
    return backend.implementation(__name__, dy).writes_dx(fn, dy, inputs, spec)


def plain_forward(fn: Function, inputs: Inputs, y: TileCast) -> Tensor | None:
    """Write y, then cast it."""
    x, scales, bias, seed = inputs
    assert x is not None
    return fill(activation.forward(fn, x, scales, bias, seed, _end(y.cast_args.groups)), y)


def plain_backward(
    fn: Function,
    dy: Tensor,
    inputs: Inputs,
    dx: TileCast,
    y: TileCast,
    bias_grad: torch.dtype | None,
    scales_grad: torch.dtype | None,
) -> VectorGradients:
    """Fill the column codes of y, if `y` has them, by `forward`; then write dx and cast it."""
    wants_dx = dx.pair != (None, None)
    found, written = value(fn, dy, inputs, wants_dx, dx.cast_args.groups, y, bias_grad, scales_grad)
    if written is not None:
        fill(written, dx)
    return found


def value(
    fn: Function,
    dy: Tensor,
    inputs: Inputs,
    wants_dx: bool,
    groups: Groups | None,
    y: TileCast = NOTHING,
    bias_grad: torch.dtype | None = None,
    scales_grad: torch.dtype | None = None,
) -> tuple[VectorGradients, Tensor | None]:
    """Return what `backward` does, and dx itself, whose codes are still to be filled."""
    if y.pair[1] is not None:
        forward(fn, inputs, y)
    needs_dx = wants_dx or (groups is not None and bias_grad is not None)
    wanted = Wanted(needs_dx, scales_grad, bias_grad if groups is None else None)
    gradients = activation.backward(fn, dy, *inputs, wanted, _end(groups))
    db = gradients.bias
    if groups is not None and bias_grad is not None:
        assert gradients.x is not None
        db = grouped_gemm.column_sums_of(gradients.x, groups, bias_grad)
    return VectorGradients(db, gradients.scales), gradients.x


def _end(groups: Groups | None) -> Tensor | None:
    """Return where the tail begins, on the device."""
    return None if groups is None else groups.start[-1:]


def fill(value: Tensor, target: TileCast) -> Tensor | None:
    """Cast a value, and return the one amax that its scale follows from, if there is one. Codes of groups may have more
    columns, which are zeros."""
    (row, column), cast_args = target
    wide = row.columns if row is not None else column.rows if column is not None else value.shape[1]
    if wide > value.shape[1]:
        value = F.pad(value, (0, wide - value.shape[1]))
    lead = column if row is None else row
    amax = None
    if lead is not None and tile_cast.takes_amax(*target):
        amax = cast_args.amax[row is None]
        if amax is None:
            amax = lead.spec._measured(value, lead.spec, None, cast_args.skip, cast_args.groups, cast_args.source)[0]
            cast_args = cast_args._replace(amax=(amax, amax))
    fill_pair(value, target.pair, cast_args)
    return amax


def _check_sizes(target: TileCast, m: int, k: int, what: str) -> None:
    """Raise if the codes do not fit: packed rows [m, k], or for groups their padded layout and at least k columns."""
    groups = target.cast_args.groups
    if groups is not None and groups.rows != m:
        raise UnsupportedShape(
            f"{what} is {m} x {k} and its groups are of {groups.rows} rows, tail included. "
            f"Split the sizes for {m} rows."
        )
    row, column = target.pair
    height, way = (m, "proto().empty()") if groups is None else (groups.padded, "grouped_proto().empty()")
    for q, shape, (down, across) in (
        (row, (height, k), (0, 0) if row is None else (row.rows, row.columns)),
        (column, (k, height), (0, 0) if column is None else (column.columns, column.rows)),
    ):
        if q is not None and not (down == height and (across == k or (groups is not None and across > k))):
            raise UnsupportedShape(
                f"{what} is {m} x {k}, so that codes of {shape[0]} x {shape[1]} are filled; got {q!r}. "
                f"Allocate it with {way}."
            )
