"""fp8-current: one scale per tensor, from the tensor's own amax: one read for the amax, one for the cast. No state.

E4M3 forward, E5M2 for gradients. One outlier affects its whole tensor; `fp8-rowwise` and `fp8-block` confine it.
"""

from octavo.formats import E4M3, E5M2, Format, check_format
from octavo.quant import Tensorwise
from octavo.recipes.recipe import LinearQuant, Recipe
from octavo.values import register


@register("fp8-current")
class Current(Recipe):
    """Tensorwise scales from the data."""

    grad_format: Format = E5M2
    pow2: bool = False
    eps: float = 0.0
    fprop: str = "quantized"
    dgrad: str = "quantized"
    wgrad: str = "quantized"
    backward: str = "quantized"
    fast: tuple[str, ...] = ("fprop",)

    def gemms(self) -> LinearQuant:
        x, dy = (Tensorwise(fmt, self.pow2, self.eps) for fmt in (E4M3, self.grad_format))
        return LinearQuant.of(x=(x, x), w=(x, x), dy=(dy, dy), fast=self.fast)

    def validate(self) -> None:
        super().validate()
        check_format(self.grad_format, (E4M3, E5M2), what="Current.grad_format")
        Tensorwise(E4M3, self.pow2, self.eps)  # raises for settings it cannot take
