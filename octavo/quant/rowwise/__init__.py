"""One scale for each row of the operand: a large token costs only itself.

    a_i = max_k |x_ik|        s_i = the power of two at or below fp8_max / max(a_i, 1e-12)        code = cast(x * s_i)

The rows of x.T are the columns of x, so the two orientations have different scales and different codes.
"""

from octavo.errors import check_choice
from octavo.formats import E4M3, Format
from octavo.quant.scale import FP8Quantizer
from octavo.values import register


@register("rowwise")
class Rowwise(FP8Quantizer):
    """FP8 with one scale for each row of the operand: `fp8-rowwise`.

    The scale is float32 [M, 1] for x [M, K]. The rows of x.T are the columns of x, so the two orientations have
    different scales and codes. Only an outlier's own row loses resolution to it.

    Args:
        fmt: format of the codes, E4M3 by default; E5M2 is the other choice.
        pow2: True by default: the inverse scale is rounded down to a power of two, so that scaling loses nothing. False
            keeps all its bits and so uses all of the format's range.
        eps: lower bound of a row's amax, 1e-12 by default, so that a row of zeros has a finite scale.

    Raises:
        UnsupportedConfig: a setting has another value.

    Example:
        >>> octavo.quant.Rowwise().quantize(torch.tensor([[448.0, 1.0], [7.0, 1.0]])).scale
        tensor([[1.0000],
                [0.0156]])
    """

    fmt: Format = E4M3
    pow2: bool = True
    eps: float = 1e-12  # amax is at least this, so that a row of zeros has a finite scale

    block = (1, None)
    two_pass = True
    package = __name__

    def validate(self) -> None:
        super().validate()
        check_choice(self.pow2, (False, True), what="Rowwise.pow2")
