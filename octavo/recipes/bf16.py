"""bf16: quantizes nothing; operands keep their own dtype. The baseline against which other recipes are measured."""

from octavo.recipes.recipe import GemmQuant, LinearQuant, Recipe
from octavo.values import register


@register("bf16")
class BF16(Recipe):
    """All three GEMMs in high precision."""

    def gemms(self) -> LinearQuant:
        plain = GemmQuant(mode="high_precision")
        return LinearQuant(plain, plain, plain)

    def linear(self) -> LinearQuant:
        return self.gemms()
