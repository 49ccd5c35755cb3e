"""Time forward and backward of a linear layer of many experts: in bf16, in recipes, and in torchao if installed.

Tokens are spread unevenly: the largest expert has up to three times as many as the smallest.

ms          one eager step after another, gradients dropped between them
graph ms    the same step replayed from a CUDA graph: the device's time alone
of bf16     ms / that of torch's grouped matrix product in bf16, in the same column
of floor    graph ms / the least it can take: matrix products at 1250 TFLOP/s, bytes that must be moved at 4.2 TB/s

A second table times the parts of a step: the three GEMMs (fprop the output, dgrad the gradient of the input, wgrad the
gradient of the weight), the casts of x, w and dy, and the layout of the groups. Padding does not count.

"cached" reuses the quantized weights, as every microbatch after the first does.

example: octavo bench grouped --shape 8,16384,4096,14336 --recipes fp8-block
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo._torch.operators import grouped_mm
from octavo.cli import options
from octavo.cli.bench import cases, peers
from octavo.cli.bench.training_steps import batch, calibrated_step
from octavo.cli.timing import device_ms, eager_ms
from octavo.kernels import grouped_gemm
from octavo.ops.grouped_linear import GroupedLinear
from octavo.quant.grouped import quantize_groups
from octavo.quant.groups import Groups, equal, split
from octavo.quant.quantizer import CastArgs
from octavo.recipes import LinearQuant, recipe
from octavo.text import table

SHAPES = ((8, 16384, 4096, 14336), (64, 32768, 2048, 2048), (128, 65536, 4096, 1536))  # experts, tokens, in, out
RECIPES = ("bf16", "fp8-delayed", "fp8-block", "fp8-current", "fp8-rowwise")
FLOOR = (1250e9, 4.2e9)  # FLOPs and bytes in a millisecond

FACTS = {"bias": False, "method": cases.MEDIAN}
COLUMNS = (
    ("ms", "ms", ".3f"), ("graph ms", "graph_ms", ".3f"), ("of bf16", "of_bf16", ".2f"),
    ("graph of bf16", "graph_of_bf16", ".2f"), ("of floor", "of_floor", ".2f"),
)  # fmt: skip

Shape = tuple[int, int, int, int]
Calls = dict[str, Callable[[], object]]
Makers = dict[str, Callable[[Tensor, int, int], nn.Module]]


def add_arguments(parser: ArgumentParser) -> None:
    options.add_shapes(parser, cases.SHAPES["grouped"], SHAPES)
    options.add_recipes(parser, RECIPES)
    options.add_no_peers(parser)


def measure(arguments: Namespace, report: dict[str, Any]) -> None:
    makers: Makers = {"grouped_mm bf16": Stock}
    for name in arguments.recipes:
        makers[f"octavo {name}"] = partial(_low, recipe=name)
        if recipe(name).linear().fprop.right is not None:
            makers[f"octavo {name}, cached"] = partial(_low, recipe=name, cached=True)
    quantized = [name for name in arguments.recipes if recipe(name).linear().fprop.left is not None]
    if not arguments.no_peers:
        makers |= peers.grouped()
    report["shapes"] = []
    for shape in arguments.shape or SHAPES:
        _measure_shape(shape, makers, quantized, report["shapes"])


def uneven(experts: int, tokens: int) -> Tensor:
    """Return group sizes that differ by up to a factor of three, not rounded to any multiple."""
    generator = torch.Generator("cpu").manual_seed(0)
    weights = torch.rand(experts, generator=generator, device="cpu", dtype=torch.float32) + 0.5
    sizes = (weights / weights.sum() * tokens).to(torch.int32)
    sizes[-1] += tokens - int(sizes.sum())
    return sizes


class Stock(nn.Module):
    """torch's grouped GEMM in bf16, with its own autograd."""

    def __init__(self, splits: Tensor, k: int, n: int) -> None:
        super().__init__()
        self.ends = splits.cumsum(0).to(torch.int32)
        self.weight = nn.Parameter(torch.randn(len(splits), n, k, device="cuda", dtype=torch.bfloat16) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return grouped_mm(x, self.weight.transpose(1, 2), self.ends)


class _Bound(nn.Module):
    """A GroupedLinear with fixed splits."""

    def __init__(self, layer: GroupedLinear, splits: Tensor, cached: bool) -> None:
        super().__init__()
        self.layer, self.splits, self.first = layer, splits, False if cached else None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.splits, self.first)


def _low(splits: Tensor, k: int, n: int, recipe: str, cached: bool = False) -> nn.Module:
    layer = GroupedLinear(len(splits), k, n, bias=False, device="cuda", dtype=torch.bfloat16, recipe=recipe)
    return _Bound(layer, splits, cached)


def _measure_shape(shape: Shape, makers: Makers, recipes: list[str], shapes: list[dict[str, Any]]) -> None:
    experts, tokens, k, n = shape
    splits = uneven(experts, tokens).cuda()
    x, dy = batch(tokens, k, n)
    floor = _floor_ms(shape)
    results: list[dict[str, Any]] = []
    parts: dict[str, dict[str, float]] = {}
    shapes.append(
        {"shape": list(shape), "splits": splits.tolist(), "floor_ms": floor, "results": results, "parts_ms": parts}
    )
    for name, make in makers.items():
        step = calibrated_step(module := make(splits, k, n), x, dy)
        ms, readings = eager_ms(step)
        row: dict[str, Any] = {"case": name, "ms": ms, "readings_ms": readings}
        if name.startswith(("octavo", "grouped_mm")):
            row["graph_ms"], row["graph_readings_ms"] = device_ms(step)
        baseline = results[0] if results else row
        row["of_bf16"] = row["ms"] / baseline["ms"]
        if "graph_ms" in row:
            row["graph_of_bf16"] = row["graph_ms"] / baseline["graph_ms"]
            row["of_floor"] = row["graph_ms"] / floor
        results.append(row)
        del module, step
        torch.cuda.empty_cache()
    parts["octavo bf16"] = _timed(plain_parts(shape, splits, x.detach(), dy))
    for name in recipes:
        parts[f"octavo {name}"] = _timed(parts_of(recipe(name).linear(), shape, splits, x.detach(), dy))
        torch.cuda.empty_cache()


def _timed(calls: Calls) -> dict[str, float]:
    return {name: device_ms(call)[0] for name, call in calls.items()}


def _floor_ms(shape: Shape) -> float:
    """Return the time of three GEMMs and of the casts: x, dy and w read once in bf16, written as codes both ways."""
    experts, tokens, k, n = shape
    moved = 4 * (tokens * k + tokens * n + experts * n * k)
    return 3 * 2 * tokens * k * n / FLOOR[0] + moved / FLOOR[1]


def parts_of(quant: LinearQuant, shape: Shape, splits: Tensor, x: Tensor, dy: Tensor) -> Calls:
    """Return the parts of a step as functions; the GEMMs write to buffers allocated here."""
    experts, tokens, k, n = shape
    w = torch.randn(experts * n, k, device=x.device, dtype=torch.bfloat16)
    groups, stacked = split(splits, tokens), equal(experts, n, x.device)
    of_x, of_w, of_dy = (
        (quant.fprop.left, quant.wgrad.right), (quant.fprop.right, quant.dgrad.right),
        (quant.dgrad.left, quant.wgrad.left),
    )  # fmt: skip

    def cast(t: Tensor, pair: Any, of: Groups) -> Any:
        return quantize_groups(t, pair[0], pair[1], of, given)

    # only delayed scaling takes its inverse scales as an argument, and measures amaxes in the cast
    delayed = quant.dgrad.left is not None and quant.dgrad.left.takes_inverse_scale and "E5M2" in quant.dgrad.left.key
    one = torch.ones(experts, device=x.device, dtype=torch.float32)
    given = CastArgs(inverse_scale=one, running_amax=torch.zeros_like(one)) if delayed else CastArgs()
    (xr, xc), (wr, wc), (dr, dc) = cast(x, of_x, groups), cast(w, of_w, stacked), cast(dy, of_dy, groups)
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w).view(experts, n, k)
    height, fprop, dgrad = wr.q.rows // experts, quant.fprop.accumulation, quant.dgrad.accumulation
    return {
        "split": lambda: split(splits, tokens),
        "quantize x": lambda: cast(x, of_x, groups),
        "quantize w": lambda: cast(w, of_w, stacked),
        "quantize dy": lambda: cast(dy, of_dy, groups),
        "fprop": lambda: grouped_gemm.rows(xr, wr.q, y, height=height, accumulation=fprop),
        "dgrad": lambda: grouped_gemm.rows(dr, wc.q, dx, height=height, along="columns", accumulation=dgrad),
        "wgrad": lambda: grouped_gemm.grouped_wgrad(dc, xc, dw),
    }


def plain_parts(shape: Shape, splits: Tensor, x: Tensor, dy: Tensor) -> Calls:
    """Return the parts of a step in bf16."""
    experts, tokens, k, n = shape
    w = torch.randn(experts, n, k, device=x.device, dtype=torch.bfloat16)
    groups = split(splits, tokens)
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    return {
        "split": lambda: split(splits, tokens),
        "fprop": lambda: grouped_gemm.plain_rows(x, w, y, groups),
        "dgrad": lambda: grouped_gemm.plain_rows(dy, w.transpose(1, 2), dx, groups),
        "wgrad": lambda: grouped_gemm.fresh_wgrad(dy, x, groups, dy.dtype),
    }


def render(report: dict[str, Any]) -> str:
    tables = [f"{title(e)}\n{cases.render(COLUMNS, e['results'])}\n{_rates(e)}" for e in report["shapes"]]
    return "\n\n".join([cases.heading(report, cases.LAYER), *tables])


def title(entry: dict[str, Any]) -> str:
    """Return the line above the table of a shape."""
    (experts, tokens, k, n), sizes = entry["shape"], entry["splits"]
    return f"{experts} experts of {min(sizes)} to {max(sizes)} tokens, {tokens} in all, {k} -> {n}"


def _rates(entry: dict[str, Any]) -> str:
    """Return the table of the GEMMs and the casts alone."""
    _, tokens, k, n = entry["shape"]
    rows = []
    for case, ms in entry["parts_ms"].items():
        rates = [f"{2 * tokens * k * n / ms[name] / 1e9:.0f}" for name in ("fprop", "dgrad", "wgrad")]
        casts = [f"{ms[f'quantize {t}']:.3f}" if f"quantize {t}" in ms else "-" for t in ("x", "w", "dy")]
        rows.append([case, *rates, *casts, f"{ms['split']:.3f}"])
    names = ("alone", "fprop TFLOP/s", "dgrad", "wgrad", "quantize x, ms", "w", "dy", "groups")
    return table(names, rows)
