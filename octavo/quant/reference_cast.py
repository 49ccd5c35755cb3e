"""Run a scheme's reference over both orientations of x, and over rows in groups.

A scheme's `reference.py` states the bits of one matrix:

    @measures
    def amax(x, spec) -> Tensor                                 the amax that a two-pass cast takes
    @casts
    def cast(x, spec, amax, cast_args, is_column) -> Codes      the codes and scales of x; amax may be None

The decorators make them the functions that `octavo.quant.quantizer` describes. For the column orientation they pass
x.T; if a block is the same in both orientations, they transpose the row codes instead. Each group of rows is passed
alone, so that it has the codes that its rows would have alone; rows that a `source` names are copied first. The host
then reads the sizes, which waits for the device. Codes and scales that belong to no group become zero.
"""

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import UnsupportedDevice
from octavo.quant.grouped import member
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.groups.reference import gathered
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer
from octavo.quant.scale import Codes

Encode = Callable[[Tensor, Quantizer, Tensor | None, CastArgs, bool], Codes]
Measure = Callable[[Tensor, Quantizer], Tensor]
Cast = Callable[[Tensor, QTensor | None, QTensor | None, CastArgs], None]
Amax = Callable[..., AmaxPair]


def casts(encode: Encode) -> Cast:
    """Return the cast whose codes of one matrix are those of `encode`."""

    @wraps(encode)
    def cast(x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs) -> None:
        if cast_args.groups is not None:
            return _cast_groups(cast, x, row, column, cast_args)
        skip, amaxes, made = cast_args.skip, cast_args.amax, None
        for q, amax, is_column in ((row, amaxes[0], False), (column, amaxes[1], True)):
            if q is None:
                continue
            spec = q.spec
            is_same = row is not None and row.spec is spec and amax is amaxes[0]
            if made is not None and is_same and spec.block[0] == spec.block[1] and spec.fmt.packed == 1:
                made = Codes(made.codes.T, made.scale.T)  # the same blocks: codes need no second cast
            else:
                made = encode(x.T if is_column else x, spec, amax, cast_args, is_column)
            into = q.codes.view(torch.uint8), q.scale, q.global_scale
            for old, new in zip(into, (made.codes.view(torch.uint8), *made[1:]), strict=True):
                if old is not None and new is not None:
                    old.copy_(new if skip is None else torch.where(skip.reshape(()) != 0, old, new))

    return cast


def put(into: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Overwrite a tensor unless the skip flag is set. The device reads the flag, never the host."""
    into.copy_(new if skip is None else torch.where(skip.reshape(()) != 0, into, new))


def measures(measure: Measure) -> Amax:
    """Return the amax of a two-pass scheme whose amax of one matrix is that of `measure`, for each group if there are
    groups (`octavo.quant.grouped.groups_amax`). If one scale serves the whole matrix, both orientations share it."""

    @wraps(measure)
    def amax(
        x: Tensor, row: Quantizer | None, column: Quantizer | None, skip: Tensor | None,
        groups: Groups | None = None, source: Tensor | None = None,
    ) -> AmaxPair:  # fmt: skip
        found: list[Tensor | None] = []
        for spec, is_column in ((row, False), (column, True)):
            if spec is None:
                found.append(None)
            elif is_column and row is not None and spec.block == (None, None):
                found.append(found[0])
            elif groups is None:
                found.append(measure(x.T if is_column else x, spec))
            else:
                found.append(_amax_of_groups(measure, x, spec, is_column, groups, source))
        return found[0], found[1]

    return amax


class _Place(NamedTuple):
    """Where the rows of a group are."""

    group: int
    rows: slice  # of the packed tensor
    inside: slice  # of the padded layout


def _places(groups: Groups) -> list[_Place]:
    if groups.start.is_meta:
        raise UnsupportedDevice(
            "Groups on the meta device have no values, which a weight cache and weights that are codes need. Move the "
            "layer to a CPU or a GPU first."
        )
    packed, blocks = pairwise(groups.start.tolist()), groups.block[:-1].tolist()
    return [
        _Place(g, slice(start, end), slice(BLOCK * block, BLOCK * block + end - start))
        for g, ((start, end), block) in enumerate(zip(packed, blocks, strict=True))
    ]


def _cast_groups(cast: Cast, x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs) -> None:
    groups, source, inverse_scale, amax = cast_args.groups, cast_args.source, cast_args.inverse_scale, cast_args.amax
    assert groups is not None
    for q in (row, column):
        if q is not None:
            put(q.codes.view(torch.uint8), torch.zeros_like(q.codes, dtype=torch.uint8), cast_args.skip)
            put(q.scale, torch.zeros_like(q.scale), cast_args.skip)
    x = x if source is None else gathered(x, source, groups)
    for place in _places(groups):
        g, first, size = place.group, place.inside.start, place.inside.stop - place.inside.start
        own = CastArgs(
            amax=amax if amax[0] is None and amax[1] is None else _amaxes_of(amax, row, column, place),
            inverse_scale=None if inverse_scale is None else inverse_scale[g : g + 1],
            seed=cast_args.seed,
            skip=cast_args.skip,
            running_amax=None if cast_args.running_amax is None else cast_args.running_amax[g : g + 1],
        )
        of_row = None if row is None else member(row, "row", g, first, size)
        cast(x[place.rows], of_row, None if column is None else member(column, "column", g, first, size), own)


def _amaxes_of(amax: AmaxPair, row: QTensor | None, column: QTensor | None, place: _Place) -> AmaxPair:
    first = None if amax[0] is None or row is None else _amax_of(amax[0], row, "row", place)
    if amax[0] is amax[1] and first is not None:
        return first, first
    return first, None if amax[1] is None or column is None else _amax_of(amax[1], column, "column", place)


def _amax_of(amax: Tensor, q: QTensor, side: str, place: _Place) -> Tensor:
    """Return a group's part of an amax, in the shape that the group alone has."""
    spec, g = q.spec, slice(place.group, place.group + 1)
    if spec.block == (1, None):
        return amax[place.inside, None] if side == "row" else amax[place.group, :, None]
    if spec.two_pass:
        return amax[g] if spec.two_level else amax[g, None]
    with_amax = QTensor(q.codes, amax, spec, q.shape, q.dtype)  # it has the layout of the scales
    return member(with_amax, side, place.group, place.inside.start, place.inside.stop - place.inside.start).scale


def _amax_of_groups(
    measure: Measure, x: Tensor, spec: Quantizer, is_column: bool, groups: Groups, source: Tensor | None
) -> Tensor:
    x, places = x if source is None else gathered(x, source, groups), _places(groups)
    found = [measure(x[place.rows].T if is_column else x[place.rows], spec).view(-1) for place in places]
    if spec.block != (1, None):
        return torch.cat(found)
    if is_column:  # each group has an amax for each column
        return torch.stack(found)
    inside = torch.zeros(groups.padded, dtype=torch.float32, device=x.device)
    for place, amax in zip(places, found, strict=True):
        inside[place.inside] = amax
    return inside
