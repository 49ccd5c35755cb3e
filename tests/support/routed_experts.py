"""moe.Experts with known weights, routed batches for them, and one step."""

import torch

from octavo import moe
from tests.support.linear_oracle import spiky
from tests.support.sequentials import fill

E, D, N, T, K = 5, 48, 32, 40, 2
NAMES = ("y", "dx", "dprobs", "dw1", "dw2")


def experts(recipe, *, rules=(), **settings):
    model = fill(moe.Experts(E, D, N, recipe=recipe, **settings))
    if rules is None:
        model.rules = None
    return model


def batch(seed=0, *, tokens=T, assignments=K, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (spiky(tokens, D, seed=seed + i, size=8.0, dtype=dtype) for i in (1, 51))
    probs, indices = torch.rand(tokens, E, generator=generator).softmax(-1).topk(assignments)
    return x, indices, probs, dy


def step(model, x, indices, probs, dy, call=None, **given):
    model.zero_grad()
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y = (model if call is None else call)(x, indices, probs, **given)
    y.backward(dy)
    return [y.detach().clone(), x.grad, probs.grad, *(p.grad for p in model.parameters())]
