"""`octavo.refresh_weights` and `octavo.quantize_weights`: refresh a model's cached codes, or keep only codes."""

from collections.abc import Iterable

from torch import nn

from octavo.errors import UnsupportedConfig
from octavo.model.layers import joined, layers
from octavo.modules.quantized import Quantized


def refresh_weights(model: nn.Module) -> None:
    """Quantizes every cached weight again, in place. Call it after the optimizer has changed the weights."""
    refresh_layers([module for _, module in layers(model)])


def refresh_layers(modules: Iterable[Quantized]) -> None:
    """Does the same as `refresh_weights`, for the given layers."""
    for module in modules:
        stored = module._codes
        if stored.recipe is not None and not stored.held:
            observe = stored.recipe.stateful and module.training
            stored.refresh(module, stored.recipe, column=False, observe=observe)


def quantize_weights(model: nn.Module) -> None:
    """Keeps the weights only as codes, in both orientations. No optimizer may update them: a step on one raises. The
    parameters read as the dequantized values, and quantize the values that are written to them."""
    quantized = [
        (path, module)
        for path, module in layers(model)
        if module.recipe is not None and module.recipe.linear().fprop.right is not None
    ]
    if not quantized:
        raise UnsupportedConfig(
            "quantize_weights found no layer whose own recipe quantizes. Call octavo.convert(model, recipe) first."
        )
    names = _names_of_parameters(model)
    for path, module in quantized:
        module.check_holdable()
        for weight in module.weight_parts():
            _refuse_tied(path, names[id(weight)])
    for _, module in quantized:
        module.hold_codes()


def _names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Returns all names that each parameter has in the model, by its id."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            names.setdefault(id(parameter), []).append(joined(path, name))
    return names


def _refuse_tied(path: str, names: list[str]) -> None:
    """Raises if a weight of the layer at `path` has several names."""
    if len(names) > 1:
        first, *others = sorted(names, key=lambda name: not name.startswith(path))
        raise UnsupportedConfig(
            f"{first} is also {', '.join(others)}, which would go on with a weight of its own. Untie them, or "
            "convert that layer with recipe bf16."
        )
