"""Octavo's layers in a model, by their paths."""

import weakref
from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

from octavo.errors import Unsupported, UnsupportedConfig, UnsupportedDtype
from octavo.ops.quantized import Quantized
from octavo.values import excerpt


def check_model(
    model: object,
    function: str,
    other: object = None,
    error: type[Unsupported] = UnsupportedDtype,
    place: str = "first",
) -> None:
    """Raise if the argument `model` of a public function is no module. `other` is the argument that a caller may have
    swapped it with, and `place` says where the model belongs."""
    if isinstance(model, nn.Module):
        return
    where = "" if other is None else f" {place}"
    raise error(
        f"octavo.{function} takes a model (an nn.Module){where}, got {_kind(model)}. {_way_to_a_model(model, other)}"
    )


def alive(model: "weakref.ref[nn.Module]", function: str) -> nn.Module:
    """Return the model of a block, which has a weak reference to it. Raise if it was deleted."""
    found = model()
    if found is None:
        raise UnsupportedConfig(
            f"octavo.{function} keeps no model alive, and the one of this block was deleted. Keep it in a variable."
        )
    return found


def _kind(found: object) -> str:
    if found is None or isinstance(found, str):
        return "None" if found is None else f"the string {excerpt(repr(found))}"
    return f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__


def _way_to_a_model(found: object, second: object) -> str:
    if isinstance(second, nn.Module):
        return "Swap the arguments."
    if isinstance(found, Optimizer):
        return "Pass the model that it trains."
    if isinstance(found, type) and issubclass(found, nn.Module):
        return "Pass an instance of it."
    if isinstance(found, (list, tuple)) and found and all(isinstance(each, nn.Module) for each in found):
        return "Call it for each module, or pass nn.ModuleList(modules)."
    return "Pass the module that holds the layers."


def layers(model: nn.Module) -> Iterator[tuple[str, Quantized]]:
    """Yield (path, layer) for every layer of Octavo's, each once."""
    for path, module in model.named_modules():
        if isinstance(module, Quantized):
            yield path, module


def refuse_parts(model: nn.Module, function: str, way_out: str) -> None:
    """Raise if a layer's weight is split over ranks: this process has a part of it."""
    for path, layer in layers(model):
        parallel = layer._split_over_ranks()
        if parallel is not None:
            raise UnsupportedConfig(
                f"octavo.{function} needs whole weights, and {path or 'the model'} is split over {parallel.size()} "
                f"ranks (parallel_mode={parallel.mode!r}). {way_out}"
            )


def joined(path: str, name: str) -> str:
    """Return the name in the model of a tensor that the layer at `path` has by `name`."""
    return f"{path}.{name}" if path else name
