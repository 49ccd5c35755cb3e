"""Forward and backward of a linear layer of many experts, tokens spread unevenly: bf16, recipes, other libraries.

ms          one eager step after another, gradients dropped between them
graph ms    the same step replayed from a CUDA graph: what the device alone takes
of bf16     ms / that of torch's grouped GEMM in bf16, in the same column
TFLOP/s     of each of the three GEMMs alone, codes given; rows that are no token's do not count
quantize    of x, w and dy alone
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.cli import machine, table
from octavo.cli.bench import peers
from octavo.cli.bench.step import training_step
from octavo.cli.timing import REPEATS, WARMUP, device_ms, eager_ms
from octavo.kernels import grouped_gemm
from octavo.modules import GroupedLinear
from octavo.quant import Block1D, Block2D
from octavo.quant.grouped import quantize_groups
from octavo.quant.groups import split

SHAPES = ((8, 16384, 4096, 14336), (64, 32768, 2048, 2048), (128, 65536, 4096, 1536))  # experts, tokens, in, out
RECIPES = ("fp8-block",)

Shape = tuple[int, int, int, int]
Layer = Callable[[Tensor], Tensor]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", default=None, help="experts,tokens,in,out; may be repeated")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="comma-separated")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out")


def measure(arguments: Namespace) -> dict[str, Any]:
    shapes = [tuple(map(int, s.split(","))) for s in arguments.shape or ()] or list(SHAPES)
    makers: dict[str, Callable[[Tensor, int, int], nn.Module]] = {"grouped_mm bf16": Stock}
    makers |= {f"octavo {name}": partial(_low, recipe=name) for name in arguments.recipes.split(",")}
    if not arguments.no_peers:
        makers |= peers.grouped()
    return {
        "suite": "grouped",
        "machine": machine.describe(torch.device("cuda", torch.cuda.current_device())),
        "dtype": "bfloat16",
        "bias": False,
        "peers": peers.versions(),
        "method": {"warmup": WARMUP, "repeats": REPEATS, "statistic": "median"},
        "shapes": [_shape_report(shape, makers) for shape in shapes],  # type: ignore[arg-type]
    }


def uneven(experts: int, tokens: int) -> Tensor:
    """Sizes that differ by up to a factor of three, none a multiple of anything."""
    weights = torch.rand(experts, generator=torch.Generator().manual_seed(0)) + 0.5
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
        return torch._grouped_mm(x, self.weight.transpose(1, 2), self.ends)


class _Bound(nn.Module):
    """A GroupedLinear with its splits."""

    def __init__(self, layer: GroupedLinear, splits: Tensor) -> None:
        super().__init__()
        self.layer, self.splits = layer, splits

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, self.splits)
        return y


def _low(splits: Tensor, k: int, n: int, recipe: str) -> nn.Module:
    layer = GroupedLinear(len(splits), k, n, bias=False, device="cuda", dtype=torch.bfloat16, recipe=recipe)
    return _Bound(layer, splits)


def _shape_report(shape: Shape, makers: dict[str, Callable[[Tensor, int, int], nn.Module]]) -> dict[str, Any]:
    experts, tokens, k, n = shape
    splits = uneven(experts, tokens).cuda()
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) * 1e-2
    results = []
    for name, make in makers.items():
        step = training_step(module := make(splits, k, n), x, dy)
        ms, readings = eager_ms(step)
        row: dict[str, Any] = {"case": name, "ms": ms, "readings_ms": readings}
        if name.startswith(("octavo", "grouped_mm")):
            row["graph_ms"], row["graph_readings_ms"] = device_ms(step)
        results.append(row)
        del module, step
        torch.cuda.empty_cache()
    for row in results:
        row["of_bf16"] = row["ms"] / results[0]["ms"]
        if "graph_ms" in row:
            row["graph_of_bf16"] = row["graph_ms"] / results[0]["graph_ms"]
    parts = {name: device_ms(call)[0] for name, call in _parts(shape, splits, x.detach(), dy).items()}
    return {"shape": list(shape), "splits": splits.tolist(), "results": results, "parts_ms": parts}


def _parts(shape: Shape, splits: Tensor, x: Tensor, dy: Tensor) -> dict[str, Callable[[], object]]:
    """What an fp8-block step is made of, into buffers that are there."""
    experts, tokens, k, n = shape
    activation, weights = Block1D(), Block2D()
    w = torch.randn(experts * n, k, device="cuda", dtype=torch.bfloat16)
    groups = split(splits, tokens)
    (xr, xc), (dr, dc) = (quantize_groups(t, activation, activation, groups) for t in (x, dy))
    wr, wc = weights.quantize_both(w)
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w).view(experts, n, k)
    assert xr is not None and xc is not None and dr is not None and dc is not None
    return {
        "split": lambda: split(splits, tokens),
        "quantize x": lambda: quantize_groups(x, activation, activation, groups),
        "quantize w": lambda: weights.quantize_both(w),
        "quantize dy": lambda: quantize_groups(dy, activation, activation, groups),
        "fprop": lambda: grouped_gemm.rows(xr, wr, y, height=n),
        "dgrad": lambda: grouped_gemm.rows(dr, wc, dx, height=n, along="columns"),
        "wgrad": lambda: grouped_gemm.depth(dc, xc, dw),
    }


def render(report: dict[str, Any]) -> str:
    facts = report["machine"]
    parts = [f"{facts['gpu']}, torch {facts['torch']}, triton {facts['triton']}; bfloat16, no bias, forward + backward"]
    for entry in report["shapes"]:
        experts, tokens, k, n = entry["shape"]
        rows = [
            [
                r["case"],
                f"{r['ms']:.3f}",
                f"{r['graph_ms']:.3f}" if "graph_ms" in r else "-",
                f"{r['of_bf16']:.2f}",
                f"{r['graph_of_bf16']:.2f}" if "graph_ms" in r else "-",
            ]
            for r in entry["results"]
        ]
        sizes = entry["splits"]
        title = f"{experts} experts of {min(sizes)} to {max(sizes)} tokens, {tokens} in all, {k} -> {n}"
        body = table.render(("case", "ms", "graph ms", "of bf16", "graph of bf16"), rows)
        parts.append(f"{title}\n{body}\n{_line(entry)}")
    return "\n\n".join(parts)


def _line(entry: dict[str, Any]) -> str:
    _, tokens, k, n = entry["shape"]
    ms = entry["parts_ms"]
    rates = ", ".join(f"{name} {2 * tokens * k * n / ms[name] / 1e9:.0f}" for name in ("fprop", "dgrad", "wgrad"))
    rest = ", ".join(f"{name.removeprefix('quantize ')} {ms[name]:.3f}" for name in ms if name.startswith("quantize"))
    return f"fp8-block alone: TFLOP/s {rates}; quantize, ms: {rest}; layout of the groups {ms['split']:.3f}"
