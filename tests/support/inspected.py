"""What tests of reports share: a small model to inspect, the only finding, and how alike two tensors are."""

from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import octavo


def pair(recipe="fp8-current", **settings):
    return nn.Sequential(
        octavo.Linear(64, 96, recipe=recipe, **settings), nn.GELU(), octavo.Linear(96, 32, recipe=recipe, **settings)
    )


def only(found):
    assert len(found) == 1, found
    return found[0]


def cosine(a, b):
    return torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


class Counted(TorchDispatchMode):
    """Counts every operator."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **kwargs or {})


def train(model, x):
    y = model(x)
    y.square().mean().backward()
    return y


def by_tensor(report, layer="0"):
    return {row.tensor: row for row in report.rows() if row.layer == layer}
