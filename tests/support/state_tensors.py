"""The tensors that layers keep as state of their recipes, which are not among a module's buffers; and odd tensors."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from octavo.ops.quantized import Quantized


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for all of a model, as `named_buffers` does for buffers."""
    for path, module in model.named_modules():
        if isinstance(module, Quantized):
            for name, tensor in module._hidden._buffers.items():
                yield f"{path}.{name}" if path else name, tensor


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for buffers and state."""
    yield from model.named_buffers()
    yield from named_state(model)


def state_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors of `named_state`."""
    return [tensor for _, tensor in named_state(model)]


def made_in_inference_mode(*shape: int) -> Tensor:
    """Zeros that autograd may not track."""
    with torch.inference_mode():
        return torch.zeros(*shape)
