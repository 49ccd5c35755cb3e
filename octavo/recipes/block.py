"""fp8-block: a scale for every 128 elements of x and dy along the contraction, and for every 128x128 block of w.

E4M3 throughout, and every GEMM promotes its sum to float32 once per block. Gradients are never scaled in 128x128
blocks: training diverges.
"""

from octavo.errors import check_choice
from octavo.formats import E4M3, Format
from octavo.quant import Block1D, Block2D
from octavo.recipes.recipe import LinearQuant, Overridable
from octavo.values import register


@register("fp8-block")
class Block(Overridable):
    """`fp8-block`: FP8 with a scale for every 128 elements of x and dy, and for every 128x128 block of w.

    Use it if outliers cost `fp8-current` accuracy and a scale for each row is too coarse. It has no state. Every GEMM
    promotes its sum to float32 once per block. One set of weight codes serves fprop and dgrad.

        fprop   x E4M3, 1x128 · w E4M3, 128x128
        dgrad   dy grad_format, 1x128 · w E4M3, 128x128
        wgrad   dy grad_format, 1x128 · x E4M3, 1x128

    Args:
        scale: "pow2", the default: inverse scales are powers of two, so that scaling loses nothing. "fp32" keeps all
            their bits and so uses all of the format's range.
        grad_format: format of dy, E4M3 by default. E5M2 has more range, but Hopper's block GEMM does not take it:
            dgrad and wgrad are then emulated.

    Overrides of single GEMMs, which `octavo.recipes.Recipe` describes: fprop, dgrad, wgrad, backward.

    Raises:
        UnsupportedConfig: a setting has a value without a meaning.

    Example:
        >>> quant = octavo.recipes.Block(scale="fp32").linear()
        >>> quant.fprop.left, quant.fprop.right
        (block-1d(scale='fp32'), block-2d(scale='fp32'))
    """

    scale: str = "pow2"
    grad_format: Format = E4M3

    def gemms(self) -> LinearQuant:
        x, w, dy = Block1D(scale=self.scale), Block2D(scale=self.scale), Block1D(self.grad_format, self.scale)
        return LinearQuant.of(x=(x, x), w=(w, w), dy=(dy, dy))

    def validate(self) -> None:
        super().validate()
        check_choice(self.scale, ("pow2", "fp32"), what="Block.scale")
