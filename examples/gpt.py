"""Train a GPT on a text file: a loop in the manner of nanoGPT, with two lines of Octavo.

    python examples/gpt.py                                      # seconds on a CPU, on a book that ships with Octavo
    python examples/gpt.py --data input.txt --recipe fp8-delayed --width 768 --layers 12 --steps 2000 --compile

The model is plain torch. Octavo's lines are `octavo.convert`, before the optimizer is made, and `octavo.attach`.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.demo import corpus


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, width, layers, heads, context, vocabulary=256):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def train(settings):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = GPT(settings.width, settings.layers, settings.heads, settings.context).to(device)
    print(octavo.convert(model, settings.recipe).summary())  # before the optimizer is made
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=device == "cuda")
    octavo.attach(model, optimizer)  # scales of fp8-delayed follow optimizer.step()
    call = torch.compile(model, fullgraph=True) if settings.compile else model

    text, _ = corpus.load(settings.data)
    losses = []
    batches = corpus.batches(text, steps=settings.steps, batch=settings.batch, context=settings.context, seed=1)
    for step, batch in enumerate(batches):
        batch = batch.to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = call(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % max(1, settings.steps // 5) == 0 or step == settings.steps - 1:
            print(f"step {step:5}  loss {losses[-1]:.3f}")
    if settings.save:
        octavo.save_checkpoint(settings.save, model, optimizer, step=settings.steps)
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a file of text; default: a book that ships with Octavo")
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--save", metavar="FOLDER", help="write a checkpoint that resumes bit for bit")
    return train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
