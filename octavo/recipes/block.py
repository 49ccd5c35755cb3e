"""fp8-block: a scale for every 128 elements of x and dy along the contraction, and for every 128x128 block of w.

E4M3 throughout, and every GEMM promotes its sum to float32 once per block. Gradients are never scaled in 128x128
blocks: training diverges.
"""

from octavo.errors import check_choice
from octavo.formats import E4M3, E5M2, Format, check_format
from octavo.quant import Block1D, Block2D
from octavo.recipes.recipe import LinearQuant, Recipe
from octavo.values import register


@register("fp8-block")
class Block(Recipe):
    """Block scales, powers of two unless scale="fp32"."""

    scale: str = "pow2"
    grad_format: Format = E4M3
    fprop: str = "quantized"
    dgrad: str = "quantized"
    wgrad: str = "quantized"
    backward: str = "quantized"

    def gemms(self) -> LinearQuant:
        x, w, dy = Block1D(scale=self.scale), Block2D(scale=self.scale), Block1D(self.grad_format, self.scale)
        return LinearQuant.of(x=(x, x), w=(w, w), dy=(dy, dy))

    def validate(self) -> None:
        super().validate()
        check_format(self.grad_format, (E4M3, E5M2), what="Block.grad_format")
        check_choice(self.scale, ("pow2", "fp32"), what="Block.scale")
