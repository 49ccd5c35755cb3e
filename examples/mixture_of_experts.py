"""Train a small model whose MLPs are mixtures of experts in FP8, with a balanced load.

    python examples/mixture_of_experts.py                       # seconds on a CPU
    python examples/mixture_of_experts.py --recipe fp8-delayed --width 2048 --experts 64 --top-k 6 --steps 200

Each router has a bias that raises the choice of idle experts after each step, so that no loss is needed for balance.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.demo import corpus
from octavo.demo.transformer import Attention


class Block(nn.Module):
    def __init__(self, width, experts, top_k, recipe):
        super().__init__()
        self.attention_norm, self.mixture_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads=4)
        octavo.convert(self.attention, recipe)
        self.mixture = octavo.MoE(width, 2 * width, experts, top_k, recipe=recipe, score="sigmoid", expert_bias=True)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mixture(self.mixture_norm(x))


class Model(nn.Module):
    def __init__(self, width, layers, experts, top_k, recipe, vocabulary=256):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(width, experts, top_k, recipe) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(settings):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model(settings.width, settings.layers, settings.experts, settings.top_k, settings.recipe).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    octavo.attach(model, optimizer)

    text, _ = corpus.load()
    losses = []
    for batch in corpus.batches(text, steps=settings.steps, batch=8, context=64, seed=1):
        batch = batch.to(device)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for block in model.blocks:  # experts with few tokens are chosen more from now on
            octavo.moe.update_bias(block.mixture.expert_bias, block.mixture.load, rate=0.01)
        losses.append(loss.item())
    shares = torch.stack([block.mixture.load for block in model.blocks]).double()
    shares = shares / shares.sum(1, keepdim=True) * settings.experts
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {settings.recipe}")
    print(f"the busiest expert has {shares.max():.2f} times its share, the idlest {shares.min():.2f}")
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fp8-block")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-3)
    return train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
