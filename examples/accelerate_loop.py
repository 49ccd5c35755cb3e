"""Train a converted model in a loop of one's own with accelerate, and save what a run needs to go on.

    pip install accelerate
    python examples/accelerate_loop.py                          # a tiny GPT, seconds on a CPU
    accelerate launch examples/accelerate_loop.py --recipe fp8-delayed --steps 1000 --out runs/accelerate

`register` is the one line for Octavo beside `convert`: it ends Octavo's step after the optimizer's, and puts the state
of recipes beside what `save_state` writes.
"""

import argparse

import torch

import octavo
from octavo.demo import corpus
from octavo.demo.gpt import GPT, Shape, cross_entropy

try:
    from accelerate import Accelerator
except ImportError:
    raise SystemExit("This example needs accelerate: pip install accelerate") from None

from octavo.integrations.accelerate import register


def train(settings):
    accelerator = Accelerator(mixed_precision="bf16", cpu=not torch.cuda.is_available())
    model = GPT(Shape(width=64, context=settings.length), seed=0)
    print(octavo.convert(model, settings.recipe).summary())
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    rows = corpus.load()[0].long().unfold(0, settings.length + 1, settings.length)
    loader = torch.utils.data.DataLoader(rows, batch_size=settings.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    register(accelerator, model, optimizer)
    losses = []
    for _, batch in zip(range(settings.steps), loader, strict=False):
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if settings.out:
        accelerator.save_state(settings.out)  # load_state goes on from there
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", help="a folder for the state at the end")
    return train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
