"""`weight.main_grad`: the buffer a training framework keeps for a weight's gradient, and dw added to it in place.

The protocol is the one Megatron and its relatives speak, with attributes of the parameter:

    main_grad                  the buffer, float32 or bfloat16, of the weight's size; looked up when backward runs
    get_main_grad()            called instead, where it exists: the buffer may be made at that moment
    overwrite_main_grad        True: dw replaces what is there (read at forward, so each microbatch keeps its own)
    grad_added_to_main_grad    where it exists it is set to True, and `.grad` receives zeros so that hooks fire
"""

from typing import Any

from torch import Tensor

from octavo.errors import UnsupportedConfig
from octavo.layers.linear import gradient_matrix


class MainGrad:
    """A weight's gradient buffer, found when it is opened."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def open(self, rows: int, columns: int) -> Tensor:
        """The buffer as [rows, columns], a view."""
        return gradient_matrix(_find(self.weight), rows, columns, self.weight.device)

    def close(self) -> None:
        if hasattr(self.weight, "grad_added_to_main_grad"):
            self.weight.grad_added_to_main_grad = True


def has_buffer(weight: Tensor) -> bool:
    """Whether a graph that is being traced will find one."""
    return hasattr(weight, "get_main_grad") or getattr(weight, "main_grad", None) is not None


def graph_buffer(weight: Any) -> Tensor:
    """The buffer, for a graph that is being traced: its address is the graph's from here on. The flag is set as early:
    a graph's backward cannot, and whoever reads it reads it after backward."""
    buffer: Tensor = weight.get_main_grad() if hasattr(weight, "get_main_grad") else weight.main_grad
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    return buffer


def _find(weight: Tensor) -> Tensor:
    getter = getattr(weight, "get_main_grad", None)
    buffer = getter() if getter is not None else getattr(weight, "main_grad", None)
    if not isinstance(buffer, Tensor):
        where = "get_main_grad()" if getter is not None else "main_grad"
        raise UnsupportedConfig(
            f"fuse_wgrad_accumulation=True adds dw to weight.{where}, which is {type(buffer).__name__} for a weight of "
            f"{tuple(weight.shape)}. Set weight.main_grad = torch.zeros_like(weight, dtype=torch.float32) before "
            "backward, or build the layer without fuse_wgrad_accumulation."
        )
    return buffer
