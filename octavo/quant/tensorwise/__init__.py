"""One scale for the whole tensor: current scaling when it comes from the data, delayed scaling when it is given.

    a = max|x|        s = fp8_max / a (octavo.quant.scale)        code = cast(x * s)        scale = 1 / s

Both orientations share the scale, so the column codes are the row codes transposed, byte for byte. One outlier
costs the whole tensor its resolution: an element below 2^-17 of the largest is lost in E4M3.
"""

import torch
from torch import Tensor

from octavo.errors import check_choice, check_not_negative
from octavo.formats import E4M3, E5M2, Format, check_format
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs, Quantizer, check_tensor, quantize_pair
from octavo.values import register


@register("tensorwise")
class Tensorwise(Quantizer):
    """A float32 scale [1, 1] for all of x."""

    fmt: Format = E4M3
    pow2: bool = False  # scale rounded to a power of two, so that scaling loses nothing
    eps: float = 0.0  # amax is at least this

    block = (None, None)
    two_pass = True
    takes_encode = True
    package = __name__

    def validate(self) -> None:
        check_format(self.fmt, (E4M3, E5M2), what="Tensorwise.fmt")
        check_choice(self.pow2, (False, True), what="Tensorwise.pow2")
        check_not_negative(self.eps, what="Tensorwise.eps")

    def observe(
        self, x: Tensor, encode: Tensor, *, row: bool = True, column: bool = True
    ) -> tuple[QTensor | None, QTensor | None, Tensor]:
        """Casts x with the multiplier of earlier steps and measures its amax, in one read of x (delayed scaling).
        Returns row, column and amax [1, 1]."""
        observed = torch.zeros(1, 1, dtype=torch.float32, device=x.device)
        pair = self if row else None, self if column else None
        cast_args = self.checked(CastArgs(encode=encode, observed=observed), check_tensor(x), *pair)
        return *quantize_pair(x, *pair, cast_args), observed
