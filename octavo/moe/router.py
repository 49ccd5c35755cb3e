"""`octavo.moe.Router`: the linear layer that computes logits of experts in float32."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.fuser.inputs import arrived, check_input


class Router(nn.Linear):
    """A linear layer without bias whose product runs in float32, whatever the dtypes of x and of its weight are.

    Experts are chosen by small differences of logits, which 16 bits would round away. No recipe quantizes the layer,
    `torch.autocast` does not apply to it, and `octavo.convert` leaves it as it is. Backward keeps x in its own dtype.
    Where `torch.set_float32_matmul_precision` allows TF32, a GPU uses it here too.

    Args:
        in_features: the size of the last dim of x.
        out_features: the number of experts.
        device: the device of the weight.
        dtype: the dtype of the weight.

    Example:
        >>> router = octavo.moe.Router(64, 8, dtype=torch.bfloat16)
        >>> router(torch.ones(10, 64, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the logits of each token.

        Args:
            input: x [..., in_features], in float32, bfloat16 or float16.

        Returns:
            The logits [..., out_features] in float32.

        Raises:
            UnsupportedDtype: x has another dtype.
        """
        x = arrived(input)
        check_input("Router", x)
        # a graph's partitioner saves x itself, and tracing a Function may give wrong gradients
        if torch.compiler.is_compiling() or x.dtype == torch.float32:
            return _product(x, self.weight)
        logits: Tensor = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return logits


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x · weightᵀ in float32."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return F.linear(x.float(), weight.float())
    return F.linear(x.float(), weight.float())


class _Product(torch.autograd.Function):
    """The product, with x saved in its own dtype: autograd would save it in float32."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return _product(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _product(dy, weight.T).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = _product(dy.reshape(-1, dy.shape[-1]).T, x.reshape(-1, x.shape[-1]).T).to(weight.dtype)
        return dx, dw
