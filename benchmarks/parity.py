"""Does a recipe train as bf16 does? The loss gap of every recipe after 400 steps, over four seeds.

    python3 -m benchmarks.parity --json benchmarks/results/parity-cpu.json
    python3 -m benchmarks.parity --device cuda --recipes fp8-block nvfp4
    python3 -m benchmarks.parity --codes --recipes fp8-block --json benchmarks/results/parity-codes-h200.json
    python3 -m benchmarks.parity --device cuda --model moe --json benchmarks/results/parity-moe-h200.json

The runs are those of `octavo train`: a small GPT on a book, float32 master weights, the loss on text held out, and a
baseline in plain torch bf16 of the same seed. With `--model moe` its MLPs are mixtures of experts, the limits are
narrower, and the file has the share of the held-out text that each expert of each layer got. With `--codes` the weights
of a recipe's layers are codes, and `octavo.optim.AdamW` has their values in float32.

One gap is noise of a percent either way; the mean over seeds is what is held against a limit, and single runs against a
wider one. The recipe "bf16" is the control: the same arithmetic as the baseline but for the order of sums, so its gaps
are what rounding alone does. Exit code 1 if a limit is passed.
"""

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import study
from octavo.cli import machine
from octavo.demo.training import MODELS, Outcome, Plan, gap, shape_of, train
from octavo.recipes import SHIPPED, recipe
from octavo.text import table

STEPS, BATCH, SEEDS = 400, 16, (0, 1, 2, 3)


@dataclass(frozen=True)
class Limit:
    """How large a gap may be, in percent: the mean over seeds, and any one of them."""

    mean: float
    single: float
    either_way: bool = True  # whether a loss below the baseline's is held against it as one above is

    def admits(self, gaps: list[float]) -> bool:
        size = [abs(g) if self.either_way else g for g in gaps]
        mean = statistics.fmean(gaps)
        return max(size) <= self.single and (abs(mean) if self.either_way else mean) <= self.mean


FP8, NVFP4 = Limit(1.0, 2.0), Limit(3.0, 5.0, either_way=False)
MOE_FP8, MOE_NVFP4 = Limit(0.5, 2.0), Limit(1.5, 3.0, either_way=False)


def main(argv: list[str] | None = None) -> int:
    parser = study.parser_of("parity", __doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt", help="as in octavo train; default: %(default)s")
    parser.add_argument(
        "--codes", action="store_true", help="weights that are codes, octavo.optim.AdamW with float32 master values"
    )
    parser.add_argument("--recipes", nargs="+", default=list(SHIPPED))
    study.add_training(parser, STEPS, BATCH, SEEDS)
    return study.run(parser, argv, measure, render)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every run, seed by seed, so that an interrupted measurement leaves whole seeds behind."""
    chosen = {name: recipe(name) for name in arguments.recipes}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in chosen}
    baselines: list[Outcome] = []
    report: dict[str, Any] = {}
    for seed in arguments.seeds:
        plan = Plan(
            arguments.steps, arguments.batch, seed, device, shape=shape_of(arguments.model), codes=arguments.codes
        )
        print(f"seed {seed}", file=sys.stderr)
        baselines.append(train(plan, None, show=True))
        for name, subject in chosen.items():
            outcomes[name].append(train(plan, subject, show=True))
        report = {
            "machine": machine.describe(device),
            "model": arguments.model,
            "codes": arguments.codes,
            "steps": plan.steps,
            "tokens_per_step": plan.tokens(),
            "seeds": arguments.seeds[: len(baselines)],
            "bf16": {"losses": [b.loss for b in baselines], **loads(baselines)},
            "results": [judge(name, found, baselines, arguments.model) for name, found in outcomes.items()],
        }
        study.write(report, arguments.json)
    return report


def judge(name: str, found: list[Outcome], baselines: list[Outcome], model: str) -> dict[str, Any]:
    """A recipe's gaps, and whether they are within its limit."""
    gaps = [gap(outcome, baseline) for outcome, baseline in zip(found, baselines, strict=True)]
    limit = limit_of(name, model)
    return {
        "recipe": name,
        "losses": [outcome.loss for outcome in found],
        "gaps_percent": gaps,
        "mean_percent": statistics.fmean(gaps),
        "stdev_percent": statistics.stdev(gaps) if len(gaps) > 1 else None,
        "limit": asdict(limit),
        "ok": limit.admits(gaps),
        "tokens_per_s": statistics.median(outcome.tokens_per_s for outcome in found),
        **loads(found),
    }


def loads(found: list[Outcome]) -> dict[str, Any]:
    """The shares of the experts, for each seed and each layer, of a model that has experts."""
    return {"load": [outcome.load for outcome in found]} if found[0].load else {}


def limit_of(name: str, model: str = "gpt") -> Limit:
    if model == "moe":
        return MOE_NVFP4 if name.startswith("nvfp4") else MOE_FP8
    return NVFP4 if name.startswith("nvfp4") else FP8


def render(report: dict[str, Any]) -> str:
    kind = ", weights that are codes" if report["codes"] else ""
    what = f"{report['model']}{kind}, {report['steps']} steps of {report['tokens_per_step']} bytes"
    seeds, losses = study.numbers(report["seeds"], "d"), study.numbers(report["bf16"]["losses"], ".4f")
    head = f"{study.heading(report, what)}\nseeds {seeds}; bf16 losses {losses}"
    rows = [
        [
            row["recipe"],
            study.numbers(row["gaps_percent"], "+.2f"),
            f"{row['mean_percent']:+.2f}",
            "" if row["stdev_percent"] is None else f"{row['stdev_percent']:.2f}",
            "yes" if row["ok"] else "NO",
        ]
        for row in report["results"]
    ]
    return head + "\n\n" + table(("recipe", "gap of each seed, %", "mean", "stdev", "within limits"), rows)


if __name__ == "__main__":
    sys.exit(main())
