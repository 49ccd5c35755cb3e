"""The passes of a kernel over the values of its tiles: what each pass does with them, and its pointers and strides."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels.tile_cast import TileCast
from octavo.kernels.tile_cast import triton as tile_casts
from octavo.quant.quantizer import Quantizer

Pointers = tuple[Tensor | None, ...]


class Kind(NamedTuple):
    """The use that a kernel is compiled to make of the values of a tile."""

    spec: Quantizer
    dtype: torch.dtype
    way: str  # the inverse scale of a Tensorwise is "given" or follows from a "measured" amax; or "measure" that amax

    def constants(self, transpose_codes: bool) -> dict[str, Any]:
        if self.way == "measure":
            return tile_casts.MEASURE
        return tile_casts.constants(self.spec, self.dtype, transpose_codes, self.way == "given")


def constants_of(kind: Kind | None, transpose_codes: bool) -> dict[str, Any]:
    return {"PUT": None, "RULE": ()} if kind is None else kind.constants(transpose_codes)


class Cast(NamedTuple):
    """One pass over some values: what it does with them, and the pointers and strides for that."""

    kind: Kind | None = None
    pointers: Pointers = (None,) * 7  # row, column, row_scale, column_scale, inverse_scale, running_amax, measured
    strides: tuple[int, ...] = (0, 0, 0, 0)


NO_PASS = Cast()


def passes(target: TileCast, dtype: torch.dtype) -> tuple[Cast | None, Cast]:
    """Return the pass that measures first, None if scales or amaxes are given or scales follow from blocks; and the
    cast."""
    if target.pair == (None, None):
        return None, NO_PASS
    spec, groups = tile_casts.spec_of(target.pair), target.cast_args.groups
    pointers, strides = tile_casts.pointers(*target), tile_casts.strides(target.pair)
    if not tile_casts.measures(*target):
        return None, Cast(Kind(spec, dtype, "given"), (*pointers, None), strides)
    given = target.cast_args.amax[target.pair[0] is None]
    if given is not None:
        return None, Cast(Kind(spec, dtype, "measured"), (*pointers, given), strides)
    # zero: the pass before raises it, in any order
    lead = target.pair[1] if target.pair[0] is None else target.pair[0]
    assert lead is not None
    amax = torch.zeros((1, 1) if groups is None else groups.number, dtype=torch.float32, device=lead.device)
    before = Cast(Kind(spec, dtype, "measure"), (*(None,) * 5, amax, None))
    return before, Cast(Kind(spec, dtype, "measured"), (*pointers, amax), strides)
