"""Where the values of a kernel go if they are wanted as codes alone: cast where they are made, never written and read
again in between.

A tile cast casts one tile that is in registers already: `put` in a scheme's `triton.py`. A kernel that makes values
by tiles is compiled with one and rounds to the dtype that it would have written, so that codes, scales and the amax
observed are those of the value written and cast by `octavo.quant.quantizer.fill_pair`, bit for bit. This works where
a tile has all that its scales follow from. Which schemes do is said here, once.
"""

from typing import NamedTuple

import torch

from octavo.formats import FLOATS
from octavo.quant.block import Block1D, Block2D
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.tensorwise import Tensorwise

QTensorPair = tuple[QTensor | None, QTensor | None]


class Target(NamedTuple):
    """Codes (row, column) that a kernel fills, and the tensors that its caller brings to the cast."""

    pair: QTensorPair = (None, None)
    cast_args: CastArgs = CastArgs()


NOTHING = Target()


def fuses(row: Quantizer | None, column: Quantizer | None, given_encode: bool, dtype: torch.dtype, what: str) -> str:
    """Empty where `what` is cast as it is made, else a sentence why it cannot be."""
    lead = column if row is None else row
    if lead is None:
        return f"Nobody wants codes of {what}."
    if dtype not in FLOATS:
        return f"A quantizer takes float32, bfloat16 or float16, not {dtype}."
    if row is not None and column is not None and row != column:
        return f"{row} and {column} take a pass each over {what}, which must be written first."
    if isinstance(lead, Tensorwise):
        if given_encode:
            return ""
        return f"{lead} finds its scale from all of {what}, which must be written first."
    if isinstance(lead, Block1D | Block2D):
        return ""
    return f"{lead} has no kernel that casts {what} as it is made: there is one for Tensorwise, Block1D and Block2D."


def refusal(pair: QTensorPair, cast_args: CastArgs, dtype: torch.dtype, what: str) -> str:
    """`fuses` of a call, which may bring more than the kernels take."""
    row, column = (None if q is None else q.spec for q in pair)
    why = fuses(row, column, cast_args.encode is not None, dtype, what)
    if why:
        return why
    if cast_args.groups is not None:
        return f"Rows in groups are cast from {what} once it is written."
    if cast_args.skip is not None or cast_args.amax != (None, None):
        return f"A skip flag and a given amax are for a cast of {what} on its own."
    return ""
