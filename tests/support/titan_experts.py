"""A stand-in for torchtitan's grouped experts, with the same attributes."""

import torch
import torch.nn.functional as F
from torch import nn

HOME = "torchtitan.models.common.moe"


class Module(nn.Module):
    """torchtitan's base class of modules, of which every module of a model is an instance."""


class GroupedExperts(Module):
    def __init__(self, experts=3, hidden=64, ffn=48, **place):
        super().__init__()
        self.num_experts = experts
        for name, out, width in (("w1_EFD", ffn, hidden), ("w2_EDF", hidden, ffn), ("w3_EFD", ffn, hidden)):
            weight = torch.randn(experts, out, width, **place) * width**-0.5
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x_RD, num_tokens_per_expert_E):
        parts = x_RD.split(num_tokens_per_expert_E.tolist())
        rows = [self._grouped_mm(part, i) for i, part in enumerate(parts)]
        return torch.cat(rows)

    def _grouped_mm(self, x, i):
        return (F.silu(x @ self.w1_EFD[i].mT) * (x @ self.w3_EFD[i].mT)) @ self.w2_EDF[i].mT


GroupedExperts.__module__ = HOME
