"""The cast that layers run: allocate codes, then have the quantizers fill them.

    quantize_pair(x, row, column, cast_args)     a dense matrix into new QTensors, in the orientations that are wanted
        empty_pair                               allocates them
        fill_pair                                casts into them; also rows in groups, if `cast_args` has groups

`octavo.quant.grouped` has the same for rows in groups. Nothing here checks cast arguments: the public methods of a
quantizer do (`cast_checks`), and layers make theirs themselves.
"""

import itertools
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.quant.cast_checks import check_size, check_tensor
from octavo.quant.groups import Groups
from octavo.quant.groups.reference import gathered
from octavo.quant.orientation import column_axis
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QProto, QTensor

if TYPE_CHECKING:
    from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer

QTensorPair = tuple[QTensor | None, QTensor | None]  # the codes of x and of x.T
KNOWN: dict[int, "Quantizer"] = {}  # every quantizer of the process, by number
_NUMBERS: dict[Any, int] = {}  # by class and key
_COUNTER = itertools.count()


def take_number(spec: "Quantizer") -> None:
    """Give a quantizer its number, that of an equal one of the same class if there is one."""
    number = _NUMBERS.setdefault((type(spec), spec.key), next(_COUNTER))
    object.__setattr__(spec, "number", number)
    KNOWN.setdefault(number, spec)


def quantize_pair(
    x: Tensor, row: "Quantizer | None", column: "Quantizer | None", cast_args: "CastArgs", *, one_scale: bool = False
) -> QTensorPair:
    """Quantize x in the orientations that have a quantizer, from one read of x if one kernel serves both. Do not
    check `cast_args`: the caller's tensors go through `cast_checks.checked` first. `one_scale`: see `empty_pair`."""
    matrix = x if x.dim() == 2 and not (x.requires_grad and torch.is_grad_enabled()) else as_matrix(x)
    pair, lead = empty_pair(x, (row, column), one_scale=one_scale), column if row is None else row
    if lead is not None and (row is None or column is None or row is column):
        lead._fill(matrix, pair, cast_args)
    else:
        fill_pair(matrix, pair, cast_args)
    return pair


def empty_pair(
    like: Tensor | TensorProto, specs: "tuple[Quantizer | None, Quantizer | None]", *, one_scale: bool = False
) -> QTensorPair:
    """Allocate the orientations that have a quantizer, row and column. With `one_scale`, orientations with an equal
    scale share one tensor for it: one allocation less for a caller that will not write to either again."""
    (row, column), first, second = specs, None, None
    if row is not None:
        first = cached_proto(row.number, like.shape, like.dtype, like.device, -1).empty()
    if column is not None:
        axis = 0 if len(like.shape) > 1 else column_axis(len(like.shape))
        proto = cached_proto(column.number, like.shape, like.dtype, like.device, axis)
        shared = one_scale and first is not None and row is column and column.block == (None, None)
        second = proto.empty(first.scale if shared and first is not None else None)
    return first, second


def fill_pair(x: Tensor, pair: QTensorPair, cast_args: "CastArgs") -> None:
    """Cast the matrix x, or rows in groups, into the orientations of `pair` that are not None, which must fit. Each is
    cast by its own quantizer, both from one read of x if one kernel serves both. Check nothing."""
    row, column = pair
    lead = column if row is None else row
    if lead is None:
        return
    if cast_args.source is not None:
        x, source = read_by((None if q is None else q.spec for q in pair), x, cast_args.groups, cast_args.source)
        cast_args = cast_args._replace(source=source)
    is_one = row is None or column is None or row.spec is column.spec
    if row is not None and column is not None and not (is_one or row.spec._fuses_with(column.spec)):
        row.spec._fill(x, (row, None), cast_args._replace(amax=(cast_args.amax[0], None)))
        column.spec._fill(x, (None, column), cast_args._replace(amax=(None, cast_args.amax[1])))
    else:
        lead.spec._fill(x, pair, cast_args)


def measure_pair(
    x: Tensor, row: "Quantizer | None", column: "Quantizer | None", groups: Groups | None = None,
    source: Tensor | None = None,
) -> "AmaxPair":  # fmt: skip
    """Return the largest magnitudes of the matrix x that two-pass casts in these orientations take, from one read of x
    if one kernel serves both. Check nothing."""
    if row is not None and column is not None and not row._fuses_with(column):
        first = measure_pair(x, row, None, groups, source)[0]
        return first, measure_pair(x, None, column, groups, source)[1]
    lead = column if row is None else row
    if lead is None:
        return None, None
    x, source = read_by((row, column), x, groups, source)
    return lead._measured(x, row, column, None, groups, source)


def read_by(
    specs: "Iterable[Quantizer | None]", x: Tensor, groups: Groups | None, source: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the matrix that these quantizers read, and the rows that they take from it: x and `source` if every
    quantizer gathers, else a copy of those rows."""
    if source is None or groups is None or all([spec is None or spec.gathers for spec in specs]):
        return x, source
    return gathered(x, source, groups), None


@lru_cache(maxsize=4096)
def cached_proto(number: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, axis: int) -> QProto:
    """Check the size and cache `proto` by the quantizer's number: an eager layer needs the same few at every step."""
    check_size(math.prod(shape[:-1]), shape[-1] if shape else 1, shape)
    return KNOWN[number].proto(TensorProto(tuple(shape), dtype, device), axis)


def as_matrix(x: Tensor) -> Tensor:
    """Return x as [M, K], a view if its strides allow one: leading dims are rows."""
    check_tensor(x)
    matrix = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)
    check_size(matrix.shape[0], matrix.shape[1], x.shape)
    return matrix.detach() if matrix.requires_grad else matrix


def in_order(q: QTensor, strides: tuple[int, int] | None) -> QTensor:
    """Return q in the strides that kernels read, with its scale in `strides` (None for row-major). A hook on saved
    tensors, for example, may have returned q's tensors in other strides."""
    grid, wanted = q.scale.shape, strides or (q.scale.shape[1], 1)
    moved = any(n > 1 and has != want for n, has, want in zip(grid, q.scale.stride(), wanted, strict=True))
    if not moved and q.codes.is_contiguous():
        return q
    scale = torch.empty_strided(grid, wanted, dtype=q.scale.dtype, device=q.scale.device).copy_(q.scale)
    return QTensor(q.codes.contiguous(), scale, q.spec, q.shape, q.dtype, q.global_scale)
