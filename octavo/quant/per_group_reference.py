"""Rows in groups, for the references: each group goes alone through the scheme's own functions, which defines the rule.
Rows that a `source` names are copied first.

Reads the sizes on the host, which waits for the device. Codes and scales that belong to no group become zero.
"""

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.errors import UnsupportedDevice
from octavo.quant.grouped import member
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.groups.reference import gathered
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer
from octavo.quant.writing import put

Cast = Callable[[Tensor, QTensor | None, QTensor | None, CastArgs], None]
Amax = Callable[[Tensor, Quantizer | None, Quantizer | None, Tensor | None], AmaxPair]


class AmaxOfGroups(Protocol):
    def __call__(
        self,
        x: Tensor,
        row: Quantizer | None,
        column: Quantizer | None,
        skip: Tensor | None,
        groups: Groups | None = None,
        source: Tensor | None = None,
    ) -> AmaxPair: ...


class _Place(NamedTuple):
    group: int
    rows: slice  # of the packed tensor
    inside: slice


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


def cast_each(cast: Cast) -> Cast:
    """Returns a cast that also handles rows in groups."""

    @wraps(cast)
    def by_group(x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs) -> None:
        groups = cast_args.groups
        if groups is None:
            return cast(x, row, column, cast_args)
        for q in (row, column):
            if q is not None:
                put(q.codes.view(torch.uint8), torch.zeros_like(q.codes, dtype=torch.uint8), cast_args.skip)
                put(q.scale, torch.zeros_like(q.scale), cast_args.skip)
        if cast_args.source is not None:
            x, cast_args = gathered(x, cast_args.source, groups), cast_args._replace(source=None)
        for place in _places(groups):
            own = _member(row, "row", place), _member(column, "column", place)
            cast(x[place.rows], own[0], own[1], _given_to(place, cast_args, row, column))

    return by_group


def _member(q: QTensor | None, side: str, place: _Place) -> QTensor | None:
    first, end = place.inside.start, place.inside.stop
    return None if q is None else member(q, side, place.group, first, end - first)


def _given_to(place: _Place, cast_args: CastArgs, row: QTensor | None, column: QTensor | None) -> CastArgs:
    """Returns the cast arguments of one group."""
    g, (row_amax, column_amax) = slice(place.group, place.group + 1), cast_args.amax
    return cast_args._replace(
        amax=(_amax_of(row_amax, row, "row", place), _amax_of(column_amax, column, "column", place)),
        inverse_scale=None if cast_args.inverse_scale is None else cast_args.inverse_scale[g],
        running_amax=None if cast_args.running_amax is None else cast_args.running_amax[g],
        groups=None,
    )


def _amax_of(amax: Tensor | None, q: QTensor | None, side: str, place: _Place) -> Tensor | None:
    if amax is None or q is None:
        return None
    if _has_row_scales(q.spec):
        return amax[place.inside, None] if side == "row" else amax[place.group, :, None]
    if q.spec.two_pass:
        return amax[place.group : place.group + 1]
    own = _member(QTensor(q.codes, amax, q.spec, q.shape, q.dtype), side, place)  # amax has the layout of the scales
    return None if own is None else own.scale


def amax_each(amax: Amax) -> AmaxOfGroups:
    """Returns the amax of a two-pass scheme that also handles groups (`octavo.quant.grouped.groups_amax`)."""

    @wraps(amax)
    def by_group(
        x: Tensor,
        row: Quantizer | None,
        column: Quantizer | None,
        skip: Tensor | None,
        groups: Groups | None = None,
        source: Tensor | None = None,
    ) -> AmaxPair:
        if groups is None:
            return amax(x, row, column, skip)
        x = x if source is None else gathered(x, source, groups)
        places = _places(groups)
        found = [amax(x[place.rows], row, column, skip) for place in places]
        down = [a.view(-1) for a, _ in found if a is not None]
        across = [a.view(-1) for _, a in found if a is not None]
        if row is not None and _has_row_scales(row):
            inside = torch.zeros(groups.padded, dtype=torch.float32, device=x.device)
            for place, a in zip(places, down, strict=True):
                inside[place.inside] = a
            return inside, (torch.stack(across) if across else None)
        if column is not None and _has_row_scales(column):
            return None, torch.stack(across)
        return (torch.cat(down) if down else None), (torch.cat(across) if across else None)

    return by_group


def _has_row_scales(spec: Quantizer) -> bool:
    """Whether every row has one scale, and so each group one scale per column."""
    return spec.block == (1, None)
