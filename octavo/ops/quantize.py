"""`Quantize`: an operation whose output is a quantized tensor."""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.ops.inputs import check_input
from octavo.ops.operation import FusibleOperation
from octavo.ops.settings import Settings
from octavo.quant import QTensor
from octavo.quant.qtensor import Join
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve
from octavo.recipes.ambient import ambient
from octavo.runtime.call import Stage, call, takes_nodes


class Quantize(FusibleOperation, Settings, nn.Module):
    """Quantize x as the fprop of a Linear would: y is a QTensor.

    A Linear of the same recipe multiplies these codes as they are and keeps them for dw, so that two Linears can share
    one cast. The scale follows from x itself, in fp8-delayed too. A run of a Sequential needs no Quantize: there the
    operation that computes x casts it for the Linear that follows.

    Args:
        forward: True by default. False returns x's values unquantized.
        backward: False by default. True rounds the gradient as dgrad would round dy; the gradient stays a tensor of
            values.
        recipe: a recipe or its string. None, the default, follows `octavo.autocast`; without one, or with one that
            does not quantize, y is x.

    Raises:
        UnsupportedConfig: there is no such recipe.

    Example:
        >>> x = torch.randn(4, 32)
        >>> octavo.ops.Quantize(recipe="fp8-current")(x)
        QTensor(4x32, tensorwise, cpu)
        >>> octavo.Linear(32, 64, recipe="fp8-current")(octavo.ops.Quantize(recipe="fp8-current")(x)).shape
        torch.Size([4, 64])
    """

    op_is_elementwise = True
    _setting_names = ("recipe",)

    def __init__(self, forward: bool = True, backward: bool = False, recipe: str | Recipe | None = None) -> None:
        super().__init__()
        self.quantize_forward, self.quantize_backward = forward, backward
        self.recipe: Recipe | None = recipe  # type: ignore[assignment]

    def _checked_setting(self, name: str, value: Any) -> Recipe | None:
        return None if value is None else resolve(value)

    def forward(self, input: Tensor | QTensor) -> Tensor | QTensor:
        """Return the codes of x.

        Args:
            input: x, in float32, bfloat16 or float16. A QTensor is returned as it is.

        Returns:
            A QTensor; x itself where nothing is quantized. Gradients pass through the cast.

        Raises:
            UnsupportedDtype: x has another dtype.
        """
        x = input
        recipe = self.recipe or ambient.recipe
        if recipe is None:
            return x
        quant = recipe.linear()
        spec = quant.fprop.left if self.quantize_forward else None
        back = quant.dgrad.left if self.quantize_backward else None
        if isinstance(x, QTensor) or (spec is None and back is None):
            return x
        check_input("Quantize", x)
        needs = x.requires_grad and torch.is_grad_enabled()
        if spec is None and not needs:
            return x
        is_stochastic = needs and back is not None and back.is_stochastic
        seed = torch.randint(0, 2**62, (2,), device=x.device, dtype=torch.int64) if is_stochastic else None
        key = (
            f"rounding(spec={'None' if spec is None else spec.key},"
            f"back={'None' if back is None or not needs else back.key},wants_dx={needs})"
        )
        anchor, *parts = call(Stage("rounding", key, (seed,), (), needs), x, takes_nodes())
        if spec is None:
            return Join.apply(x.detach(), anchor)  # type: ignore[no-untyped-call]
        q = spec.assemble(parts, tuple(x.shape), x.dtype)
        return QTensor(q.codes, q.scale, spec, q.shape, q.dtype, q.global_scale, anchor=anchor if needs else None)

    def why_not_fusible(self, x: Any) -> str:
        return "its codes are a value of their own"

    def extra_repr(self) -> str:
        return f"forward={self.quantize_forward}, backward={self.quantize_backward}, recipe={self.recipe}"
