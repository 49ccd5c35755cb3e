"""`Quantize`: an operation whose output is a quantized tensor."""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.ambient import ambient
from octavo.fuser.inputs import check_input
from octavo.fuser.operation import FusibleOperation
from octavo.lower.call import Stage, call, takes_nodes
from octavo.quant import QTensor
from octavo.quant.qtensor import Join
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve


class Quantize(FusibleOperation, nn.Module):
    """Quantizes x as a Linear's fprop would, by its own recipe or else by `octavo.autocast`'s. Without a recipe or with
    one that does not quantize x, it returns x. With `backward` it also rounds the gradient as dgrad would round dy, and
    returns the gradient as values: codes of a gradient exist only inside a run.

    A Linear that takes these codes multiplies them, and keeps them for dW. A run needs no Quantize: there the operation
    that computes x casts it for the Linear that follows."""

    def __init__(self, forward: bool = True, backward: bool = False, recipe: str | Recipe | None = None) -> None:
        super().__init__()
        self.quantize_forward, self.quantize_backward = forward, backward
        self.recipe = None if recipe is None else resolve(recipe)

    def forward(self, input: Tensor | QTensor) -> Tensor | QTensor:
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
        draws = needs and back is not None and back.draws
        seed = torch.randint(0, 2**62, (2,), device=x.device) if draws else None
        key = (
            f"rounding(spec={'None' if spec is None else spec.key},"
            f"back={'None' if back is None or not needs else back.key},grads='{'x' if needs else ''}')"
        )
        token, *parts = call(Stage("rounding", key, (seed,), (), needs), x, takes_nodes())
        if spec is None:
            found: Tensor = Join.apply(x.detach(), token)  # type: ignore[no-untyped-call]
            return found
        q = spec.assemble(parts, tuple(x.shape), x.dtype)
        return QTensor(q.codes, q.scale, spec, q.shape, q.dtype, q.global_scale, token=token if needs else None)

    def why_not_fusible(self, x: Any) -> str:
        return "its codes are a value of their own"

    def extra_repr(self) -> str:
        return f"forward={self.quantize_forward}, backward={self.quantize_backward}, recipe={self.recipe}"
