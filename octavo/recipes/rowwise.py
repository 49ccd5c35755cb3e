"""fp8-rowwise: one scale per row of each operand, E4M3 throughout.

`wgrad="bf16"` keeps the weight gradient, which sums over all tokens, in the operands' own precision.
"""

from dataclasses import field

from octavo.formats import E4M3, Format
from octavo.quant import Rowwise as RowwiseQuantizer
from octavo.recipes.recipe import LinearQuant, Overridable
from octavo.values import register


@register("fp8-rowwise")
class Rowwise(Overridable):
    """`fp8-rowwise`: FP8 with one scale for each row of each operand.

    Use it if outliers in single tokens or channels cost `fp8-current` accuracy: an outlier reduces the resolution of
    its own row alone. It has no state. The two orientations of a tensor have different codes, so each is cast from the
    source.

        fprop   x E4M3 · w E4M3            fast accumulation
        dgrad   dy grad_format · w E4M3    precise
        wgrad   dy grad_format · x E4M3    precise

    Args:
        grad_format: format of dy, E4M3 by default. E5M2 has more range: try it if gradients within a row differ by
            more than E4M3 can hold.
        pow2: True by default: inverse scales are powers of two, so that scaling loses nothing. False keeps all their
            bits and so uses all of the format's range.
        fast: ("fprop",) by default: the GEMMs in which the GPU may accumulate FP8 products in fewer bits. The others
            promote their sum to float32 every 128 products. Use () for the most exact sums.

    Overrides of single GEMMs, which `octavo.recipes.Recipe` describes: fprop, dgrad, wgrad, backward.

    Raises:
        UnsupportedConfig: a setting has a value without a meaning.

    Example:
        >>> octavo.recipes.Rowwise(wgrad="bf16")
        fp8-rowwise(wgrad='bf16')
        >>> octavo.recipes.Rowwise().linear().wgrad.left
        rowwise
    """

    grad_format: Format = E4M3
    pow2: bool = True
    fast: tuple[str, ...] = field(default=("fprop",), kw_only=True)  # after the overrides

    def gemms(self) -> LinearQuant:
        x, dy = (RowwiseQuantizer(fmt, self.pow2) for fmt in (E4M3, self.grad_format))
        return LinearQuant.of(x=(x, x), w=(x, x), dy=(dy, dy), fast=self.fast)

    def validate(self) -> None:
        super().validate()
        RowwiseQuantizer(E4M3, self.pow2)  # raises for settings it cannot take
