"""One scale for the whole tensor: current scaling when it comes from the data, delayed scaling when it is given.

    a = max|x|        s = fp8_max / a (octavo.quant.scale)        code = cast(x * s)        scale = 1 / s

Both orientations share the scale, so the column codes are the row codes transposed, byte for byte. One outlier
costs the whole tensor its resolution: an element below 2^-17 of the largest is lost in E4M3.
"""

import torch
from torch import Tensor

from octavo.errors import check_choice
from octavo.formats import E4M3, Format
from octavo.quant.cast_checks import check_tensor, checked
from octavo.quant.casts import quantize_pair
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs
from octavo.quant.scale import FP8Quantizer
from octavo.values import register


@register("tensorwise")
class Tensorwise(FP8Quantizer):
    """FP8 with one scale for the whole tensor: `fp8-current` and `fp8-delayed`.

    The scale is float32 [1, 1]. It follows from the tensor's amax, or from an `inverse_scale` that the caller gives
    (delayed scaling). Both orientations share it, so the column codes are the row codes transposed. One outlier
    reduces the resolution of the whole tensor: E4M3 loses an element below 2^-17 of the largest.

    Args:
        fmt: format of the codes, E4M3 by default. E5M2 has more range and one mantissa bit less: for gradients.
        pow2: False by default. True rounds the inverse scale down to a power of two, so that scaling loses nothing.
        eps: lower bound of the amax, 0.0 by default.

    Raises:
        UnsupportedConfig: a setting has another value.

    Example:
        >>> q = octavo.quant.Tensorwise().quantize(torch.tensor([[224.0, 1.0]]))
        >>> q.codes.float(), q.scale
        (tensor([[448.,   2.]]), tensor([[0.5000]]))
    """

    fmt: Format = E4M3
    pow2: bool = False  # scale rounded to a power of two, so that scaling loses nothing
    eps: float = 0.0  # amax is at least this

    block = (None, None)
    two_pass = True
    takes_inverse_scale = True
    gathers = True
    package = __name__

    def validate(self) -> None:
        super().validate()
        check_choice(self.pow2, (False, True), what="Tensorwise.pow2")

    def observe(
        self, x: Tensor, inverse_scale: Tensor, *, row: bool = True, column: bool = True
    ) -> tuple[QTensor | None, QTensor | None, Tensor]:
        """Cast x with a given inverse scale and measure its amax in the same read of x: one step of delayed scaling.

        Args:
            x: float32, bfloat16 or float16, of any shape; leading dims are rows.
            inverse_scale: float32 [1] on x's device: the inverse scale, such as `DelayedState.encode_for` returns.
            row: whether to make the codes of x.
            column: whether to make the codes of x.T.

        Returns:
            The row QTensor, the column QTensor (None if not asked for), and the amax, float32 [1, 1].

        Raises:
            UnsupportedDtype: x is no tensor of these dtypes.
            UnsupportedShape: inverse_scale is not one float32 on x's device.

        Example:
            >>> x = torch.tensor([[3.0, -5.0]])
            >>> row, column, amax = octavo.quant.Tensorwise().observe(x, torch.tensor([2.0]), column=False)
            >>> row.codes.float(), column, amax
            (tensor([[  6., -10.]]), None, tensor([[5.]]))
        """
        running_amax = torch.zeros(1, 1, dtype=torch.float32, device=x.device)
        pair = self if row else None, self if column else None
        cast_args = CastArgs(inverse_scale=inverse_scale, running_amax=running_amax)
        return *quantize_pair(x, *pair, checked(cast_args, check_tensor(x), *pair)), running_amax
