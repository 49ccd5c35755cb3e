"""nvfp4: four bits. Weights are scaled in 16x16 blocks and activations in 1x16, gradients are rounded stochastically,
and the operands of the weight gradient are multiplied by a random-sign Hadamard matrix.

The published recipe keeps about one linear layer in six, in the first and the last blocks, in bf16: use a policy.
"""

from octavo.errors import check_choice
from octavo.quant import NVFP4 as NVFP4Quantizer
from octavo.recipes.recipe import LinearQuant, Overridable
from octavo.values import register


@register("nvfp4")
class NVFP4(Overridable):
    """`nvfp4`: four-bit codes (E2M1) with a scale byte for every 16 elements and one float32 scale for each tensor.

    Use it to study how a model trains in four bits; Octavo emulates its GEMMs on GPUs, which saves no time. Keep some
    layers in `bf16` by the `policy` of `octavo.convert`: the published recipe leaves about one linear layer in six, in
    the first and the last blocks, unquantized.

        fprop   x 1x16 · w 16x16
        dgrad   dy 1x16, rounded stochastically · w 16x16
        wgrad   dy 1x16, rounded stochastically, rotated · x 1x16, rotated

    Args:
        stochastic: True by default: gradients are rounded up or down at random, right on average. False rounds to
            nearest.
        rht: True by default: a random-sign Hadamard matrix rotates both operands of wgrad, which spreads outliers.
            False saves that work.
        square_weights: True by default: weights are scaled in 16x16 blocks, so that forward and backward multiply the
            same weight values. False scales 1x16 blocks along each contraction: finer scales, two sets of codes.

    Overrides of single GEMMs, which `octavo.recipes.Recipe` describes: fprop, dgrad, wgrad, backward.

    Raises:
        UnsupportedConfig: a setting has a value without a meaning.

    Example:
        >>> quant = octavo.recipes.NVFP4().linear()
        >>> quant.fprop.right, quant.wgrad.left
        (nv(square=True), nv(rht=True,stochastic=True))
    """

    stochastic: bool = True
    rht: bool = True
    square_weights: bool = True

    def gemms(self) -> LinearQuant:
        return LinearQuant.of(
            x=(NVFP4Quantizer(), NVFP4Quantizer(rht=self.rht)),
            w=(NVFP4Quantizer(square=self.square_weights),) * 2,
            dy=(
                NVFP4Quantizer(stochastic=self.stochastic),
                NVFP4Quantizer(rht=self.rht, stochastic=self.stochastic),
            ),
        )

    def validate(self) -> None:
        super().validate()
        for field in ("stochastic", "rht", "square_weights"):
            check_choice(getattr(self, field), (False, True), what=f"NVFP4.{field}")
