"""The pairs of quantizers that a GEMM multiplies. Recipes check theirs when they are built, GEMMs when they run.

block       both scales reach equally far along the contraction, and at most one block is 128x128
scale       both scales have the same format
codes       at most one operand is E5M2
basis       both operands are rotated alike, or neither is
"""

from octavo.errors import UnsupportedConfig
from octavo.formats import E5M2
from octavo.quant.block import Block1D, Block2D
from octavo.quant.mx import MX
from octavo.quant.nvfp4 import NVFP4
from octavo.quant.quantizer import Quantizer
from octavo.quant.rowwise import Rowwise
from octavo.quant.tensorwise import Tensorwise

_NAMED: tuple[Quantizer, ...] = (  # the partners that a refusal may name
    Tensorwise(), Rowwise(), Block1D(), Block2D(), MX(), MX(square=True), NVFP4(), NVFP4(square=True), NVFP4(rht=True)
)  # fmt: skip


def check_pair(a: Quantizer, b: Quantizer, *, operands: str = "The operands of gemm") -> None:
    """Raise if no GEMM multiplies codes of `a` by codes of `b`. `operands` is the subject of the message."""
    why = _misfit(a, b)
    if why:
        first, *second = [(_written(q), _listed(partners(q))) for q in dict.fromkeys((a, b))]
        fitting = [f"{first[0]} goes with {first[1]}", *[f"{q} with {others}" for q, others in second]]
        raise UnsupportedConfig(f"{operands} are {a} and {b}, and {why}: {', '.join(fitting)}.")


def _misfit(a: Quantizer, b: Quantizer) -> str:
    """Return the rule that the pair breaks and the way to keep it; empty if the pair fits."""
    if a.fmt == b.fmt == E5M2:
        return "no chip multiplies E5M2 by E5M2. Keep one of them in E4M3"
    if a.block[1] != b.block[1] or a.scale_format != b.scale_format:
        return "must be scaled alike along the contraction. Quantize both with the same block length and kind of scale"
    if a.block == b.block == (128, 128):
        return "no block GEMM takes 128x128 scales on both sides. Quantize the one that is not a weight with Block1D"
    if a.basis != b.basis:
        return "must be in the same basis, or the rotation does not cancel. Rotate both or neither"
    return ""


def partners(q: Quantizer) -> tuple[Quantizer, ...]:
    """Return quantizers that fit `q`: Octavo's, or else `q` itself, if two operands may have it."""
    found = tuple(other for other in _NAMED if not _misfit(q, other))
    return found or (() if _misfit(q, q) else (q,))


def _listed(quantizers: tuple[Quantizer, ...]) -> str:
    return " or ".join([_written(q) for q in quantizers]) or "no quantizer of Octavo's"


def _written(q: Quantizer) -> str:
    """Return the quantizer as Python code writes it: by the name of its class."""
    _, bracket, settings = q.key.partition("(")
    return type(q).__name__ + bracket + settings
