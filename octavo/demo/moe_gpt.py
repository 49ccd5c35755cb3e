"""Mixtures of experts of the small GPT: `octavo.MoE`, and the same layer in plain torch as its baseline."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.demo.transformer import Device, float32_on
from octavo.moe.mixture import MoE


@dataclass(frozen=True)
class MixtureShape:
    """Sizes of a mixture, and the coefficient of the loss that balances its experts."""

    experts: int = 8
    top_k: int = 2
    ffn: int = 128
    balance: float = 0.01


class TorchMoE(nn.Module):
    """The mixture in plain torch, with the parameters, `load` and `aux_loss` of `octavo.MoE`. Every expert computes
    every token, and the router's weights select: the cost of a small model, and shapes that a graph knows."""

    load: Tensor

    def __init__(self, width: int, shape: MixtureShape, device: Device = "cpu") -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(width, shape.experts, bias=False, **float32_on(device))
        linears = partial(_Linears, shape.experts, device=device)
        self.experts = nn.ModuleDict({"fc1": linears(width, 2 * shape.ffn), "fc2": linears(shape.ffn, width)})
        load = torch.zeros(shape.experts, device=device, dtype=torch.int64)
        self.register_buffer("load", load, persistent=False)
        self.aux_loss = torch.zeros((), **float32_on(device))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"aux_loss": self.aux_loss.detach()}  # a copy has no part in the graph of the last call

    def forward(self, x: Tensor) -> Tensor:
        rows, shape = x.flatten(0, -2), self.shape
        with torch.autocast(x.device.type, enabled=False):
            logits = self.router(rows.float())
        best, index = logits.topk(shape.top_k)
        weights = torch.zeros_like(logits).scatter(-1, index, best.softmax(-1))  # [T, E], zero for experts not chosen
        gate, up = self.experts["fc1"](rows).chunk(2, dim=-1)  # [E, T, F] each
        y: Tensor = self.experts["fc2"](nn.functional.silu(gate) * up)  # [E, T, C]
        load = (index[..., None] == torch.arange(shape.experts, device=x.device, dtype=torch.int64)).sum((0, 1))
        self.load.copy_(load)
        even = load.float() / index.numel() * logits.softmax(-1).mean(0)
        self.aux_loss = shape.balance * shape.experts * even.sum()
        return (y.float() * weights.T[..., None]).sum(0).to(y.dtype).view(x.shape)


class _Linears(nn.Module):
    """A linear layer for each expert, with all matrices in one parameter."""

    def __init__(self, experts: int, inputs: int, outputs: int, device: Device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, outputs, inputs, **float32_on(device)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight.transpose(1, 2))


def make_mixture(width: int, shape: MixtureShape, device: Device = "cpu", *, plain: bool) -> nn.Module:
    """Return the mixture in plain torch, or an `octavo.MoE` without a recipe, which `octavo.convert` gives it."""
    if plain:
        return TorchMoE(width, shape, device)
    sizes = (width, shape.ffn, shape.experts, shape.top_k)
    return MoE(*sizes, aux_loss_coef=shape.balance, **float32_on(device))


def mixtures(model: nn.Module) -> list[MoE | TorchMoE]:
    return [module for module in model.modules() if isinstance(module, MoE | TorchMoE)]


class LoadMeter:
    """Add up the load of a model's experts over several calls."""

    def __init__(self, model: nn.Module) -> None:
        self.mixtures = mixtures(model)
        self.totals = [torch.zeros_like(mixture.load) for mixture in self.mixtures]

    def around(self, call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a function that runs `call`, the model or its compiled form, and counts its load."""

        def counted(x: Tensor) -> Tensor:
            y = call(x)
            for total, mixture in zip(self.totals, self.mixtures, strict=True):
                total += mixture.load
            return y

        return counted

    def shares(self) -> list[list[float]]:
        """Return for each mixture the share of all routed rows that each expert got."""
        return [(total / total.sum()).tolist() for total in self.totals]
