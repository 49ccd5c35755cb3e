"""Time a compiled transformer block, forward and backward: in bf16, in recipes, and in torchao if installed.

ms          one step after another, gradients dropped between them; torch.compile takes the whole block
of bf16     ms / the compiled bf16 block's
eager ms    the same block, not compiled
compile s   seconds of the first compiled step beyond a later one; torch's caches of earlier runs are not read, but
            Octavo's own kernels were compiled by then
peak MiB    the most that one step allocates beyond what stays allocated between steps

Then one tiny layer under mode="reduce-overhead", which replays CUDA graphs:

host us     microseconds the CPU takes to start one step; median of rounds in which the layers take turns
skips       graphs that the compiler left without a CUDA graph

On a CPU (--device cpu --size tiny) the suite only shows that everything runs: torch.compile generates no code there
(backend aot_eager).

example: octavo bench block --recipes fp8-current
"""

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from octavo._torch.compilation import cudagraph_skips, reset
from octavo.cli import machine, options
from octavo.cli.bench import cases, linear_bench, peers
from octavo.cli.bench.training_steps import (
    backend,
    batch,
    calibrated_step,
    compiled,
    no_caches,
    peak_mib,
    step_ms,
    step_seconds,
    training_step,
)
from octavo.cli.timing import WARMUP, host_us
from octavo.demo.transformer import Size, swiglu_block
from octavo.model.convert import convert
from octavo.model.step import step as end_step
from octavo.recipes import SHIPPED

SIZES = {"full": Size(2, 4096, 4096, 32, 14336), "tiny": Size(2, 16, 32, 2, 64)}
RECIPES = ("fp8-delayed", "fp8-current", "fp8-block")
HOST_REPEATS, HOST_ROUNDS = 4, 100
FACTS = {"bias": False, "method": cases.MEDIAN | {"host_repeats": HOST_REPEATS, "host_rounds": HOST_ROUNDS}}
COLUMNS = (
    ("ms", "ms", ".3f"), ("of bf16", "of_bf16", ".2f"), ("eager ms", "eager_ms", ".3f"),
    ("compile s", "compile_s", ".1f"), ("peak MiB", "peak_mib", ".0f"), ("eager peak MiB", "eager_peak_mib", ".0f"),
)  # fmt: skip
HOST_COLUMNS = (("host us", "us", ".0f"), ("over nn.Linear", "over", "+.0f"), ("skips", "skips", ""))

Conversion = Callable[[nn.Module], object]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--size", choices=tuple(SIZES), default="full",
        help="full: 8192 tokens of width 4096; tiny: 32 of width 32, for a CPU; default: %(default)s",
    )  # fmt: skip
    options.add_cpu_device(parser)
    options.add_recipes(parser, RECIPES)
    options.add_no_peers(parser)


def measure(arguments: Namespace, report: dict[str, Any]) -> None:
    device, size = machine.parse_device(arguments.device), SIZES[arguments.size]
    conversions: dict[str, Conversion] = {"bf16": lambda model: None}
    conversions |= {f"octavo {name}": partial(convert, recipe=name) for name in arguments.recipes}
    if not arguments.no_peers:
        conversions |= peers.conversions()
    results: list[dict[str, Any]] = []
    report |= {"size": vars(size), "backend": backend(device), "results": results}
    report |= {"host_shape": list(linear_bench.TINY), "host": []}
    for name, conversion in conversions.items():
        row = _case(name, conversion, size, device)
        row["of_bf16"] = row["ms"] / (results[0] if results else row)["ms"]
        results.append(row)
    report["host"] = _hosts(device)


# -- the block -------------------------------------------------------------------------------------------------------


def _case(name: str, conversion: Conversion, size: Size, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    model = swiglu_block(size).to(device, torch.bfloat16)
    conversion(model)
    x = torch.randn(size.batch, size.length, size.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x).detach() * 1e-2
    step = training_step(model, x, dy)
    step()
    end_step(model)  # delayed scaling: from here scales follow the data, as in training
    row: dict[str, Any] = {"case": name}
    row["eager_ms"], row["eager_readings_ms"] = step_ms(step, device)
    row["eager_peak_mib"] = peak_mib(step, device)
    reset()
    with no_caches(device):
        step = training_step(model, x, dy, compiled(model, device))
        first = step_seconds(step, device)
        row["ms"], row["readings_ms"] = step_ms(step, device)
        row["peak_mib"] = peak_mib(step, device)
    row["compile_s"] = first - row["ms"] / 1e3
    return row


# -- the host --------------------------------------------------------------------------------------------------------


def _hosts(device: torch.device) -> list[dict[str, Any]]:
    """Time one tiny layer of each kind under reduce-overhead. They take turns, so that drift of the host cancels."""
    reset()
    makers: dict[str, Callable[[int, int], nn.Module]] = {"nn.Linear": partial(linear_bench.stock, device=device)}
    makers |= {f"octavo {name}": partial(linear_bench.low, recipe=name, device=device) for name in SHIPPED}
    steps = {name: _tiny_step(make, device) for name, make in makers.items()}
    readings: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(HOST_ROUNDS if device.type == "cuda" else 1):
        for name, (step, _) in steps.items():
            us = host_us(step, repeats=HOST_REPEATS) if device.type == "cuda" else step_ms(step, device)[0] * 1e3
            readings[name].append(us)
    return [
        {"case": name, "us": statistics.median(readings[name]), "rounds_us": readings[name], "skips": skips}
        for name, (_, skips) in steps.items()
    ]


def _tiny_step(make: Callable[[int, int], nn.Module], device: torch.device) -> tuple[Callable[[], None], int]:
    """Return one step of a tiny layer, compiled and warmed up, and the number of CUDA graphs skipped meanwhile."""
    module, (x, dy) = make(*linear_bench.TINY[1:]), batch(*linear_bench.TINY, device)
    skips = cudagraph_skips()
    calibrated_step(module, x, dy)  # delayed scaling: an uncalibrated step would measure amaxes
    step = training_step(module, x, dy, compiled(module, device, "reduce-overhead"))
    for _ in range(WARMUP if device.type == "cuda" else 1):
        step()
    return step, cudagraph_skips() - skips


# -- as text ---------------------------------------------------------------------------------------------------------


def render(report: dict[str, Any]) -> str:
    size, host = report["size"], report["host"]
    what = f"bfloat16, forward + backward, torch.compile(fullgraph=True), backend {report['backend']}"
    head = (
        f"{cases.heading(report, what)}\nblock of width {size['width']}, {size['heads']} heads, MLP {size['hidden']}; "
        f"{size['batch']} x {size['length']} tokens"
    )
    text = f"{head}\n{cases.render(COLUMNS, report['results'])}"
    if not host:
        return text
    tokens, k, n = report["host_shape"]
    rows = [r | {"over": r["us"] - host[0]["us"]} for r in host]
    return f'{text}\n\nlayer {tokens} x {k} -> {n}, mode="reduce-overhead"\n{cases.render(HOST_COLUMNS, rows)}'
