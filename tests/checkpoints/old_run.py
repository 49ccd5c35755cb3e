"""The run of `written_before/`, a checkpoint that Octavo wrote with its own safetensors code, and its values' hash."""

import hashlib
import json
import random

import numpy as np
import torch
from torch import nn

import octavo

SHARED = torch.arange(6.0).view(2, 3)
EXTRA = {
    "schedule": {"last": 3, "rates": [1e-3, float("inf"), -0.0], "name": "ß", "none": None, "on": True},
    "nested": [{"a": (1, (2.5, [torch.arange(3)]))}, {}, [], ()],
    "a.b": torch.ones(2),
    "a": {"b": torch.zeros(2), 0: torch.zeros(1, dtype=torch.bool), "0": torch.full((1,), 7)},
    "big": 2**80,
    "shared": [SHARED, SHARED, SHARED.T, SHARED[:, :1].expand(2, 3)],
    "dtypes": {
        str(dtype): [torch.ones(shape).to(dtype) for shape in ((), (0, 3), (5,))]
        for dtype in (
            torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64,
            torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
        )
    },
}  # fmt: skip


def make(seed):
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    model = nn.ModuleDict({"up": nn.Linear(16, 8), "down": nn.Linear(8, 16), "norm": nn.BatchNorm1d(8)})
    model["tied"] = model["down"]
    octavo.convert(model, octavo.Policy([("up", "fp8-delayed"), ("*", "nvfp4")]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    octavo.attach(model, optimizer)
    return model, optimizer


def train(model, optimizer, steps):
    for _ in range(steps):
        y = model["down"](model["norm"](model["up"](torch.randn(16, 16))))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fingerprint(model, optimizer, extra):
    """A hash of every value of a run, to the bit."""
    digest = hashlib.sha256()

    def add(path, value):
        if isinstance(value, torch.Tensor):
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
            digest.update(f"{path} {value.dtype} {tuple(value.shape)} {raw.tolist()}\n".encode())
        elif isinstance(value, dict):
            digest.update(f"{path} dict {[*value]!r}\n".encode())
            for key, item in value.items():
                add(f"{path}.{key}", item)
        elif isinstance(value, list | tuple):
            digest.update(f"{path} {type(value).__name__}\n".encode())
            for i, item in enumerate(value):
                add(f"{path}.{i}", item)
        else:
            digest.update(f"{path} {type(value).__name__} {json.dumps(value)}\n".encode())

    kind, keys, *rest = np.random.get_state()
    add("model", dict(model.state_dict()))
    add("recipe", octavo.state_dict(model))
    add("optimizer", optimizer.state_dict())
    add("random", [torch.get_rng_state(), random.getstate(), kind, keys.tolist(), rest])
    add("extra", extra)
    return digest.hexdigest()


def write(folder):
    model, optimizer = make(1)
    train(model, optimizer, 3)
    octavo.save_checkpoint(folder, model, optimizer, step=3, extra=EXTRA)
    print(fingerprint(model, optimizer, EXTRA))
