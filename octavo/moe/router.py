"""`octavo.moe.Router`: the linear layer that computes logits of experts in float32."""

import torch
from torch import Tensor, nn

from octavo._torch.dispatcher import has_transforms
from octavo._torch.fakes import FakeTensor
from octavo.errors import check_whole
from octavo.moe.router_logits_layer import product
from octavo.ops.inputs import arrived, check_features, check_input, wanted_gradients
from octavo.runtime.call import Stage, call, takes_nodes
from octavo.runtime.contract import DTYPE_NAMES


class Router(nn.Linear):
    """A linear layer without bias whose product runs in float32, whatever the dtypes of x and of its weight are.

    Experts are chosen by small differences of logits, which 16 bits would round away. No recipe quantizes the layer,
    `torch.autocast` does not apply to it, and `octavo.convert` leaves it as it is. Backward keeps x in its own dtype.
    A GPU multiplies a bfloat16 x and weight on its tensor cores, where their products are exact; other dtypes take a
    float32 product, in TF32 where `torch.set_float32_matmul_precision` allows that. A second derivative, and a batch of
    gradients (`is_grads_batched=True`), need x and the weight in float32.

    Args:
        in_features: the size of the last dim of x.
        out_features: the number of experts.
        device: the device of the weight.
        dtype: the dtype of the weight.

    Raises:
        UnsupportedConfig: a number of features is none from 1 up.

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
        check_whole(in_features, what="in_features")
        check_whole(out_features, what="out_features")
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits of each token.

        Args:
            input: x [..., in_features], in float32, bfloat16 or float16.

        Returns:
            The logits [..., out_features] in float32.

        Raises:
            UnsupportedShape: x has another number of features.
            UnsupportedDtype: x or the weight has another dtype.
            UnsupportedDevice: x and the weight are on two devices.
        """
        x = arrived(input)
        check_input("Router", x, owner=self)
        weight: Tensor = self.weight
        check_features(x, weight, "Router")
        # `product` leaves autocast for forward alone: the compiler traces the backward of torch's own product under the
        # caller's autocast, in 16 bits; that of a node stays in float32
        kind = x.device.type
        casts = torch.compiler.is_compiling() and kind != "meta" and torch.is_autocast_enabled(kind)
        plain = x.dtype == weight.dtype == torch.float32 and not casts
        # float32: autograd makes no other copies; torch.func and torch.jit.trace know operators of torch alone
        if plain or has_transforms() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return product(x.float(), weight.float())
        dx, dw = wanted_gradients(x.requires_grad, weight)
        dtypes = f"dtype='{DTYPE_NAMES[x.dtype]}',weight_dtype='{DTYPE_NAMES[weight.dtype]}'"
        key = f"router-logits({dtypes},wants_dx={dx},wants_dw={dw})"
        stage = Stage("router-logits", key, (weight,), (), dx or dw, self.out_features)
        return call(stage, x, takes_nodes() or isinstance(x, FakeTensor) or x.is_meta)[0]
