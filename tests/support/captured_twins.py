"""A layer that is compiled or captured and an eager twin of it: the same steps, every bit of what they leave compared.

What a CUDA graph returns lives until the next replay, so everything is copied as soon as it is there; parameters have a
gradient tensor of their own before a step begins, or the first microbatch's would be the graph's memory.
"""

import copy

import torch

from tests.support.linear_oracle import make, spiky
from tests.support.steps import assert_equal

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


def same_microbatches(pair, calls, data, what="", **settings):
    """The same step of both."""
    found, want = (microbatches(model, call, data, **settings) for model, call in zip(pair, calls, strict=True))
    assert_equal(found, want, what)


def compiled(call, mode="reduce-overhead", **settings):
    return torch.compile(call, fullgraph=True, mode=mode, **settings)
