"""Recipes: each chooses a quantizer for every operand of fprop, dgrad and wgrad. Each recipe has its own file.

    octavo.recipe("fp8-block")                       by name
    octavo.recipe("fp8-block(scale='fp32')")         by canonical string
    octavo.recipes.Block(scale="fp32")               by class

The last two give equal values.

    recipe              Recipe: three GEMMs of two quantizers each, and the overrides that every recipe takes
    ambient             octavo.autocast, microbatch and dry_run: what a block of a program sets for layers in it
    amax_algorithms     how a window of amaxes becomes one, by name
    bf16                no quantization
    block               blocks of 128
    current             one scale, from the tensor itself
    delayed             one scale, from earlier steps
    mxfp8               blocks of 32, a power of two each
    nvfp4               four bits
    rowwise             a scale for each row

This room may import rooms up to `kernels`.
"""

from octavo import values
from octavo.errors import UnsupportedConfig, nearest
from octavo.foreign_keywords import recipe_named
from octavo.recipes.bf16 import BF16
from octavo.recipes.block import Block
from octavo.recipes.current import Current
from octavo.recipes.delayed import Delayed
from octavo.recipes.mxfp8 import MXFP8
from octavo.recipes.nvfp4 import NVFP4
from octavo.recipes.recipe import LONGEST as LONGEST
from octavo.recipes.recipe import GemmQuant, LinearQuant, Recipe, check_length
from octavo.recipes.rowwise import Rowwise
from octavo.values import register

__all__ = [
    "BF16",
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


def __dir__() -> list[str]:
    return __all__


SHIPPED: tuple[str, ...] = (
    "bf16",
    "fp8-delayed",
    "fp8-current",
    "fp8-rowwise",
    "fp8-block",
    "mxfp8",
    "nvfp4",
)
"""The names of Octavo's own recipes."""


def recipe(spec: str | Recipe) -> Recipe:
    """Return the recipe of a name or of a canonical string.

    Args:
        spec: a name ("fp8-current"), a canonical string with settings ("fp8-block(wgrad='bf16')"), or a `Recipe`, which
            is returned as it is. `octavo.recipes.SHIPPED` lists the names.

    Returns:
        The recipe, a value: equal settings are equal recipes, and `octavo.recipe(str(r)) == r`.

    Raises:
        UnsupportedConfig: no recipe has this name, a setting has a value that it does not take, or `spec` is neither a
            string nor a `Recipe`.
        UnknownSetting: the recipe has no setting of this name.

    Example:
        >>> octavo.recipe("fp8-block(wgrad='bf16')") == octavo.recipes.Block(wgrad="bf16")
        True
        >>> "fp8-block" in octavo.recipes.SHIPPED
        True
    """
    if isinstance(spec, Recipe):
        return spec
    if not isinstance(spec, str):
        found = f"{type(spec).__name__}"
        hint = recipe_named(found)
        if isinstance(spec, type) and issubclass(spec, Recipe):
            found, hint = f"type {spec.__name__}, a class", f" Make one of it: {spec.__name__}()."
        raise UnsupportedConfig(
            f"A recipe is a name, a canonical string or a Recipe, got {found}.{hint} Names: {_names()}."
        )
    check_length(spec)
    name = spec.partition("(")[0].strip()
    if name not in values.names(Recipe):
        near = recipe_named(name) or nearest(name, values.names(Recipe))
        raise UnsupportedConfig(f"There is no recipe {values.excerpt(spec)!r}. Names: {_names()}.{near}")
    made = values.parse(spec)
    assert isinstance(made, Recipe)
    return made


def _names() -> str:
    return ", ".join(values.names(Recipe))
