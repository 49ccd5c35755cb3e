"""`weight.main_grad`: the buffer a training framework keeps for a weight's gradient, and dw added to it in place.

The protocol is the one Megatron and its relatives speak, with attributes of the parameter:

    main_grad                  the buffer, float32 or bfloat16, of the weight's size; looked up when backward runs
    get_main_grad()            called instead, where it exists: the buffer may be made at that moment
    overwrite_main_grad        True: dw replaces what is there (read at forward, so each microbatch keeps its own)
    grad_added_to_main_grad    where it exists it is set to True, and `.grad` receives zeros so that hooks fire
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo._torch.tensors import is_sharded
from octavo._torch.tracing import while_tracing
from octavo.errors import UnsupportedConfig
from octavo.runtime.gradient_targets import LazyTarget, Target, nothing


class MainGrad(LazyTarget):
    """The gradient buffers of a weight, or of the weights it consists of."""

    def __init__(self, weights: Sequence[Any], mode: str) -> None:
        self.weights, self.mode = weights, mode
        self.device = weights[0].device  # dw's, if the weights have been moved by the time of backward

    def find(self) -> Target:
        return Target(_main_grads(self.weights, self.device), self.mode)

    def is_there(self) -> bool:
        return not any([hasattr(w, "get_main_grad") for w in self.weights if w.requires_grad])

    def done(self) -> None:
        _say_added(self.weights)


def _say_added(weights: Sequence[Any]) -> None:
    for weight in weights:
        if weight.requires_grad and hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True


def has_buffer(weights: Sequence[Any]) -> bool:
    """Return whether the graph being traced will find a gradient buffer for each weight that is trained."""
    for weight in weights:
        has = hasattr(weight, "get_main_grad") or getattr(weight, "main_grad", None) is not None
        if weight.requires_grad and not has:
            return False
    return True


def graph_buffers(weights: Sequence[Any]) -> list[Tensor]:
    """Return the buffers, for a graph that is being traced: their addresses are the graph's from here on. This also
    sets the flag `grad_added_to_main_grad`: a graph's backward cannot, and its readers read it after backward."""
    found = _main_grads(weights, weights[0].device)
    _say_added(weights)
    return found


def _main_grads(weights: Sequence[Any], device: torch.device) -> list[Tensor]:
    return [_find(weight, device) if weight.requires_grad else nothing(device) for weight in weights]


def _find(weight: Any, device: torch.device) -> Tensor:
    getter = getattr(weight, "get_main_grad", None)
    buffer: Any = getter() if getter is not None else getattr(weight, "main_grad", None)
    if not isinstance(buffer, Tensor):
        why = "None" if buffer is None else f"a {type(buffer).__name__}"
    elif buffer.device != device:
        why = f"on {buffer.device}, where its weight is on {device},"
    else:
        why = _unwritable(buffer)
    if why:
        where = "get_main_grad()" if getter is not None else "main_grad"
        raise UnsupportedConfig(
            f"fuse_wgrad_accumulation=True adds dw to the tensor weight.{where}, which is {why} for this weight of "
            f"{tuple(weight.shape)}. Set weight.main_grad = torch.zeros_like(weight, dtype=torch.float32) before "
            "backward, or build the layer without fuse_wgrad_accumulation."
        )
    found: Tensor = buffer
    return found


@while_tracing
def _unwritable(buffer: Tensor) -> str:
    if buffer.is_inference():
        return "a tensor made in torch.inference_mode(), which backward cannot write to,"
    if is_sharded(buffer):
        return "a DTensor"
    if buffer.is_nested or buffer.layout is not torch.strided:
        return "a nested tensor" if buffer.is_nested else f"a tensor of layout {buffer.layout}"
    return ""
