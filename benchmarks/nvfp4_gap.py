"""Train with settings and policies that may lower NVFP4's loss gap: every candidate over four seeds.

    python3 -m benchmarks.nvfp4_gap --processes 8 --budget 120 --json benchmarks/results/nvfp4-gap-h200.json
    python3 -m benchmarks.nvfp4_gap --model moe --candidates nvfp4 "last block bf16" --json nvfp4-gap-moe.json
    python3 -m benchmarks.nvfp4_gap --look --device cpu

The runs are those of `benchmarks.parity`: 400 steps of 16 x 128 bytes, the loss on text held out, a bf16 baseline of
the same seed. A candidate is a recipe or a policy. `in bf16` is the gap of the same weights evaluated without
quantization: where it is as large as the gap, the weights are worse; where it is smaller, the evaluation's own rounding
costs the rest. Runs are small and bound by the host, so several processes share the GPU. Candidates run in order of
interest; once the budget is spent no run starts, and those with fewer seeds say so.

`--look` trains a model in bf16, then prints what NVFP4 does to its tensors (octavo.inspect), and the errors of its
gradients with single GEMMs in bf16 and other roundings (octavo.compare).
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch

import octavo
from benchmarks import study
from octavo.cli import machine
from octavo.demo import corpus
from octavo.demo.gpt import GPT, loss_of
from octavo.demo.training import MODELS, Plan, evaluate, shape_of, train
from octavo.model.policy import Policy
from octavo.quant import MX
from octavo.quant import NVFP4 as Quantizer
from octavo.recipes import LinearQuant, Recipe, recipe
from octavo.text import table
from octavo.values import register

STEPS, BATCH, SEEDS = 400, 16, (0, 1, 2, 3)
LIMIT = 1.5  # percent
BASELINE = "bf16 (torch)"


@register("nvfp4-study")
class Study(Recipe):
    """nvfp4 with each rotation and each rounding on its own."""

    fprop_rht: bool = False
    dgrad_rht: bool = False
    wgrad_rht: bool = True
    dgrad_stochastic: bool = True
    wgrad_stochastic: bool = True
    fprop: str = "quantized"
    dgrad: str = "quantized"
    wgrad: str = "quantized"
    fprop_mx: bool = False  # forward in MXFP8

    def gemms(self) -> LinearQuant:
        forward = MX() if self.fprop_mx else Quantizer(rht=self.fprop_rht)
        return LinearQuant.of(
            x=(forward, Quantizer(rht=self.wgrad_rht)),
            w=(forward, Quantizer(rht=self.dgrad_rht)),
            dy=(
                Quantizer(rht=self.dgrad_rht, stochastic=self.dgrad_stochastic),
                Quantizer(rht=self.wgrad_rht, stochastic=self.wgrad_stochastic),
            ),
        )


def keep(layers: str | list[str], other: str = "bf16", rest: str = "nvfp4", **more: Any) -> Policy:
    """A policy that gives some layers another recipe."""
    return Policy([{"layers": layers, "recipe": other, **more}, {"layers": "*", "recipe": rest}])


def switch(share: float, steps: int, to: str, rest: str = "nvfp4") -> Policy:
    """A policy that gives all layers another recipe for the last share of the steps."""
    return Policy([
        {"layers": "*", "recipe": to, "from_step": round(steps * (1 - share))},
        {"layers": "*", "recipe": rest},
    ])  # fmt: skip


def candidates(steps: int) -> dict[str, str | Policy]:
    """All candidates by name, those that may be shipped first."""
    return {
        "nvfp4": "nvfp4",
        # settings of the recipe
        "fprop bf16": "nvfp4(fprop='bf16')",
        "weights 1x16": "nvfp4(square_weights=False)",
        "fprop mxfp8": "nvfp4-study(fprop_mx=True)",
        "fprop rotated": "nvfp4-study(fprop_rht=True)",
        # policies: a sixth of the weights, a third, a half
        "last down bf16": keep("blocks.1.mlp.down"),
        "down bf16": keep("*.down"),
        "last mlp bf16": keep("blocks.1.mlp"),
        "last block bf16": keep("*", blocks="last 1"),
        "last block fp8-block": keep("*", "fp8-block", blocks="last 1"),
        "last block mxfp8": keep("*", "mxfp8", blocks="last 1"),
        "first block bf16": keep("*", blocks="first 1"),
        "attention bf16": keep("*.attention"),
        "qkv bf16": keep("*.qkv"),
        # a last part of the steps in another recipe
        "last 10 % bf16": switch(0.1, steps, "bf16"),
        "last 20 % bf16": switch(0.2, steps, "bf16"),
        "last 20 % fprop bf16": switch(0.2, steps, "nvfp4(fprop='bf16')"),
        "last 20 % fp8-block": switch(0.2, steps, "fp8-block"),
        # which GEMM, and which rounding
        "backward bf16": "nvfp4(backward='high_precision')",
        "wgrad bf16": "nvfp4(wgrad='bf16')",
        "dgrad bf16": "nvfp4(dgrad='bf16')",
        "nearest": "nvfp4(stochastic=False)",
        "no rotation": "nvfp4(rht=False)",
        "all rotated": "nvfp4-study(fprop_rht=True,dgrad_rht=True)",
        "dgrad nearest": "nvfp4-study(dgrad_stochastic=False)",
        "wgrad nearest": "nvfp4-study(wgrad_stochastic=False)",
        "up bf16": keep("*.up"),
        "out bf16": keep("*.out"),
    }


def main(argv: list[str] | None = None) -> int:
    parser = study.parser_of("nvfp4_gap", __doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt", help="as in octavo train; default: %(default)s")
    parser.add_argument("--candidates", nargs="+", default=None, choices=list(candidates(STEPS)), metavar="NAME")
    study.add_training(parser, STEPS, BATCH, SEEDS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no run starts")
    parser.add_argument("--look", action="store_true", help="inspect and compare one model instead")
    arguments = parser.parse_args(argv)
    if not arguments.look:
        return study.run(parser, argv, measure, render)
    device = machine.parse_device(arguments.device)
    look(Plan(arguments.steps, arguments.batch, arguments.seeds[0], device, shape=shape_of(arguments.model)))
    return 0


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every run, in so many processes, the baseline first; the report as far as the budget allows."""
    names = [BASELINE, *(arguments.candidates or candidates(arguments.steps))]
    todo = [(name, seed) for name in names for seed in arguments.seeds]
    started, runs, report = time.monotonic(), [], {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        arguments.processes, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        going: set[Future[dict[str, Any]]] = set()
        while todo or going:
            while todo and len(going) < arguments.processes and time.monotonic() - started < arguments.budget:
                name, seed = todo.pop(0)
                job = (arguments.model, name, seed, arguments.steps, arguments.batch, str(device))
                going.add(pool.submit(one_run, *job))
            if not going:
                break
            done, going = wait(going, return_when=FIRST_COMPLETED)
            runs += [future.result() for future in done]
            report = summary(arguments, device, names, runs, time.monotonic() - started)
            print(f"{len(runs)} runs, {report['seconds']:.0f} s, {runs[-1]['candidate']}", file=sys.stderr)
            study.write(report, arguments.json)
    return report


def one_run(model: str, name: str, seed: int, steps: int, batch: int, device: str) -> dict[str, Any]:
    """Train one candidate, and evaluate its weights in bf16 too."""
    plan = Plan(steps, batch, seed, torch.device(device), shape=shape_of(model))
    spec = None if name == BASELINE else candidates(steps)[name]
    unquantized: list[float] = []

    def ended(trained: torch.nn.Module) -> None:
        plain = GPT(plan.shape, seed=seed, plain=True).to(plan.device)
        plain.load_state_dict(trained.state_dict(), strict=True)
        held_out = corpus.windows(corpus.load()[1], context=plan.shape.context)
        unquantized.append(statistics.fmean(evaluate(plain, held_out, plan)))

    try:
        outcome = train(plan, recipe(spec) if isinstance(spec, str) else spec, ended=ended)
    except Exception as error:  # one candidate that fails must not cost the others
        return {"candidate": name, "seed": seed, "error": f"{type(error).__name__}: {error}"}
    return {
        "candidate": name, "seed": seed, "loss": outcome.loss, "loss_in_bf16": unquantized[0],
        "seconds": outcome.seconds,
    }  # fmt: skip


def summary(
    arguments: argparse.Namespace, device: torch.device, names: list[str], runs: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """The gaps of the candidates that have a baseline of the same seed."""
    failed = [run for run in runs if "error" in run]
    runs = [run for run in runs if "error" not in run]
    base = {run["seed"]: run["loss"] for run in runs if run["candidate"] == BASELINE}
    results = []
    for name in names[1:]:
        found = sorted((r for r in runs if r["candidate"] == name and r["seed"] in base), key=lambda r: r["seed"])
        if not found:
            continue
        gaps = [100 * (run["loss"] / base[run["seed"]] - 1) for run in found]
        results.append({
            "candidate": name, "setting": str(candidates(arguments.steps)[name]), "seeds": [r["seed"] for r in found],
            "gaps_percent": gaps, "mean_percent": statistics.fmean(gaps),
            "stdev_percent": statistics.stdev(gaps) if len(gaps) > 1 else None,
            "in_bf16_percent": statistics.fmean(100 * (r["loss_in_bf16"] / base[r["seed"]] - 1) for r in found),
        })  # fmt: skip
    return {
        "machine": machine.describe(device), "model": arguments.model, "steps": arguments.steps,
        "tokens_per_step": arguments.batch * shape_of(arguments.model).context, "limit_percent": LIMIT,
        "bf16": base, "results": results, "failed": failed, "seconds": seconds,
    }  # fmt: skip


def render(report: dict[str, Any]) -> str:
    losses = study.numbers(list(report["bf16"].values()), ".4f")
    what = f"{report['model']}, {report['steps']} steps of {report['tokens_per_step']} bytes"
    head = study.heading(report, f"{what}, {report['seconds']:.0f} s; bf16 {losses}")
    rows = [
        [
            row["candidate"], study.numbers(row["gaps_percent"], "+.2f"), f"{row['mean_percent']:+.2f}",
            "" if row["stdev_percent"] is None else f"{row['stdev_percent']:.2f}", f"{row['in_bf16_percent']:+.2f}",
            "yes" if row["mean_percent"] <= report["limit_percent"] else "no",
        ]
        for row in report["results"]
    ]  # fmt: skip
    columns = ("candidate", "gap of each seed, %", "mean", "stdev", "in bf16", f"within {report['limit_percent']} %")
    failed = [f"{run['candidate']}, seed {run['seed']}: {run['error']}" for run in report["failed"]]
    return "\n\n".join([head, table(columns, rows), *failed])


def look(plan: Plan) -> None:
    """Print what NVFP4 does to a model that was trained in bf16."""
    trained: list[GPT] = []

    def ended(model: torch.nn.Module) -> None:
        assert isinstance(model, GPT)
        trained.append(model)

    train(plan, None, show=True, ended=ended)
    (model,) = trained
    text, _ = corpus.load()
    data = list(corpus.batches(text, steps=4, batch=plan.batch, context=plan.shape.context, seed=plan.seed + 1))

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return loss_of(self.model, batch)

    batches = [batch.to(plan.device) for batch in data]
    for first, second in (
        ("nvfp4", "nvfp4(fprop='bf16')"),
        ("nvfp4(wgrad='bf16')", "nvfp4(dgrad='bf16')"),
        ("nvfp4(square_weights=False)", "nvfp4(stochastic=False)"),
        ("nvfp4(rht=False)", "nvfp4-study(fprop_rht=True)"),
    ):
        print(octavo.compare(Loss(), batches, first, second), "\n")
    octavo.convert(model, "nvfp4", exclude="head")
    with octavo.inspect(model) as report:
        for batch in batches:
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
    print(report)


if __name__ == "__main__":
    sys.exit(main())
