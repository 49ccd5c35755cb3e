"""FP8 in blocks of 128: 1x128 along the contraction for activations and gradients, 128x128 for weights.

    a_b = max|x| in the block        s_b = fp8_max / a_b, to the power of two at or below it        code = cast(x * s_b)

Power-of-two scales make the two orientations of 1x128 agree on nearly every value; `scale="fp32"` uses all of the
format's range instead. A 128x128 block is the same block in both orientations, so transposing its codes loses nothing.
Never use it for gradients: training diverges.
"""

from octavo.errors import check_choice, check_not_negative
from octavo.formats import E4M3, E5M2, Format, check_format
from octavo.quant.quantizer import Quantizer
from octavo.values import register

BLOCK = 128


class _Blocks(Quantizer):
    fmt: Format
    scale: str
    eps: float
    package = __name__

    @property
    def pow2(self) -> bool:
        return self.scale == "pow2"

    def validate(self) -> None:
        check_format(self.fmt, (E4M3, E5M2), what=f"{type(self).__name__}.fmt")
        check_choice(self.scale, ("pow2", "fp32"), what=f"{type(self).__name__}.scale")
        check_not_negative(self.eps, what=f"{type(self).__name__}.eps")


@register("block-1d")
class Block1D(_Blocks):
    """A float32 scale [M, ceil(K/128)], stored with M fastest."""

    fmt: Format = E4M3
    scale: str = "pow2"
    eps: float = 0.0

    block = (1, BLOCK)


@register("block-2d")
class Block2D(_Blocks):
    """A float32 scale [ceil(M/128), ceil(K/128)]."""

    fmt: Format = E4M3
    scale: str = "pow2"
    eps: float = 0.0

    block = (BLOCK, BLOCK)
