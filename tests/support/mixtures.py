"""octavo.MoE with known weights, batches for it, and one step."""

import torch

import octavo
from tests.support.linear_oracle import spiky
from tests.support.sequentials import fill

D, N, E, K, T = 48, 32, 8, 2, 40


def mixture(recipe="fp8-block", **settings):
    model = fill(octavo.MoE(D, N, E, K, recipe=recipe, **settings))
    if model.expert_bias is not None:
        model.expert_bias.copy_(torch.linspace(-0.2, 0.2, E))
    return model


def batch(seed=0, tokens=T, dtype=torch.float32):
    return tuple(spiky(tokens, D, seed=seed + i, size=8.0, dtype=dtype) for i in (1, 51))


def step(model, x, dy, call=None, **given):
    """y, the losses, the load and all gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    call = call or (lambda x, **given: (model(x, **given), model.aux_loss))
    y, loss = call(x, **given)
    ((y * dy).sum() + loss).backward()
    found = [y.detach().clone(), loss.detach().clone(), model.load.clone(), x.grad]
    return [*found, *(p.grad for p in model.parameters())]
