"""A layer that is compiled or captured and an eager twin of it: the same steps, every bit of what they leave compared.

What a CUDA graph returns lives until the next replay, so everything is copied as soon as it is there; parameters have a
gradient tensor of their own before a step begins, or the first microbatch's would be the graph's memory.
"""

import copy

import torch

import octavo
from tests.modules.oracle import assert_same, make, spiky

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M, K, N = 64, 128, 96


def twins(recipe, k=K, n=N, **settings):
    layer = make(recipe, k, n, dtype=torch.bfloat16, **settings).to(DEVICE)
    return layer, copy.deepcopy(layer)


def batch(i, m=M, k=K, n=N):
    """x and dy that no other i has; larger in some than in others."""
    x, dy = spiky(m, k, seed=i, dtype=torch.bfloat16), spiky(m, n, seed=500 + i, dtype=torch.bfloat16)
    return (x * 2.0 ** (i % 3)).to(DEVICE), (dy * 2.0 ** (-i % 5)).to(DEVICE)


def batches(step, count, **sizes):
    return [batch(count * step + i, **sizes) for i in range(count)]


def clear_gradients(model):
    for p in model.parameters():
        p.grad = torch.zeros(p.shape, dtype=p.dtype, device=p.device) if p.requires_grad else None


def microbatches(model, call, data, *, deferred=False, arguments=None, leaf=True):
    """One step: outputs, input gradients, then the gradients of the parameters. Deferred: all forwards come first."""
    clear_gradients(model)
    found, pending = [], []
    for (x, dy), given in zip(data, arguments or [{}] * len(data), strict=True):
        x = x.clone().requires_grad_(leaf)
        pending.append((call(x, **given), x, dy))
        if not deferred:
            found += finish(*pending.pop())
    for one in pending:  # and stay: where outputs go between backwards, torch does not replay the last of these
        found += finish(*one)
    return [*found, *gradients(model)]


def finish(y, x, dy):
    out = y.detach().clone()
    y.backward(dy)
    return [out, None if x.grad is None else x.grad.clone()]


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(found, want, what=""):
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert_same(a, b, f"{what} {i}")


def same_microbatches(pair, calls, data, what="", **settings):
    """The same step of both."""
    found, want = (microbatches(model, call, data, **settings) for model, call in zip(pair, calls, strict=True))
    assert_equal(found, want, what)


def same_state(a, b):
    """What recipes remember: scales, amaxes, counters."""
    kept = octavo.state_dict(b)
    assert octavo.state_dict(a).keys() == kept.keys()
    for key, value in octavo.state_dict(a).items():
        assert_same(value, kept[key], key)


def update(model):
    """A stand-in for an optimizer, and what follows it."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad * 0.01)
    octavo.step(model)


def compiled(call, mode="reduce-overhead", **settings):
    return torch.compile(call, fullgraph=True, mode=mode, **settings)
