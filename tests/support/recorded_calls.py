"""Modules and functions whose calls are recorded: what they give as recorded, and as written."""

from functools import partial

import pytest
import torch

import octavo
from octavo.runtime import call_cache as calls
from tests.support.state_tensors import state_tensors

K, N, ROWS, GROUPS = 64, 96, 32, 3
on_gpu = pytest.param("cuda", marks=pytest.mark.gpu)


def build(kind, recipe, device):
    where = {"device": device, "dtype": torch.bfloat16}
    if kind == "linear":
        return octavo.Linear(K, N, recipe=recipe, **where)
    if kind == "mlp":
        return octavo.LayerNormMLP(K, N, normalization="RMSNorm", activation="swiglu", recipe=recipe, **where)
    if kind == "grouped":
        return octavo.GroupedLinear(GROUPS, K, N, recipe=recipe, **where)
    return octavo.ops.RMSNorm(K, **where) if kind == "norm" else octavo.ops.SwiGLU()


def example(kind, device, rows=ROWS):
    """x, dy and what else a call takes."""
    of = partial(torch.randn, device=device, dtype=torch.bfloat16)
    wide = {"linear": N, "mlp": K, "grouped": N, "norm": K, "activation": K // 2}[kind]
    if kind != "grouped":
        return of(rows, K), of(rows, wide), ()
    sizes = torch.randint(0, rows // GROUPS, (GROUPS,))
    return of(rows, K), of(rows, wide), (sizes.to(device),)


def step(module, x, dy, more=(), call=None):
    """y, gradients and all buffers after one training step."""
    leaf = x.detach().requires_grad_()
    module.zero_grad()
    y = (module if call is None else call)(leaf, *more)
    y.backward(dy)
    octavo.step(module)
    return [y, leaf.grad, *[p.grad for p in module.parameters()], *state_tensors(module)]


def as_written(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(calls, "DEVICES", set())
        return [None if t is None else t.clone() for t in call()]


def assert_equal(found, want):
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def recordings():
    return sum(kind.replay is not None for kind in calls._recordings.values())


def call(tensors, work):
    """work(tensors) as a layer calls it: by a key, if it may be recorded."""
    return calls.run(("work",), tensors, work)


class Stub:
    """A launch, on no device: what it is launched with is written down."""

    grid, tail, head, packs = 1, (), (), False

    def __init__(self):
        self.launched = []

    def direct(self, *pointers):
        return self

    def launch(self, *arguments):
        self.launched.append(arguments[4:])
