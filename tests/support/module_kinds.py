"""A module of each kind, with what it takes besides x [ROWS, K]."""

import torch
from torch import nn

import octavo

K = 64
ROWS = 32
RECIPES = ["bf16", "fp8-delayed", "fp8-block", "nvfp4"]
KINDS = ("linear", "grouped", "groups", "mlp", "sequential")


def grouped(recipe, single):
    layer = octavo.GroupedLinear(2, K, K, recipe=recipe, single_grouped_weight=single)
    return layer, (torch.tensor([ROWS // 2, ROWS // 2]),)


def build(kind, recipe):
    if kind in ("grouped", "groups"):
        return grouped(recipe, kind == "grouped")
    if kind == "mlp":
        return octavo.LayerNormMLP(K, K, recipe=recipe), ()
    if kind == "sequential":
        linears = [octavo.Linear(K, K, recipe=recipe) for _ in range(2)]
        return octavo.Sequential(linears[0], octavo.ops.GELU(), linears[1]), ()
    if kind == "again":
        return octavo.Linear(K, K, recipe=recipe, keep_weight_codes=False), ()
    return octavo.Linear(K, K, recipe=recipe), ()


class Holder(nn.Module):
    """A module and what it takes besides x, as a function of x alone."""

    def __init__(self, module, extra_inputs):
        super().__init__()
        self.module, self.auxiliary = module, extra_inputs

    def forward(self, x):
        return self.module(x, *self.auxiliary)
