"""Models of plain torch to convert."""

import torch
from torch import nn


class Special(nn.Linear):
    """A subclass whose forward is its own."""

    def forward(self, input):
        return 2 * super().forward(input)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 48)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(48, 40), "down": nn.Linear(40, 48)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, 12, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block["down"](torch.tanh(block["up"](x)))
        return self.head(self.norm(x))


def skipped(report):
    """Why a conversion left each module as it was, by path."""
    return {row.path: row.reason for row in report if row.route == "skipped"}
