"""A small run to save and resume: a model, its training, and all of its values."""

import hashlib
import json
import random

import numpy as np
import torch
from torch import nn

import octavo

FILES = ("model.safetensors", "recipe.safetensors", "optimizer.safetensors", "run.safetensors")


class Net(nn.Module):
    """Layers of both kinds, dropout, a norm with buffers, and a tied weight."""

    def __init__(self, width=32, dtype=torch.float32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 48, dtype=dtype), nn.Linear(48, width, dtype=dtype)
        self.norm, self.drop = nn.BatchNorm1d(48, dtype=dtype), nn.Dropout(0.2)
        self.experts = octavo.GroupedLinear(2, width, width, dtype=dtype)
        self.tied = self.down

    def forward(self, x):
        y = self.down(self.drop(self.norm(torch.relu(self.up(x)))))
        return self.experts(y, torch.tensor([len(y) // 2, len(y) - len(y) // 2]))


def make(recipe="fp8-delayed", *, seed=0, optimizer=torch.optim.AdamW, attached=True, **sizes):
    torch.manual_seed(seed)
    model = Net(**sizes)
    octavo.convert(model, recipe)
    trained = optimizer(model.parameters(), lr=1e-2)
    if attached:
        octavo.attach(model, trained)
    return model, trained


def train(model, optimizer, steps):
    """Draws from every generator."""
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 32) * (1 + random.random()) + float(np.random.rand())
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def signed(manifest):
    """A manifest with the digest of its entries."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def seed_all(seed):
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)


def values(model, optimizer):
    """Every tensor of a run, by name, and its generators."""
    state = {f"model.{name}": t.clone() for name, t in model.state_dict().items()}
    state |= {f"recipe.{name}": t for name, t in octavo.state_dict(model).items()}
    for number, entry in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{number}.{name}": t.clone() for name, t in entry.items()}
    return state | {"generator": torch.get_rng_state(), "python": torch.tensor([hash(random.getstate())])}


def assert_same(found, wanted):
    assert set(found) == set(wanted)
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []
