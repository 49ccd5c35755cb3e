"""Tokens per second of a model of nanochat's d20 shapes, compiled: plain bfloat16, and the same model converted.

    python3 -m benchmarks.nanochat --recipes bf16 fp8-delayed fp8-current --json benchmarks/results/nanochat-h200.json
    python3 -m benchmarks.nanochat --device cpu --size tiny --batch 1 --steps 2 --recipes bf16 fp8-delayed

20 blocks of width 1280, 10 heads with norms of queries and keys, MLPs with squared ReLU, rotary positions, a vocabulary
of 65536, sequences of 2048 random tokens. Parameters are float32, and the linear layers cast their weights as those of
nanochat do: a conversion proves first that they do nothing else. Each block is compiled, all with one graph, and so is
the head with its loss; a step ends with a fused AdamW. `--whole` compiles the model in one graph. The head stays
in bfloat16 unless `--head` is given. torchao is compared where it is installed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from benchmarks import study
from octavo.cli import machine
from octavo.text import table

BASELINE, TORCHAO = "bf16", "torchao"
RATE, SKIPPED, SOFTCAP = 3e-4, 4, 15.0


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    batch: int = 32


SIZES = {"d20": Size(20, 1280, 10, 2048, 65536), "tiny": Size(2, 64, 2, 32, 128, 2)}


class CastingLinear(nn.Linear):
    """A linear layer whose weight is cast to the dtype of its input, as nanochat's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Block(nn.Module):
    """Attention and MLP, each after a norm without weights."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.c_q, self.c_k, self.c_v, self.c_proj = (
            CastingLinear(size.width, size.width, bias=False) for _ in range(4)
        )
        self.c_fc = CastingLinear(size.width, 4 * size.width, bias=False)
        self.c_out = CastingLinear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = norm(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.c_q, self.c_k, self.c_v))
        q, k = norm(turned(q, cos, sin)), norm(turned(k, cos, sin))
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        y: Tensor = x + self.c_out(F.relu(self.c_fc(norm(x))).square())
        return y


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos + right * sin, right * cos - left * sin), -1)


class Model(nn.Module):
    """Map tokens [B, T + 1] to the mean loss of predicting each one's successor."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocabulary, size.width, dtype=torch.bfloat16)
        self.h = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.lm_head = CastingLinear(size.width, size.vocabulary, bias=False)
        nn.init.normal_(self.wte.weight)
        nn.init.normal_(self.lm_head.weight, std=0.001)
        speeds = 1e4 ** (-torch.arange(0, 1, 2 * size.heads / size.width))
        angles = torch.outer(torch.arange(size.length), speeds)
        for name, values in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, values.bfloat16(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = norm(self.wte(tokens[:, :-1]))
        for block in self.h:
            x = block(x, self.cos, self.sin)
        return self.loss(x, tokens[:, 1:])

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(norm(x)).float()
        return F.cross_entropy((SOFTCAP * torch.tanh(logits / SOFTCAP)).flatten(0, 1), targets.flatten())

    def compile_parts(self) -> None:
        for block in self.h:
            block.compile(dynamic=False)
        self.loss = torch.compile(self.loss, dynamic=False)  # type: ignore[method-assign]


def main(argv: list[str] | None = None) -> int:
    parser = study.parser_of("nanochat", __doc__)
    parser.add_argument("--recipes", nargs="+", default=[BASELINE, TORCHAO, "fp8-delayed", "fp8-current"])
    parser.add_argument("--size", choices=tuple(SIZES), default="d20")
    parser.add_argument("--batch", type=int, default=0, help="sequences of a step; default: 32, as nanochat's")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--whole", action="store_true", help="compile the model in one graph")
    parser.add_argument("--head", action="store_true", help="convert the head too")
    parser.add_argument("--save-original-input", action="store_true", help="keep x for backward, not its codes")
    return study.run(parser, argv, measure, render)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    size = SIZES[arguments.size]
    size = replace(size, batch=arguments.batch or size.batch)
    report: dict[str, Any] = {
        "machine": machine.describe(device), "size": asdict(size), "whole": arguments.whole, "head": arguments.head,
        "save_original_input": arguments.save_original_input, "results": [],
    }  # fmt: skip
    for recipe in arguments.recipes:
        if recipe == TORCHAO and find_spec(TORCHAO) is None:
            report["results"].append({"recipe": recipe, "missing": "not installed on this machine"})
            continue
        report["results"].append(trained(size, recipe, arguments, device))
        study.write(report, arguments.json)
    return report


def trained(size: Size, recipe: str, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train the model for some steps; return the time of one after the first ones, the memory and the losses."""
    began = time.perf_counter()
    torch.compiler.reset()
    torch.manual_seed(0)
    with device:
        model = Model(size)
    converted = made(model, recipe, head=arguments.head, save_original_input=arguments.save_original_input)
    call: Callable[[Tensor], Tensor] = model
    if arguments.whole:
        call = torch.compile(model, dynamic=False)
    else:
        model.compile_parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    if converted:
        octavo.attach(model, optimizer)
    cuda, seconds, losses = device.type == "cuda", [], []
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(arguments.steps):
        tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1), device=device)
        seconds.append(timed(lambda tokens=tokens: losses.append(step(call, optimizer, tokens)), device))
    ms = 1e3 * statistics.median(seconds[SKIPPED:] or seconds[-1:])
    return {
        "recipe": recipe, "ms": ms, "tokens_per_s": 1e3 * size.batch * size.length / ms, "converted": converted,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "losses": [losses[0].item(), losses[-1].item()], "first_step_s": seconds[0],
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def made(model: Model, recipe: str, *, head: bool, save_original_input: bool) -> str:
    """Convert a model, unless it is to stay as it is, and return what was converted of it by Octavo."""
    if recipe == TORCHAO:
        from torchao.float8 import convert_to_float8_training

        # torchao swaps layers of this very class
        for name, module in list(model.named_modules()):
            if isinstance(module, CastingLinear) and (head or name != "lm_head"):
                module.__class__ = nn.Linear
                module.bfloat16()
        convert_to_float8_training(model, module_filter_fn=lambda module, name: type(module) is nn.Linear)
    if recipe in (BASELINE, TORCHAO):
        return ""
    left = {"high_precision": ()} if head else {}
    return octavo.convert(model, recipe, save_original_input=save_original_input, **left).summary()


def step(call: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss = call(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def timed(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def render(report: dict[str, Any]) -> str:
    plain = next((row["tokens_per_s"] for row in report["results"] if row["recipe"] == BASELINE), None)
    rows = []
    for row in report["results"]:
        if "missing" in row:
            rows.append([row["recipe"], row["missing"], "", "", "", ""])
            continue
        times = "" if plain is None else f"{row['tokens_per_s'] / plain:.2f}"
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        first, last = row["losses"]
        rows.append(
            [row["recipe"], f"{row['ms']:.1f}", f"{row['tokens_per_s']:.0f}", times, peak, f"{first:.3f} to {last:.3f}"]
        )
    size = report["size"]
    what = (
        f"{size['batch']} sequences of {size['length']} a step, compiled {'whole' if report['whole'] else 'by blocks'}"
    )
    head = ("recipe", "ms", "tokens/s", "of bf16", "peak", "loss")
    said = [row["converted"] for row in report["results"] if row.get("converted")][:1]
    return "\n\n".join((study.heading(report, what), table(head, rows), *said))


if __name__ == "__main__":
    sys.exit(main())
