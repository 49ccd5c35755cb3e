"""Recipes: which quantizer each operand of fprop, dgrad and wgrad uses. A file each; a new one is one more file.

    octavo.recipe("fp8-block")                       by name
    octavo.recipe("fp8-block(scale='fp32')")         by canonical string
    octavo.recipes.Block(scale="fp32")               by class

The last two spell the same value.
"""

from octavo import values
from octavo.errors import UnsupportedConfig
from octavo.recipes.bf16 import BF16
from octavo.recipes.block import Block
from octavo.recipes.current import Current
from octavo.recipes.delayed import Delayed
from octavo.recipes.mxfp8 import MXFP8
from octavo.recipes.nvfp4 import NVFP4
from octavo.recipes.recipe import LONGEST, GemmQuant, LinearQuant, Recipe, check_length
from octavo.recipes.rowwise import Rowwise
from octavo.values import register

__all__ = [
    "BF16",
    "LONGEST",
    "MXFP8",
    "NVFP4",
    "SHIPPED",
    "Block",
    "Current",
    "Delayed",
    "GemmQuant",
    "LinearQuant",
    "Recipe",
    "Rowwise",
    "recipe",
    "register",
]


SHIPPED = ("bf16", "fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")


def recipe(spec: str | Recipe) -> Recipe:
    """The recipe of that name or canonical string; a Recipe is returned as it is."""
    if isinstance(spec, Recipe):
        return spec
    if not isinstance(spec, str):
        raise UnsupportedConfig(
            f"A recipe is a name, a canonical string or a Recipe, got {type(spec).__name__}. Names: {_names()}."
        )
    check_length(spec)
    if spec.partition("(")[0].strip() not in values.names(Recipe):
        raise UnsupportedConfig(f"There is no recipe {values.shown(spec)!r}. Names: {_names()}.")
    found = values.parse(spec)
    assert isinstance(found, Recipe)
    return found


def _names() -> str:
    return ", ".join(values.names(Recipe))
