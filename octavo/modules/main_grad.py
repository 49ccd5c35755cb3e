"""`weight.main_grad`: the buffer a training framework keeps for a weight's gradient, and dw added to it in place.

The protocol is the one Megatron and its relatives speak, with attributes of the parameter:

    main_grad                  the buffer, float32 or bfloat16, of the weight's size; looked up when backward runs
    get_main_grad()            called instead, where it exists: the buffer may be made at that moment
    overwrite_main_grad        True: dw replaces what is there (read at forward, so each microbatch keeps its own)
    grad_added_to_main_grad    where it exists it is set to True, and `.grad` receives zeros so that hooks fire
"""

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape


class MainGrad:
    """A weight's gradient buffer, found when it is opened."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def open(self, rows: int, columns: int) -> Tensor:
        """The buffer as [rows, columns], a view."""
        return _as_matrix(_find(self.weight), rows, columns, self.weight.device)

    def close(self) -> None:
        if hasattr(self.weight, "grad_added_to_main_grad"):
            self.weight.grad_added_to_main_grad = True


def graph_buffer(weight: Tensor) -> Tensor:
    """The buffer, for a graph that is being traced: it must be there already, and no attribute is set later."""
    if (
        not hasattr(weight, "main_grad")
        or hasattr(weight, "get_main_grad")
        or hasattr(weight, "grad_added_to_main_grad")
    ):
        raise UnsupportedConfig(
            "Under torch.compile, fuse_wgrad_accumulation needs weight.main_grad before forward, and weights without "
            "get_main_grad and grad_added_to_main_grad, which a graph cannot call or set. Run the layer in eager mode."
        )
    buffer: Tensor = weight.main_grad
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


def _as_matrix(buffer: Tensor, rows: int, columns: int, device: torch.device) -> Tensor:
    found = f"{buffer.dtype} {tuple(buffer.shape)} with strides {buffer.stride()} on {buffer.device}"
    if buffer.dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedDtype(f"weight.main_grad must be float32 or bfloat16, got {found}.")
    if buffer.device != device or buffer.numel() != rows * columns:
        raise UnsupportedShape(
            f"weight.main_grad must hold {rows} x {columns} = {rows * columns} elements on {device}, got {found}."
        )
    try:
        overlaps = any(n > 1 and step == 0 for n, step in zip(buffer.shape, buffer.stride(), strict=True))
        matrix = None if overlaps else buffer.detach().view(rows, columns)
    except RuntimeError:
        matrix = None
    if matrix is None:
        raise UnsupportedShape(
            f"weight.main_grad must be viewable as {(rows, columns)}, so that dw lands in it and not in a copy; got "
            f"{found}. Make it contiguous."
        )
    return matrix
