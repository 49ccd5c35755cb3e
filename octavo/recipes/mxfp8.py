"""mxfp8: OCP microscaling, a power-of-two byte for every 32 elements along each contraction, E4M3 throughout.

`square_weights=True` scales weights in 32x32 blocks, so that one set of codes serves fprop and dgrad.
"""

from octavo.errors import check_choice
from octavo.formats import E4M3, Format
from octavo.quant import MX
from octavo.quant.mx import ROUNDINGS
from octavo.recipes.recipe import LinearQuant, Overridable
from octavo.values import register


@register("mxfp8")
class MXFP8(Overridable):
    """`mxfp8`: OCP microscaling, FP8 with a power-of-two scale byte for every 32 elements along each contraction.

    Use it for the finest scales among the FP8 recipes, and to study how a model trains in MXFP8. It has no state.
    Octavo emulates its GEMMs on GPUs: the codes and scales are the true ones, and no time is saved.

        fprop   x E4M3 · w E4M3
        dgrad   dy grad_format · w E4M3
        wgrad   dy grad_format · x E4M3

    Args:
        rounding: how a scale byte follows from the block's amax. "rceil", the default, takes the smallest power of two
            for which nothing saturates. "floor" is the OCP specification's rule, which saturates a quarter of all block
            maxima; "ceil" and "even" are variants of it. Change it to compare with code that uses another rule.
        grad_format: format of dy, E4M3 by default; E5M2 has more range and one mantissa bit less.
        square_weights: False by default. True scales weights in 32x32 blocks, so that one set of codes serves fprop
            and dgrad: less memory for weight codes, and coarser scales.

    Overrides of single GEMMs, which `octavo.recipes.Recipe` describes: fprop, dgrad, wgrad, backward.

    Raises:
        UnsupportedConfig: a setting has a value without a meaning.

    Example:
        >>> octavo.recipes.MXFP8(square_weights=True).linear().fprop.right
        mx(square=True)
    """

    rounding: str = "rceil"
    grad_format: Format = E4M3
    square_weights: bool = False

    def gemms(self) -> LinearQuant:
        x, dy = MX(E4M3, self.rounding), MX(self.grad_format, self.rounding)
        w = MX(E4M3, self.rounding, square=self.square_weights)
        return LinearQuant.of(x=(x, x), w=(w, w), dy=(dy, dy))

    def validate(self) -> None:
        super().validate()
        check_choice(self.rounding, ROUNDINGS, what="MXFP8.rounding")
        check_choice(self.square_weights, (False, True), what="MXFP8.square_weights")
