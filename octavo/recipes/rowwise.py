"""fp8-rowwise: one scale per row of each operand, E4M3 throughout. Numerically the safest FP8 recipe on Hopper.

`wgrad="bf16"` keeps the weight gradient, which sums over all tokens, in the operands' own precision.
"""

from octavo.formats import E4M3, E5M2, Format, check_format
from octavo.quant import Rowwise as RowwiseQuantizer
from octavo.recipes.recipe import LinearQuant, Recipe
from octavo.values import register


@register("fp8-rowwise")
class Rowwise(Recipe):
    """Rowwise scales from the data."""

    grad_format: Format = E4M3
    pow2: bool = True
    fprop: str = "quantized"
    dgrad: str = "quantized"
    wgrad: str = "quantized"
    backward: str = "quantized"
    fast: tuple[str, ...] = ("fprop",)

    def gemms(self) -> LinearQuant:
        x, dy = (RowwiseQuantizer(fmt, self.pow2) for fmt in (E4M3, self.grad_format))
        return LinearQuant.of(x=(x, x), w=(x, x), dy=(dy, dy), fast=self.fast)

    def validate(self) -> None:
        super().validate()
        check_format(self.grad_format, (E4M3, E5M2), what="Rowwise.grad_format")
        RowwiseQuantizer(E4M3, self.pow2)  # raises for settings it cannot take
