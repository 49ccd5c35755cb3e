"""FP8 in blocks of 128: 1x128 along the contraction for activations and gradients, 128x128 for weights.

    a_b = max|x| in the block        s_b = fp8_max / a_b, to the power of two at or below it        code = cast(x * s_b)

Power-of-two scales make the two orientations of 1x128 agree on nearly every value; `scale="fp32"` uses all of the
format's range instead. A 128x128 block is the same block in both orientations, so transposing its codes loses nothing.
Never use it for gradients: training diverges.
"""

import torch
from torch import Tensor

from octavo.errors import check_choice
from octavo.formats import E4M3, Format
from octavo.quant.cast_checks import check_float
from octavo.quant.qtensor import QTensor
from octavo.quant.scale import FP8Quantizer
from octavo.values import register

BLOCK = 128


class _Blocks(FP8Quantizer):
    scale: str
    gathers = True
    package = __name__

    @property
    def pow2(self) -> bool:  # type: ignore[override]
        """Whether inverse scales are powers of two."""
        return self.scale == "pow2"

    def validate(self) -> None:
        super().validate()
        check_choice(self.scale, ("pow2", "fp32"), what=f"{type(self).__name__}.scale")


@register("block-1d")
class Block1D(_Blocks):
    """FP8 with a scale for every 128 elements along the contraction: x and dy of `fp8-block`.

    The scale is float32 [M, ceil(K/128)] for x [M, K], stored with M fastest. The two orientations have different
    blocks, and so different codes. Only the 128 elements that share an outlier's block lose resolution to it.

    Args:
        fmt: format of the codes, E4M3 by default. E5M2 has more range and one mantissa bit less.
        scale: "pow2", the default, rounds the inverse scale down to a power of two: scaling then loses nothing, and
            both orientations agree on nearly every value. "fp32" keeps all its bits and so uses all of the format's
            range.
        eps: lower bound of a block's amax, 0.0 by default. Raise it to bound the inverse scale of blocks that are
            almost zero.

    Raises:
        UnsupportedConfig: a setting has another value.

    Example:
        >>> q = octavo.quant.Block1D().quantize(torch.randn(4, 300))
        >>> q.codes.shape, q.scale.shape
        (torch.Size([4, 300]), torch.Size([4, 3]))
    """

    fmt: Format = E4M3
    scale: str = "pow2"
    eps: float = 0.0

    block = (1, BLOCK)

    def dequantize(self, q: QTensor, dtype: torch.dtype | None = None) -> Tensor:
        if self.fmt.inf is not None:
            return super().dequantize(q, dtype)
        # the same bits without float32 temporaries: codes are exact in 16 bits, and a product is rounded once
        dtype = check_float(q.dtype if dtype is None else dtype, "dequantize")
        values, whole = q.codes.to(dtype, memory_format=torch.contiguous_format), q.columns // BLOCK
        values[:, : whole * BLOCK].view(q.rows, whole, BLOCK).mul_(q.scale[:, :whole, None])
        values[:, whole * BLOCK :].mul_(q.scale[:, whole:])
        limit = torch.finfo(dtype).max
        return values.clamp_(-limit, limit).view(q.shape)


@register("block-2d")
class Block2D(_Blocks):
    """FP8 with a scale for every 128x128 block: the weights of `fp8-block`.

    The scale is float32 [ceil(M/128), ceil(K/128)] for x [M, K]. A block is the same in both orientations, so
    `QTensor.transpose` needs no second quantization. Do not use it for gradients: training diverges.

    Args:
        fmt: format of the codes, E4M3 by default; E5M2 is the other choice.
        scale: "pow2", the default, rounds the inverse scale down to a power of two; "fp32" keeps all its bits.
        eps: lower bound of a block's amax, 0.0 by default.

    Raises:
        UnsupportedConfig: a setting has another value.

    Example:
        >>> w = torch.randn(256, 384)
        >>> row, column = octavo.quant.Block2D().quantize_both(w)
        >>> row.scale.shape, torch.equal(row.dequantize(), column.dequantize().T)
        (torch.Size([2, 3]), True)
    """

    fmt: Format = E4M3
    scale: str = "pow2"
    eps: float = 0.0

    block = (BLOCK, BLOCK)
