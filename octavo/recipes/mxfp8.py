"""mxfp8: OCP microscaling, a power-of-two byte for every 32 elements along each contraction, E4M3 throughout.

`square_weights=True` scales weights in 32x32 blocks, so that one set of codes serves fprop and dgrad.
"""

from octavo.errors import check_choice
from octavo.formats import E4M3, E5M2, Format, check_format
from octavo.quant import MX
from octavo.quant.mx import ROUNDINGS
from octavo.recipes.recipe import LinearQuant, Recipe
from octavo.values import register


@register("mxfp8")
class MXFP8(Recipe):
    """MX scales; `rounding` says how the scale byte is chosen."""

    rounding: str = "rceil"
    grad_format: Format = E4M3
    square_weights: bool = False
    fprop: str = "quantized"
    dgrad: str = "quantized"
    wgrad: str = "quantized"
    backward: str = "quantized"

    def gemms(self) -> LinearQuant:
        x, dy = MX(E4M3, self.rounding), MX(self.grad_format, self.rounding)
        w = MX(E4M3, self.rounding, square=self.square_weights)
        return LinearQuant.of(x=(x, x), w=(w, w), dy=(dy, dy))

    def validate(self) -> None:
        super().validate()
        check_format(self.grad_format, (E4M3, E5M2), what="MXFP8.grad_format")
        check_choice(self.rounding, ROUNDINGS, what="MXFP8.rounding")
        check_choice(self.square_weights, (False, True), what="MXFP8.square_weights")
