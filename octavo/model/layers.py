"""Octavo's layers in a model, by their paths."""

from collections.abc import Iterator

from torch import nn

from octavo.modules.quantized import Quantized


def layers(model: nn.Module) -> Iterator[tuple[str, Quantized]]:
    """Yields (path, layer) for every layer of Octavo's, each once."""
    for path, module in model.named_modules():
        if isinstance(module, Quantized):
            yield path, module


def joined(path: str, name: str) -> str:
    """Returns the name in the model of a tensor that the layer at `path` has by `name`."""
    return f"{path}.{name}" if path else name
