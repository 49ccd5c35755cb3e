"""Training in a few steps: layers whose weights are codes, and a loop whose data follows from seeds."""

import torch

import octavo
from tests.support.linear_oracle import randn


def seeded(build, *sizes, seed=0, **settings):
    """A module whose parameters are the same in each call with this seed."""
    torch.manual_seed(seed)
    return build(*sizes, **settings)


def layer_of_codes(build, *sizes, trainable=True, keep_columns=False, **settings):
    """A module without biases whose weights are codes, the same in each call."""
    layer = seeded(build, *sizes, bias=False, **settings)
    octavo.quantize_weights(layer, trainable=trainable, keep_columns=keep_columns)
    return layer


def train(model, optimizer, seeds, *, shape, dtype=None, after=None):
    """A step for each seed, which draws x [rows, features] and brings y closer to zero. Returns the losses. `after` is
    called with the model at the end of each step; without a dtype x has that of the parameters."""
    losses = []
    dtype = next(model.parameters()).dtype if dtype is None else dtype
    for seed in seeds:
        loss = model(randn(*shape, seed=seed, dtype=dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(model)
        losses.append(loss.item())
    return losses
