"""Does a converted model of Hugging Face train as it does unconverted? A random Mixtral on a book, in several recipes.

    python3 -m benchmarks.mixtral --json benchmarks/results/mixtral-h200.json
    python3 -m benchmarks.mixtral --device cpu --size tiny --steps 3

Two layers of Mixtral 8x7B's own sizes (width 4096, 8 experts of 14336, 2 for each token), built from a config at random
(no hub), bfloat16 weights, fused AdamW, the bytes of a book as tokens. Each recipe starts from the weights of the model
of transformers by itself, and sees the same batches. `octavo.convert` takes all linear layers but the head, and the
experts through transformers' registry; the routers stay the model's own. Needs transformers.

ms is the median time of a step, optimizer included, from the fifth on.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import octavo
from benchmarks import study
from octavo.cli import machine
from octavo.cli.bench.training_steps import step_seconds
from octavo.demo import corpus
from octavo.text import table

SIZES = {
    "full": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
}
RECIPES = ("fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4")
VOCABULARY, RATE = 256, 1e-4


def main(argv: list[str] | None = None) -> int:
    parser = study.parser_of("mixtral", __doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step; default: %(default)s")
    parser.add_argument("--length", type=int, default=1024, help="bytes of a sequence; default: %(default)s")
    return study.run(parser, argv, measure, render)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    report: dict[str, Any] = {
        "machine": machine.describe(device),
        "transformers": transformers.__version__,
        "model": {"layers": 2, "experts": 8, "experts_per_token": 2, **SIZES[arguments.size]},
        "tokens_per_step": arguments.batch * arguments.length,
        "results": [],
    }
    batches = batches_of(arguments, device)
    for name in (None, *arguments.recipes):
        report["results"].append(trained(name, arguments.size, batches, device))
        print(json.dumps(report["results"][-1]), file=sys.stderr)
        study.write(report, arguments.json)
    return report


def batches_of(arguments: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """Return a batch of bytes for each step."""
    text, context = corpus.load()[0], arguments.length - 1
    drawn = corpus.batches(text, steps=arguments.steps, batch=arguments.batch, context=context, seed=0)
    return [batch.to(device) for batch in drawn]


def trained(recipe: str | None, size: str, batches: list[Tensor], device: torch.device) -> dict[str, Any]:
    """Train one model, and return its losses and the time of a step."""
    model = built(size, device)
    row: dict[str, Any] = {"recipe": recipe or "bf16, transformers"}
    if recipe is not None:
        report = octavo.convert(model, recipe)
        row["converted"] = {reason: number.layers for reason, number in report.shares().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    if recipe is not None:
        octavo.attach(model, optimizer)
    losses: list[Tensor] = []

    def step(batch: Tensor) -> None:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    seconds = [step_seconds(partial(step, batch), device) for batch in batches]
    row |= {"losses": torch.stack(losses).tolist(), "ms": statistics.median(seconds[4:] or seconds) * 1e3}
    return row


def built(size: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
        **SIZES[size],
    )  # fmt: skip
    with device:
        model: nn.Module = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    return model.train()


def render(report: dict[str, Any]) -> str:
    base = report["results"][0]
    rows = [
        [
            row["recipe"],
            f"{row['losses'][0]:.4f}",
            f"{row['losses'][-1]:.4f}",
            f"{100 * (row['losses'][-1] / base['losses'][-1] - 1):+.2f}",
            f"{row['ms']:.1f}",
        ]
        for row in report["results"]
    ]
    return table(("", "first loss", "last loss", "gap, %", "ms"), rows)


if __name__ == "__main__":
    sys.exit(main())
