"""Fine-tune a model of Llama-3.1-8B's shapes on one GPU: all weights, or adapters, with FP8 codes and with bfloat16.

    python3 -m benchmarks.llama_8b --json benchmarks/results/llama-8b-h200.json
    python3 -m benchmarks.llama_8b --device cpu --size tiny --steps 3

32 blocks of width 4096, 32 heads over 8, MLPs of 14336, a vocabulary of 128256; random weights, sequences of 4096
random tokens, others in each step, one sequence a step. Weights of the FP8 rows are codes as soon as a block is built.
Embedding and head are bfloat16, the loss is computed 1024 tokens at a time.

    full       octavo.optim.AdamW, master values in bfloat16, 8-bit moments, updated after backward
    streamed   the same with float32 master values; each weight is updated as soon as its gradient is there, and the
               gradient is dropped
    lora       frozen blocks, adapters of rank 16 on all of their linear layers, torch's AdamW

peak is torch's largest allocation in a step; ms the median of the steps from the fourth on, optimizer included. Several
rows run each in a process of its own. Random tokens cannot be learnt: the loss only shows that nothing breaks.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from benchmarks import study
from octavo.cli import machine
from octavo.cli.bench import isolated
from octavo.cli.bench.llama_weights import STD
from octavo.demo.llama import EPS, Size, make_block
from octavo.text import table

SIZES = {
    "8b": Size(1, 4096, 4096, 32, 8, 14336, 32, 128256),
    "tiny": Size(1, 64, 128, 4, 2, 256, 2, 512),
}
ROWS = (
    ("full", "fp8-block"), ("full", "bf16"), ("streamed", "fp8-block"), ("lora", "fp8-block"), ("lora", "bf16"),
    ("full", "fp8-current"),
)  # fmt: skip
RANK, CHUNK, RATE, SKIPPED = 16, 1024, 1e-5, 3


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two narrow ones beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        place = {"device": base.weight.device, "dtype": torch.bfloat16}
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Linear(base.in_features, rank, bias=False, **place),
            nn.Linear(rank, base.out_features, bias=False, **place),
        )
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


class Model(nn.Module):
    """Maps tokens [B, T] to the loss of predicting each one's successor."""

    def __init__(self, size: Size, recipe: str, adapted: bool, recompute: bool, device: torch.device) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.recompute = recompute
        self.embedding = nn.Embedding(size.vocabulary, size.width, **place)
        self.blocks = nn.ModuleList(built(size, recipe, adapted, device) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=EPS, **place)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False, **place)
        with torch.no_grad():
            for outer in (self.embedding, self.head):
                outer.weight.normal_(std=STD)
                outer.requires_grad_(not adapted)
        self.norm.requires_grad_(not adapted)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x, target = self.norm(x).flatten(0, 1), tokens.roll(-1, 1).flatten()
        parts = zip(x.split(CHUNK), target.split(CHUNK), strict=True)
        losses = [checkpoint(self.loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / target.numel()

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), target, reduction="sum")


def built(size: Size, recipe: str, adapted: bool, device: torch.device) -> nn.Module:
    """Return a block in bfloat16 whose linear layers run in a recipe, with weights that are codes."""
    block = make_block(size, device).to(torch.bfloat16)
    with torch.no_grad():
        for weight in block.parameters():
            if weight.dim() == 2:
                weight.normal_(std=STD)
    block.requires_grad_(not adapted)
    if recipe != "bf16":
        octavo.convert(block, recipe)
        octavo.quantize_weights(block, trainable=not adapted)
    for module in list(block.modules()) if adapted else ():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(module, Adapted):
                setattr(module, name, Adapted(child, RANK))
    return block


def optimizer_of(model: nn.Module, how: str) -> Callable[[], None]:
    """Return what a step calls after backward."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if how == "streamed":
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(updater_of(parameter))
        return lambda: None
    if how == "lora":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=RATE, fused=trained[0].is_cuda)
    else:
        optimizer = octavo.optim.AdamW(trained, lr=RATE, master="bfloat16", states="8bit")

    def end() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return end


def updater_of(parameter: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that updates a parameter as soon as its gradient is there, and drops the gradient."""
    optimizer = octavo.optim.AdamW([parameter], lr=RATE, states="8bit")

    def update(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def main(argv: list[str] | None = None) -> int:
    parser = study.parser_of("llama_8b", __doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="8b")
    parser.add_argument("--rows", nargs="+", default=[f"{how}/{recipe}" for how, recipe in ROWS], metavar="HOW/RECIPE")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step; default: %(default)s")
    parser.add_argument("--recompute", action="store_true", help="recompute each block in backward")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--budget", type=float, default=170, help="begin no row after so many seconds")
    return study.run(parser, argv, measure, render)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    size = replace(SIZES[arguments.size], batch=arguments.batch)
    report: dict[str, Any] = {
        "machine": machine.describe(device), "size": vars(size), "recompute": arguments.recompute,
        "compiled": arguments.compile, "results": [],
    }  # fmt: skip
    began = time.perf_counter()
    for row in arguments.rows:
        if time.perf_counter() - began > arguments.budget:
            break
        how, recipe = row.split("/")
        alone = len(arguments.rows) == 1
        report["results"].append(
            trained(how, recipe, size, arguments, device) if alone else trained_elsewhere(how, recipe, arguments)
        )
        print(json.dumps(report["results"][-1]), file=sys.stderr)
        study.write(report, arguments.json)
    return report


def trained_elsewhere(how: str, recipe: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a process of its own, so that its memory is that of one model."""
    given = {"rows": f"{how}/{recipe}"} | {
        name: getattr(arguments, name) for name in ("size", "steps", "batch", "device")
    }
    options = [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]
    options += [f"--{name}" for name in ("recompute", "compile") if getattr(arguments, name)]
    try:
        found: dict[str, Any] = isolated.report_of(options, "benchmarks.llama_8b")["results"][0]
    except RuntimeError as error:
        return {"how": how, "recipe": recipe, "ok": False, "error": str(error)}
    return found


def trained(how: str, recipe: str, size: Size, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train one model for some steps; return its memory and the time of a step."""
    row: dict[str, Any] = {"how": how, "recipe": recipe}
    torch.manual_seed(0)
    try:
        model = Model(size, recipe, how == "lora", arguments.recompute, device)
        if arguments.compile:
            for block in model.blocks:
                block.compile()
        row |= {"parameters": sum(p.numel() for p in model.parameters()), "model_gib": gib(memory(device))}
        seconds, losses = steps_of(model, optimizer_of(model, how), size, arguments.steps, device)
    except torch.cuda.OutOfMemoryError as error:
        return row | {"out_of_memory": str(error).split(". ")[0]}
    ms = statistics.median(seconds[SKIPPED:] or seconds) * 1e3
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return row | {
        "peak_gib": gib(peak), "ms": ms, "tokens_per_s": size.tokens / ms * 1e3,
        "losses": [losses[0].item(), losses[-1].item()],
    }  # fmt: skip


def steps_of(
    model: nn.Module, end: Callable[[], None], size: Size, steps: int, device: torch.device
) -> tuple[list[float], list[Tensor]]:
    seconds, losses = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(steps):
        tokens = torch.randint(size.vocabulary, (size.batch, size.length), device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        loss = model(tokens)
        loss.backward()
        end()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        losses.append(loss.detach())
    return seconds, losses


def memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def gib(count: int) -> float:
    return round(count / 2**30, 2)


def render(report: dict[str, Any]) -> str:
    tokens = report["size"]["batch"] * report["size"]["length"]
    header, lines = ["", "recipe", "weights", "peak", "ms", "tokens/s", "loss"], []
    for row in report["results"]:
        if "ms" not in row:
            lines.append(
                [
                    row["how"],
                    row["recipe"],
                    str(row.get("model_gib", "")),
                    row.get("error", "out of memory"),
                    "",
                    "",
                    "",
                ]
            )
            continue
        first, last = row["losses"]
        lines.append(
            [
                row["how"], row["recipe"], f"{row['model_gib']} GiB", f"{row['peak_gib']} GiB", f"{row['ms']:.0f}",
                f"{row['tokens_per_s']:.0f}", f"{first:.3f} to {last:.3f}",
            ]
        )  # fmt: skip
    return f"{study.heading(report, f'{tokens} tokens a step')}\n\n{table(header, lines)}"


if __name__ == "__main__":
    raise SystemExit(main())
