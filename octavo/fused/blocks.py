"""LayerNormLinear and LayerNormMLP, two blocks of a transformer: Sequentials that require their fusions."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.utils.checkpoint import checkpoint

from octavo.ambient import ambient, autocast
from octavo.errors import check_choice
from octavo.fused import conditions
from octavo.fuser.inputs import refuse_symbol
from octavo.fuser.runs import RECAST
from octavo.fuser.sequential import Sequential
from octavo.kernels.activation import ACTIVATIONS
from octavo.modules import activation as activations
from octavo.modules.linear import Linear
from octavo.modules.norm import LayerNorm, RMSNorm
from octavo.recipes import Recipe

NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
KINDS: dict[str, Any] = {
    kind.NAME: kind
    for kind in vars(activations).values()
    if isinstance(kind, type) and issubclass(kind, activations.Activation) and "NAME" in kind.__dict__
    and kind.NAME != "linear"
}  # fmt: skip


def _norm(kind: str, size: int, eps: float, zero_centered: bool, device: Any, dtype: Any) -> Any:
    check_choice(kind, tuple(NORMS), what="normalization")
    return NORMS[kind](size, eps=eps, zero_centered_gamma=zero_centered, device=device, dtype=dtype)


class _Block(Sequential):
    """A Sequential that requires its fusions if the recipe quantizes."""

    _allowed_refusals = (*Sequential._allowed_refusals, conditions.QUANTIZED, RECAST)
    _way_out = "A plain octavo.Sequential of the same modules runs without it."


class LayerNormLinear(_Block):
    """A norm and a Linear. If the recipe quantizes, the norm writes the Linear's codes; a call in which it cannot
    raises an error that says why."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        recipe: str | Recipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        norm = _norm(normalization, in_features, eps, zero_centered_gamma, device, dtype)
        linear = Linear(in_features, out_features, bias, device, dtype, recipe=recipe, **settings)
        super().__init__({"norm": norm, "linear": linear}, require="norm-linear")


class LayerNormMLP(_Block):
    """A norm, a Linear, an activation and a Linear. If the recipe quantizes, the norm and the activation write the
    Linears' codes; a call in which one cannot raises an error that says why. Both Linears take `settings`.

    keep_weight_codes        as in Linear, but the default is False: the weights' codes are not kept for backward
    activation_recompute     only x is saved for backward, which runs forward again
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        zero_centered_gamma: bool = False,
        recipe: str | Recipe | None = None,
        activation_recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        check_choice(activation, tuple(KINDS), what="activation")
        settings = {"keep_weight_codes": False, **settings}
        wide = ffn_hidden_size * (2 if ACTIVATIONS[activation].gated else 1)
        modules = {
            "norm": _norm(normalization, hidden_size, eps, zero_centered_gamma, device, dtype),
            "fc1": Linear(hidden_size, wide, bias, device, dtype, recipe=recipe, **settings),
            "activation": KINDS[activation](),
            "fc2": Linear(ffn_hidden_size, hidden_size, bias, device, dtype, recipe=recipe, **settings),
        }
        self.activation_recompute = activation_recompute
        super().__init__(modules, require=("norm-linear", "activation-linear"))

    def flattens(self) -> bool:
        return super().flattens() and not self.activation_recompute

    @classmethod
    def _plain_forward(cls) -> Any:
        return LayerNormMLP.forward

    def forward(self, input: Any, *extra_inputs: Any, op_kwargs: Any = None) -> Any:  # type: ignore[override]
        if type(input) is not Tensor and isinstance(input, Proxy):
            refuse_symbol(type(self).__name__)
        if self.activation_recompute and torch.is_grad_enabled():
            run, recipe = super().forward, ambient.recipe

            def again(x: Tensor) -> Any:
                with nullcontext() if recipe is None else autocast(recipe):  # backward may run outside of autocast
                    return run(x, *extra_inputs, op_kwargs=op_kwargs)

            return checkpoint(again, input, use_reentrant=False)
        return super().forward(input, *extra_inputs, op_kwargs=op_kwargs)
