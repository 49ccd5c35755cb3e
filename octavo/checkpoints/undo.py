"""Put a run back as it was, after a load that failed halfway: a hook of the model or of the optimizer may raise."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from octavo.checkpoints import optimizer_state, random_state
from octavo.model.layer_lookup import layers
from octavo.model.state_dicts import Load, write_state
from octavo.weights.quantized_weight import QuantizedWeight


def undo(model: nn.Module, optimizer: Any) -> Callable[[], None]:
    """Return a function that restores a model, an optimizer and the generators of random numbers. It keeps copies of
    the model's tensors on the CPU. Of the optimizer it keeps the tensors: loading makes new ones."""
    tensors = {id(tensor): tensor for tensor in _tensors(model)}.values()
    copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    recipe = [Load(path, layer, layer._recipe_state() | layer._pending_state()) for path, layer in layers(model)]
    set_generators = random_state.restorer(Path(), random_state.export())
    own = None if optimizer is None else optimizer_state.inner(optimizer)
    kept = {} if own is None else {"state": own.state, "param_groups": own.param_groups}

    def restore() -> None:
        for tensor, copy in copies:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(copy)
        write_state(recipe)
        set_generators()
        for name, value in kept.items():
            setattr(own, name, value)

    return restore


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a model, and the codes of weights that are stored as codes."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, QuantizedWeight):
            yield from tensor.tensors().values()
        elif not is_lazy(tensor) and not tensor.is_meta:
            yield tensor
