"""Time the three matrix products of a layer of experts, each alone, on operands that were quantized beforehand.

Tokens are spread unevenly, as in `octavo bench grouped`, whose second table has the same rates.

fprop       the output
dgrad       the gradient of the input
wgrad       the gradient of the weight
ms          time on the GPU, from CUDA graphs
TFLOP/s     of the tokens that there are: padding does not count

Shapes that differ only in the number of experts are compared in a last table, the largest number with the smallest.

example: octavo bench grouped-gemms --shape 64,65536,4096,1536 --shape 256,65536,4096,1536 --recipes fp8-delayed
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from octavo.cli import machine, options
from octavo.cli.bench import cases, grouped_bench
from octavo.cli.bench.grouped_bench import Calls, Shape
from octavo.cli.bench.training_steps import batch
from octavo.cli.timing import device_ms
from octavo.recipes import recipe
from octavo.text import table

SHAPES = (*grouped_bench.SHAPES, (64, 65536, 4096, 1536), (256, 65536, 4096, 1536))
RECIPES = ("fp8-delayed", "fp8-block")
GEMMS = ("fprop", "dgrad", "wgrad")
FACTS = {"bias": False, "method": cases.REPLAYS}
COLUMNS = (("ms", "ms", ".3f"), ("TFLOP/s", "tflops", ".0f"))


def add_arguments(parser: ArgumentParser) -> None:
    options.add_shapes(parser, cases.SHAPES["grouped-gemms"], SHAPES)
    options.add_recipes(parser, RECIPES)


def measure(arguments: Namespace, report: dict[str, Any]) -> None:
    device = machine.parse_device("cuda")
    report["shapes"] = []
    for shape in arguments.shape or SHAPES:
        _measure_shape(shape, arguments.recipes, device, report["shapes"])
    report["experts"] = by_experts(report["shapes"])


def _measure_shape(shape: Shape, recipes: list[str], device: torch.device, shapes: list[dict[str, Any]]) -> None:
    splits = grouped_bench.uneven(*shape[:2])
    results: list[dict[str, Any]] = []
    shapes.append({"shape": list(shape), "splits": splits.tolist(), "results": results})
    for name in recipes:
        calls: Calls = {}
        row = cases.attempt(f"octavo {name}", partial(_prepare, name, shape, device, calls))
        results.extend([row] if "error" in row else [])
        for gemm in GEMMS if calls else ():
            found = cases.attempt(f"octavo {name}, {gemm}", partial(_timed, calls[gemm], shape))
            results.append({**found, "recipe": name, "gemm": gemm})


def _prepare(name: str, shape: Shape, device: torch.device, calls: Calls) -> dict[str, Any]:
    """Add the products of a recipe to `calls`."""
    experts, tokens, k, n = shape
    splits = torch.tensor(grouped_bench.uneven(experts, tokens).tolist(), dtype=torch.int32, device=device)
    x, dy = batch(tokens, k, n, device)
    quant = recipe(name).linear()
    if quant.fprop.left is None:
        calls |= grouped_bench.plain_parts(shape, splits, x.detach(), dy)
    else:
        calls |= grouped_bench.parts_of(quant, shape, splits, x.detach(), dy)
    return {}


def _timed(call: Callable[[], object], shape: Shape) -> dict[str, Any]:
    _, tokens, k, n = shape
    ms, readings = device_ms(call)
    return {"ms": ms, "tflops": 2 * tokens * k * n / ms / 1e9, "readings_ms": readings}


def by_experts(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each set of shapes that differ only in the number of experts, the milliseconds of each product by
    that number, and the ratio of the largest number to the smallest."""
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for entry in sorted(shapes, key=lambda entry: entry["shape"][0]):
        experts, *others = entry["shape"]
        for row in entry["results"]:
            if "ms" in row:
                found.setdefault((*others, row["recipe"], row["gemm"]), {})[experts] = row["ms"]
    return [
        {"shape": list(others), "recipe": name, "gemm": gemm, "experts": list(ms), "ms": list(ms.values()),
         "ratio": ms[max(ms)] / ms[min(ms)]}
        for (*others, name, gemm), ms in found.items() if len(ms) > 1
    ]  # fmt: skip


def render(report: dict[str, Any]) -> str:
    parts = [cases.heading(report, "bfloat16, matrix products alone")]
    for entry in report["shapes"]:
        if entry["results"]:
            parts.append(f"{grouped_bench.title(entry)}\n{cases.render(COLUMNS, entry['results'])}")
    compared = [_compared(e) for e in by_experts(report["shapes"])]
    parts += [table(("tokens, in, out", "case", "ms by experts", "ratio"), compared)] if compared else []
    return "\n\n".join(parts)


def _compared(e: dict[str, Any]) -> list[str]:
    times = ", ".join(f"{experts}: {ms:.3f}" for experts, ms in zip(e["experts"], e["ms"], strict=True))
    ratio = f"{e['ratio']:.2f} ({max(e['experts'])} / {min(e['experts'])})"
    return [" ".join(map(str, e["shape"])), f"octavo {e['recipe']}, {e['gemm']}", times, ratio]
