"""bf16: no quantization; operands keep their own dtype. The baseline against which other recipes are measured."""

from octavo.recipes.recipe import GemmQuant, LinearQuant, Recipe
from octavo.values import register


@register("bf16")
class BF16(Recipe):
    """`bf16`: quantizes nothing. All three GEMMs multiply the operands in their own precision.

    Use it as the baseline against which other recipes are measured, and in a policy for layers that shall stay
    unquantized. It has no settings.

    Example:
        >>> octavo.recipes.BF16().linear().fprop.mode
        'high_precision'
        >>> report = octavo.convert(nn.Sequential(nn.Linear(32, 32)), octavo.recipes.BF16())
    """

    def gemms(self) -> LinearQuant:
        plain = GemmQuant(mode="high_precision")
        return LinearQuant(plain, plain, plain)
