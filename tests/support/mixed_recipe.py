"""A user's recipe of two schemes: a scale for each block of 128 in forward, and two-level scales in backward."""

from octavo.quant import NVFP4, Block1D, Block2D
from octavo.recipes import LinearQuant, Recipe, register

MIXED = "mixed-blocks"


@register(MIXED)
class MixedBlocks(Recipe):
    """fprop in blocks of 128, dgrad and wgrad in NVFP4."""

    def gemms(self) -> LinearQuant:
        return LinearQuant.of(x=(Block1D(), NVFP4()), w=(Block2D(), NVFP4(square=True)), dy=(NVFP4(), NVFP4()))
