"""bf16: nothing is quantized; operands keep their own dtype. The baseline every other recipe is measured against."""

from octavo.recipes.recipe import GemmQuant, LinearQuant, Recipe
from octavo.values import register


@register("bf16")
class BF16(Recipe):
    """High precision throughout."""

    def gemms(self) -> LinearQuant:
        plain = GemmQuant(mode="high_precision")
        return LinearQuant(plain, plain, plain)

    def linear(self) -> LinearQuant:
        return self.gemms()
