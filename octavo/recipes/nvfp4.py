"""nvfp4: four bits. Weights are scaled in 16x16 blocks and activations in 1x16, gradients are rounded stochastically,
and the operands of the weight gradient are multiplied by a random-sign Hadamard matrix.

The published recipe keeps about one linear layer in six, in the first and the last blocks, in bf16: use a policy.
"""

from octavo.errors import check_choice
from octavo.quant import NVFP4 as NVFP4Quantizer
from octavo.recipes.recipe import LinearQuant, Recipe
from octavo.values import register


@register("nvfp4")
class NVFP4(Recipe):
    """E2M1 codes, two-level scales."""

    stochastic: bool = True  # round gradients stochastically
    rht: bool = True  # Hadamard transform of both operands of wgrad
    square_weights: bool = True
    fprop: str = "quantized"
    dgrad: str = "quantized"
    wgrad: str = "quantized"
    backward: str = "quantized"

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
