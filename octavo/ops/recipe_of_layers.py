"""The recipe of a block: that of the layers in it."""

from typing import Any

from octavo.ops.quantized import Quantized
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve


class RecipeOfLayers:
    """Mixin for modules with a keyword `recipe` for the layers in them, which keep it."""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the layers in this block; None if they follow `octavo.autocast`. Set it to give all of them
        another one. A block whose layers have different recipes has none: read those of the layers."""
        found = {layer.recipe for layer in _layers(self)}
        if len(found) != 1:
            raise AttributeError(f"The layers of {type(self).__name__} have {len(found)} different recipes.")
        return found.pop()

    @recipe.setter
    def recipe(self, spec: str | Recipe | None) -> None:
        recipe, layers = None if spec is None else resolve(spec), _layers(self)
        before = [layer.recipe for layer in layers]
        try:
            for layer in layers:
                layer.recipe = recipe  # type: ignore[assignment]
        except Exception:  # of a layer that cannot run in it: those before it keep theirs
            for layer, old in zip(layers, before, strict=True):
                if layer.recipe != old:
                    layer.recipe = old
            raise


def _layers(block: Any) -> list[Quantized]:
    return [module for module in block.modules() if isinstance(module, Quantized)]
