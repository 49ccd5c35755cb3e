"""Layers whose delayed scaling has seen nothing yet, batches for them, and one step."""

import torch

import octavo
from octavo.model import step as steps
from tests.support.linear_oracle import spiky

K, N, M, G = 48, 40, 24, 3
SPLITS = torch.tensor([10, 6, 8])


def batch(seed=0, size=1.0):
    return spiky(M, K, seed=seed) * size, spiky(M, N, seed=seed + 1) * size


def experts(recipe, **settings):
    layer = octavo.GroupedLinear(G, K, N, recipe=recipe, **settings)
    with torch.no_grad():
        layer.weight.copy_(spiky(G, N, K, seed=1) * 0.1)
        layer.bias.copy_(spiky(G, N, seed=2))
    return layer


def results(layer, x, dy, *extra_inputs):
    x = x.clone().requires_grad_()
    y = layer(x, *extra_inputs)
    y.backward(dy)
    found = [y.detach(), x.grad, *[p.grad for p in layer.parameters()]]
    layer.zero_grad()
    return found


def error(found, want):
    return ((found - want).norm() / want.norm()).item()


def cold(model):
    """The operands of each layer that no step has seen, by their first letters."""
    masks = [layer._scaling.uncalibrated for _, layer in steps.layers(model)]
    return ["".join([letter for letter, is_cold in zip("xwd", mask, strict=True) if is_cold]) for mask in masks]
