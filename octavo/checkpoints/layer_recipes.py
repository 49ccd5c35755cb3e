"""The recipe of each layer of a model, as a checkpoint names them, and the comparison with a model that loads it."""

from collections.abc import Mapping

from torch import nn

from octavo._torch.modules import plain_name
from octavo.errors import UnsupportedConfig
from octavo.model.layer_lookup import layers
from octavo.text import plural

Recipes = Mapping[str, str]  # canonical strings, by the paths of the layers that have a recipe of their own


def export(model: nn.Module) -> dict[str, str]:
    """Return the recipes of a model's layers. A layer that follows `octavo.autocast`, or is torch's own, has none."""
    return {plain_name(path): str(layer.recipe) for path, layer in layers(model) if layer.recipe is not None}


def check(saved: Recipes, model: nn.Module) -> None:
    """Raise if a layer of the model has another recipe than the checkpoint, and name the first one."""
    own = export(model)
    different = [path for path in {**saved, **own} if saved.get(path) != own.get(path)]
    if not different:
        return
    path = different[0]
    more = len(different) - 1
    others = f"; {plural(more, 'more layer')} differ{'s' * (more == 1)} too" if more else ""
    title = repr(path) if path else "The model"
    raise UnsupportedConfig(
        f"{title} was saved {_in(saved.get(path))}, and is {_in(own.get(path))} in this model{others}. "
        f"{_way_out(saved, model)}"
    )


def _way_out(saved: Recipes, model: nn.Module) -> str:
    if not saved:
        return "The checkpoint is of layers without recipes: load it first, and call octavo.convert then."
    way = "Convert the model with the recipes of the checkpoint, and load it."
    if any(layer._schedule is not None for _, layer in layers(model)):
        way += " A policy that changes recipes takes the number of steps: octavo.convert(model, policy, step=N)."
    return f"{way} To go on in other recipes, call octavo.revert(model) after that, and convert again."


def _in(recipe: str | None) -> str:
    return "without a recipe" if recipe is None else f"in {recipe}"
