"""Does a mixture train as well if backward keeps the output of fc1 in FP8? Losses, errors of gradients, and bytes kept.

    python3 -m benchmarks.fc1_storage --json benchmarks/results/fc1-storage-cpu.json

The model is a smaller GPT of `octavo train` with SwiGLU experts (`octavo.moe.Experts`) in the place of its MLPs; only
the experts are quantized. Three runs of each seed have the same first weights and the same batches: experts in bf16,
experts in the recipe, and experts in the recipe with `fc1_output_storage="fp8"`. A step of the last two differs in
gradients alone. Their gap, of the loss on text held out, is held against the limits of `benchmarks.parity`. The errors
of gradients are those of one layer on normal numbers, against float64. Exit code 1 if a limit is passed.
"""

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import study
from benchmarks.parity import FP8
from octavo.cli import machine
from octavo.demo import corpus
from octavo.demo.gpt import GPT, Shape
from octavo.demo.training import Plan, evaluate, optimize
from octavo.errors import UnsupportedConfig
from octavo.moe import Experts
from octavo.text import table

SHAPE = Shape(width=64, layers=2, heads=4, context=64)
EXPERTS, SLOTS, FFN = 4, 2, 128
STEPS, BATCH, SEEDS = 200, 8, (0, 1)
STORAGES = ("unquantized", "fp8")
LAYER = (8, 2, 512, 512, 512)  # experts, slots, tokens, hidden, feed-forward, for the errors of gradients
GRADIENTS = ("dx", "dprobs", "dw1", "dw2")


class Mixture(nn.Module):
    """A router, and the experts that it chooses for each position."""

    def __init__(self, recipe: str, storage: str, generator: torch.Generator) -> None:
        super().__init__()
        self.router = nn.Linear(SHAPE.width, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS, SHAPE.width, FFN, recipe=recipe, fc1_output_storage=storage)
        for weight in self.parameters():
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
        self.experts.fc2.weight.data *= (2 * SHAPE.layers) ** -0.5  # the residual stream sums as many outputs

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the arguments of the experts, x in 16 bits as torch.autocast would cast it."""
        probs, indices = self.router(x).float().softmax(-1).topk(SLOTS)
        return x.bfloat16(), indices, probs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(*self.routed(x))
        return y


def build(recipe: str, storage: str, plan: Plan) -> GPT:
    model = GPT(plan.shape, seed=plan.seed)
    generator = torch.Generator().manual_seed(plan.seed)
    for block in model.blocks:
        block.mlp = Mixture(recipe, storage, generator)
    return model.to(plan.device)


def train(recipe: str, storage: str, plan: Plan) -> float:
    """Train from fresh weights, and return the loss on the text held out."""
    text, held_out = corpus.load()
    torch.manual_seed(plan.seed)
    model = build(recipe, storage, plan)
    data = corpus.batches(text, steps=plan.steps, batch=plan.batch, context=plan.shape.context, seed=plan.seed)
    started = time.perf_counter()
    optimize(model, model, data, plan, lambda step, loss: None, quantized=True)
    loss = statistics.fmean(evaluate(model, corpus.windows(held_out, context=plan.shape.context), plan))
    print(f"{recipe}, {storage}: loss {loss:.4f}, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return loss


def kept_bytes(recipe: str, plan: Plan) -> dict[str, int]:
    """Return the bytes that the activation of a mixture keeps for backward in one step, by storage. Raises if the
    experts are not fused: both runs would then be the same."""
    found = {}
    for storage in STORAGES:
        mixture: Any = build(recipe, storage, plan).blocks[0].mlp
        x = torch.randn(plan.tokens(), SHAPE.width, device=plan.device, requires_grad=True)
        told = mixture.experts.explain(*mixture.routed(x))
        if told.fired != ("experts",):
            raise UnsupportedConfig(
                f"In {recipe} the experts are not fused in their first step, so that storage has no effect. Use a "
                "recipe that fuses them, such as fp8-block."
            )
        found[storage] = told.saved_tensors[2].activations
    return found


def gradient_errors(recipe: str, device: torch.device) -> dict[str, dict[str, float]]:
    """Return the relative error, root of the mean square, of each gradient of a layer in float32, by storage."""
    experts, assignments, tokens, hidden, ffn = LAYER
    torch.manual_seed(0)
    x, dy = (torch.randn(tokens, hidden, device=device) for _ in range(2))
    probs, indices = torch.randn(tokens, experts, device=device).softmax(-1).topk(assignments)
    weights = [torch.randn(shape, device=device) * shape[-1] ** -0.5
               for shape in ((experts, 2 * ffn, hidden), (experts, hidden, ffn))]  # fmt: skip
    want = exact(x, indices, probs, dy, *weights)
    found = {}
    for storage in STORAGES:
        layer = Experts(experts, hidden, ffn, recipe=recipe, fc1_output_storage=storage, device=device)
        layer.load_state_dict({"fc1.weight": weights[0], "fc2.weight": weights[1]})
        leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
        layer(leaves[0], indices, leaves[1]).backward(dy)
        grads = [t.grad for t in (*leaves, *layer.parameters())]
        found[storage] = {
            name: ((a.double() - b).norm() / b.norm()).item() for name, a, b in zip(GRADIENTS, grads, want, strict=True)
        }
    return found


def exact(x: Tensor, indices: Tensor, probs: Tensor, dy: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    """Return the gradients of unquantized experts, in float64."""
    x, probs, w1, w2 = (t.double().requires_grad_() for t in (x, probs, w1, w2))
    y = torch.zeros_like(x)
    for e in range(len(w1)):
        tokens, assignments = torch.where(indices == e)
        a, b = (x[tokens] @ w1[e].T).chunk(2, -1)
        y = y.index_add(0, tokens, probs[tokens, assignments, None] * ((F.silu(a) * b) @ w2[e].T))
    return list(torch.autograd.grad(y, (x, probs, w1, w2), dy.double()))


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every run, seed by seed, so that an interrupted measurement leaves whole seeds behind."""
    recipe, losses = arguments.recipe, {"bf16": [], "unquantized": [], "fp8": []}  # type: ignore[var-annotated]
    plan = Plan(arguments.steps, arguments.batch, 0, device, shape=SHAPE)
    report: dict[str, Any] = {
        "machine": machine.describe(device),
        "recipe": recipe,
        "steps": plan.steps,
        "tokens_per_step": plan.tokens(),
        "model": asdict(SHAPE) | {"experts": EXPERTS, "slots": SLOTS, "ffn": FFN, "activation": "swiglu"},
        "kept_bytes": kept_bytes(recipe, plan),
        "layer": dict(zip(("experts", "slots", "tokens", "hidden", "ffn"), LAYER, strict=True)),
        "gradient_errors": gradient_errors(recipe, device),
    }
    for seed in arguments.seeds:
        plan = Plan(arguments.steps, arguments.batch, seed, device, shape=SHAPE)
        losses["bf16"].append(train("bf16", "unquantized", plan))
        for storage in STORAGES:
            losses[storage].append(train(recipe, storage, plan))
        gaps = {
            "unquantized against bf16": gaps_percent(losses["unquantized"], losses["bf16"]),
            "fp8 against unquantized": gaps_percent(losses["fp8"], losses["unquantized"]),
        }
        report |= {
            "seeds": arguments.seeds[: len(losses["fp8"])],
            "losses": losses,
            "gaps_percent": gaps,
            "limit": asdict(FP8),
            "ok": FP8.admits(gaps["fp8 against unquantized"]),
        }
        study.write(report, arguments.json)
    return report


def gaps_percent(losses: list[float], baselines: list[float]) -> list[float]:
    return [100 * (loss / baseline - 1) for loss, baseline in zip(losses, baselines, strict=True)]


def render(report: dict[str, Any]) -> str:
    errors, kept = report["gradient_errors"], report["kept_bytes"]
    what = (
        f"experts in {report['recipe']}; {report['steps']} steps of {report['tokens_per_step']} bytes, seeds "
        f"{study.numbers(report['seeds'], 'd')}"
    )
    rows = [[name, study.numbers(found, ".4f")] for name, found in report["losses"].items()]
    rows += [
        [f"{name}, %", f"{study.numbers(found, '+.2f')}  mean {statistics.fmean(found):+.2f}"]
        for name, found in report["gaps_percent"].items()
    ]
    columns = [[storage, f"{kept[storage]:,}", *[f"{100 * errors[storage][name]:.2f}" for name in GRADIENTS]]
               for storage in STORAGES]  # fmt: skip
    return "\n\n".join([
        study.heading(report, what),
        table(("loss", "of each seed"), rows),
        table(("storage", "bytes kept", *[f"{name}, % error" for name in GRADIENTS]), columns),
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = study.parser_of("fc1_storage", __doc__)
    parser.add_argument("--recipe", default="fp8-block")
    study.add_training(parser, STEPS, BATCH, SEEDS)
    return study.run(parser, argv, measure, render)


if __name__ == "__main__":
    sys.exit(main())
