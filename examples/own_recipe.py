"""Write a recipe of your own, and train in it beside shipped ones: equal weights, equal batches.

    python examples/own_recipe.py                               # seconds on a CPU

The recipe gives each token a scale, and each weight one scale. It works wherever a recipe's name does: in
`octavo.convert`, in policies and in checkpoints, as long as the program has imported this module.
"""

import argparse

import torch
from torch import nn

import octavo
from octavo.formats import E5M2, Format
from octavo.quant import Rowwise, Tensorwise
from octavo.recipes.recipe import LinearQuant, Overridable
from octavo.values import register


@register("fp8-by-token")
class ByToken(Overridable):
    """A scale for each token in x and dy, and one for the whole weight."""

    grad_format: Format = E5M2

    def gemms(self) -> LinearQuant:
        x, w, dy = Rowwise(), Tensorwise(), Rowwise(self.grad_format)
        return LinearQuant.of(x=(x, x), w=(w, w), dy=(dy, dy), fast=("fprop",))  # (by rows, by columns) of each tensor


def train(recipe, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).requires_grad_(False)
    octavo.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    octavo.attach(model, optimizer)
    losses = []
    for _ in range(steps):
        x = torch.randn(128, 64) * torch.logspace(-2, 2, 128)[:, None]  # tokens of very different magnitudes
        loss = (model(x) - teacher(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    settings = parser.parse_args(arguments)
    found = {}
    for recipe in ("bf16", "fp8-current", "fp8-by-token", "fp8-by-token(wgrad='bf16')"):
        found[recipe] = train(recipe, settings.steps)
        print(f"{recipe:28} loss {found[recipe][0]:.3f} to {found[recipe][-1]:.3f}")
    return found["fp8-by-token"]


if __name__ == "__main__":
    main()
