"""Tile casts: a kernel that computes values casts them in registers and writes only their codes, never the values
themselves.

A tile cast casts one tile that is already in registers: `put` in a scheme's `triton.py`. A kernel that computes values
by tiles is compiled with one and rounds to the dtype that it would have written, so that codes, scales and the running
amax equal, bit for bit, those of the value written and then cast by `octavo.quant.casts.fill_pair`. This needs a
scheme whose scales follow from one tile. `fuses` is the only list of those schemes.
"""

from typing import NamedTuple

import torch

from octavo.formats import FLOATS
from octavo.quant.block import Block1D, Block2D
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.tensorwise import Tensorwise

QTensorPair = tuple[QTensor | None, QTensor | None]


class TileCast(NamedTuple):
    """Codes (row, column) that a kernel fills, and the tensors that the caller passes to the cast."""

    pair: QTensorPair = (None, None)
    cast_args: CastArgs = CastArgs()


NOTHING = TileCast()


def fuses(row: Quantizer | None, column: Quantizer | None, knows_scale: bool, dtype: torch.dtype, what: str) -> str:
    """Return "" if a kernel can cast `what` while it computes it, else a sentence with the reason. `knows_scale` tells
    whether the kernel has the inverse scale of a Tensorwise: given by the caller, or measured in a pass before."""
    lead = column if row is None else row
    if lead is None:
        return f"Nobody wants codes of {what}."
    if dtype not in FLOATS:
        return f"A quantizer takes float32, bfloat16 or float16, not {dtype}."
    # one tile cast writes both orientations, by one rule
    if row is not None and column is not None and row != column:
        return f"{row} and {column} take a pass each over {what}, which must be written first."
    # blocks find their scales in their own tile; a whole tensor's amax is known when all tiles are
    if isinstance(lead, Tensorwise):
        if knows_scale:
            return ""
        return f"{lead} finds its scale from all of {what}, which must be written first."
    if isinstance(lead, Block1D | Block2D):
        return ""
    return f"{lead} has no kernel that casts {what} as it is made: there is one for Tensorwise, Block1D and Block2D."


def unsupported_reason(
    pair: QTensorPair, cast_args: CastArgs, dtype: torch.dtype, what: str, *, measures: bool = False
) -> str:
    """Return `fuses` for a call, and refuse cast arguments that the kernels do not take. A kernel that `measures` finds
    an inverse scale that is not given from an amax, given or measured in a pass before, and takes rows in groups, each
    with an inverse scale."""
    row, column = (None if q is None else q.spec for q in pair)
    why = fuses(row, column, cast_args.inverse_scale is not None or measures, dtype, what)
    if why:
        return why
    if cast_args.groups is not None and not measures:
        return f"Rows in groups are cast from {what} once it is written."
    # kernels with a tile cast have no branch for these
    if cast_args.skip is not None or not (measures or cast_args.amax == (None, None)):
        return f"A skip flag and a given amax are for a cast of {what} on its own."
    if cast_args.amax != (None, None) and not takes_amax(pair, cast_args):
        return f"The given amaxes of {what} are not one that both orientations follow from."
    return ""


def takes_amax(pair: QTensorPair, cast_args: CastArgs) -> bool:
    """Return whether all scales of a cast follow from one amax, that of a Tensorwise or of each of its groups: it is
    given for every orientation, or for none and may be measured."""
    there = [(q.spec, amax) for q, amax in zip(pair, cast_args.amax, strict=True) if q is not None]
    one = all([amax is there[0][1] for _, amax in there])
    return one and cast_args.inverse_scale is None and all([isinstance(spec, Tensorwise) for spec, _ in there])
