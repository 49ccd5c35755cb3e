"""fp8-current: one scale per tensor, from the tensor's own amax: one read for the amax, one for the cast. No state.

E4M3 forward, E5M2 for gradients. One outlier affects its whole tensor; `fp8-rowwise` and `fp8-block` confine it.
"""

from dataclasses import field

from octavo.formats import E4M3, E5M2, Format
from octavo.quant import Tensorwise
from octavo.recipes.recipe import LinearQuant, Overridable
from octavo.values import register


@register("fp8-current")
class Current(Overridable):
    """`fp8-current`: FP8 with one scale for each tensor, from the tensor's own amax.

    Use it first: it is simple and has no state. It reads each tensor twice, for the amax and for the cast. One outlier
    reduces the resolution of its whole tensor; if that costs accuracy, `fp8-rowwise` and `fp8-block` confine it.

        fprop   x E4M3 · w E4M3            fast accumulation
        dgrad   dy grad_format · w E4M3    precise
        wgrad   dy grad_format · x E4M3    precise

    Args:
        grad_format: format of dy, E5M2 by default, for its range. E4M3 has one mantissa bit more: try it if gradients
            of a tensor differ little in magnitude.
        pow2: False by default. True rounds the inverse scale down to a power of two, so that scaling loses nothing and
            up to half of the format's range stays unused.
        eps: lower bound of the amax, 0.0 by default. Raise it to bound the inverse scale of tensors that are
            almost zero.
        fast: ("fprop",) by default: the GEMMs in which the GPU may accumulate FP8 products in fewer bits. The others
            promote their sum to float32 every 128 products. Use () for the most exact sums.

    Overrides of single GEMMs, which `octavo.recipes.Recipe` describes: fprop, dgrad, wgrad, backward.

    Raises:
        UnsupportedConfig: a setting has a value without a meaning.

    Example:
        >>> quant = octavo.recipes.Current().linear()
        >>> quant.fprop.left, quant.dgrad.left
        (tensorwise, tensorwise(fmt=E5M2))
        >>> octavo.Linear(32, 64, recipe="fp8-current")(torch.randn(4, 32)).shape
        torch.Size([4, 64])
    """

    grad_format: Format = E5M2
    pow2: bool = False
    eps: float = 0.0
    fast: tuple[str, ...] = field(default=("fprop",), kw_only=True)  # after the overrides

    def gemms(self) -> LinearQuant:
        x, dy = (Tensorwise(fmt, self.pow2, self.eps) for fmt in (E4M3, self.grad_format))
        return LinearQuant.of(x=(x, x), w=(x, x), dy=(dy, dy), fast=self.fast)

    def validate(self) -> None:
        super().validate()
        Tensorwise(E4M3, self.pow2, self.eps)  # raises for settings it cannot take
