"""Microscaling (OCP MX): a power-of-two scale, one byte, for every 32 elements along the contraction.

    b      = the E8M0 byte of the block's amax, by `rounding`
    code   = cast(x * 2^(127-b))          scale = 2^(b-127)

    rceil  the smallest power of two that is not below amax/fp8_max: nothing saturates. The default
    floor  exponent(amax) - emax, as in the OCP specification: saturates a quarter of all block maxima
    ceil   like floor, with the exponent rounded up
    even   like floor, with amax first rounded to the format's mantissa

amax 0 gives b = 0. An amax of Inf or NaN gives 255: the whole block decodes to NaN, and so stays visible.
"""

from octavo.errors import check_choice
from octavo.formats import E4M3, E5M2, E8M0, Format, check_format
from octavo.quant.quantizer import Quantizer
from octavo.values import register

BLOCK = 32
ROUNDINGS = ("rceil", "floor", "ceil", "even")
MANTISSA_BITS = {"E4M3": 3, "E5M2": 2}


@register("mx")
class MX(Quantizer):
    """FP8 with a power-of-two scale byte for every 32 elements along the contraction: OCP microscaling.

    The scale is E8M0 bytes [M, ceil(K/32)] for x [M, K], stored with M fastest, or [ceil(M/32), ceil(K/32)] with square
    blocks.

    Args:
        fmt: format of the codes, E4M3 by default; E5M2 is the other choice.
        rounding: how the scale follows from the block's amax. "rceil", the default, takes the smallest power of two for
            which nothing saturates. "floor" is the OCP specification's rule, which saturates a quarter of all block
            maxima; "ceil" and "even" are variants of it. Change it to compare with code that uses another rule.
        square: False by default. True scales 32x32 blocks, so that one set of codes serves both orientations: for
            weights.

    Raises:
        UnsupportedConfig: a setting has another value.

    Example:
        >>> q = octavo.quant.MX().quantize(torch.tensor([[448.0, 1.0], [449.0, 1.0]]))
        >>> q.scale.tolist()
        [[127], [128]]
        >>> q.dequantize().tolist()
        [[448.0, 1.0], [448.0, 1.0]]
    """

    fmt: Format = E4M3
    rounding: str = "rceil"
    square: bool = False  # 32x32 blocks, for weights: one set of codes serves both orientations

    scale_format = E8M0
    package = __name__

    @property
    def block(self) -> tuple[int, int]:  # type: ignore[override]
        """(rows, columns) that share a scale."""
        return (BLOCK if self.square else 1), BLOCK

    def validate(self) -> None:
        check_format(self.fmt, (E4M3, E5M2), what="MX.fmt")
        check_choice(self.rounding, ROUNDINGS, what="MX.rounding")
        check_choice(self.square, (False, True), what="MX.square")
