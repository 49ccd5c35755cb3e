"""NVFP4: four-bit codes, an E4M3 scale for every 16 of them, and one float32 scale over all.

    G      = max|x| of the tensor                       S_enc = 448*6 / G
    S_b    = E4M3(amax_b * S_enc * (1/6))               e_b   = 1 / (S_b / S_enc)
    code   = E2M1(x * e_b)                              value = code * S_b * global_scale,  global_scale = G / (448*6)

(If that S_enc overflows, it is float32's max and global_scale its reciprocal.)

The 1/6 is a product with its float32 reciprocal, S_b rounds to nearest (a block maximum may clip by up to 1/16), and a
block below 2.2e-6 of G gets S_b = 0: it decodes to zero whatever its codes are. With the tensor's one G, a single
outlier of 2^20 erases everything else.

Two options serve gradients and the weight-gradient GEMM:

    stochastic   rounds up with probability equal to the remainder, in steps of 1/256, from a counter-based generator
    rht          rotates every 16 elements along the contraction by a random-sign Hadamard matrix before they are
                 quantized. Both operands of a GEMM are rotated alike, so the product is unchanged and outliers are
                 spread. The rotated values are rounded to bfloat16, and decoding rotates them back

Codes are padded with zeros to whole blocks of 16, two to a byte, the low nibble first.
"""

import torch.nn.functional as F
from torch import Tensor

from octavo.errors import UnsupportedConfig, check_choice
from octavo.formats import E2M1, E4M3, pack_nibbles, unpack_nibbles
from octavo.quant.nvfp4.hadamard import turn_back
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Quantizer
from octavo.values import register

BLOCK = 16


@register("nv")
class NVFP4(Quantizer):
    """FP4 (E2M1) with an E4M3 scale byte for every 16 elements along the contraction, and one float32 scale for all.

    The scale is bytes [M, ceil(K/16)] for x [M, K], stored with M fastest, or [ceil(M/16), ceil(K/16)] with square
    blocks. `global_scale` is float32 [1]. Codes are padded with zeros to whole blocks of 16, two to a byte.

    Args:
        square: False by default. True scales 16x16 blocks, so that one set of codes serves both orientations: for
            weights.
        rht: False by default. True rotates every 16 elements by a random-sign Hadamard matrix before they are
            quantized, which spreads outliers. Both operands of a GEMM must be rotated: for wgrad. `dequantize` rotates
            back.
        stochastic: False by default. True rounds each value up or down with a probability that follows from its
            remainder: for gradients. `quantize` then needs a seed.

    Raises:
        UnsupportedConfig: a setting is no bool, or square=True has rht or stochastic beside it.

    Example:
        >>> q = octavo.quant.NVFP4(stochastic=True).quantize(torch.randn(4, 64), seed=torch.tensor([1234, 0]))
        >>> q.codes.shape, q.codes.dtype, q.scale.shape, q.global_scale.shape
        (torch.Size([4, 32]), torch.uint8, torch.Size([4, 4]), torch.Size([1]))
    """

    square: bool = False  # 16x16 blocks, for weights: one set of codes serves both orientations
    rht: bool = False
    stochastic: bool = False

    fmt = E2M1
    scale_format = E4M3
    two_level = True
    two_pass = True
    package = __name__

    @property
    def block(self) -> tuple[int, int]:  # type: ignore[override]
        """(rows, columns) that share a scale."""
        return (BLOCK if self.square else 1), BLOCK

    @property
    def is_stochastic(self) -> bool:  # type: ignore[override]
        """Whether a cast needs a seed."""
        return self.stochastic

    @property
    def basis(self) -> str:  # type: ignore[override]
        """The rotation of the values along the contraction; "" for none."""
        return "rht16" if self.rht else ""

    def validate(self) -> None:
        for field in ("square", "rht", "stochastic"):
            check_choice(getattr(self, field), (False, True), what=f"NVFP4.{field}")
        if self.square and (self.rht or self.stochastic):
            raise UnsupportedConfig(
                f"NVFP4 square blocks must read the same both ways, which rht={self.rht} and "
                f"stochastic={self.stochastic} would break. Use square=False with them."
            )

    def _fuses_with(self, column: Quantizer) -> bool:
        return isinstance(column, NVFP4) and column.square == self.square

    def _rotated_back(self, values: Tensor) -> Tensor:
        return turn_back(values) if self.rht else values

    def _transpose_codes(self, q: QTensor, out: Tensor) -> None:
        codes = unpack_nibbles(q.codes)[:, : q.columns].T
        out.copy_(pack_nibbles(F.pad(codes, (0, -codes.shape[1] % BLOCK))))
