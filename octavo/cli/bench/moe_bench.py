"""Time forward and backward of a whole mixture of experts: router, permutation, SwiGLU experts, weighted sum.

The router is a matrix product, softmax and top-k in torch, for all cases but octavo.MoE, which has its own in float32.
It prefers some experts: the largest gets about three times the tokens of the smallest. "grouped_mm bf16" is torch's
grouped matrix product with permutation, activation and sum in torch; "octavo" is `octavo.moe.Experts`; "octavo.MoE" is
that layer itself, which also counts the load; "torchao" is as grouped_mm, with its own product in FP8.

ms             one step after another, gradients dropped between them, as training runs it
tokens/s       tokens of a step / ms
of bf16        ms / that of compiled bf16
of floor       ms / the least it can take: matrix products at 1250 TFLOP/s, bytes that must be moved at 4.2 TB/s
held MiB       memory that stays between steps: parameters, codes of them, states of the optimizer; no gradients
kept MiB       memory that forward allocates and keeps for backward, without quantized weights
weights MiB    memory of the quantized weights that forward keeps besides
peak MiB       the most that one step allocates beyond what was there before it, the last step's gradients among it

"cached" reuses the quantized weights, as every microbatch after the first does. "codes" has weights that are codes
(`octavo.quantize_weights(trainable=True)`), which nothing casts; "columns kept" has those of wᵀ too
(`keep_columns=True`), which backward makes otherwise. --optimizer adds cases whose step ends with AdamW:
torch's, fused, and octavo.optim.AdamW where weights are codes, both in bf16. "captured" replays forward and backward
from one CUDA graph; its peak is that of the capture. "compiled" is torch.compile of the whole layer. A second table
lists the GPU kernels of one eager step of each recipe, the longest first. --brief takes fewer readings, and times
compiled bf16 and Octavo's eager experts alone. --allocations lists the allocations of 64 MiB and more in a step of each
eager case, and which of them are there at its peak. A case that fails is listed with its error, and the others go on.
Other libraries come last, each case in a process of its own.

example: octavo bench moe --shape 8192,64,6,2048,1408 --recipes fp8-delayed,fp8-block --compiled fp8-delayed
"""

import argparse
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo._torch.compilation import reset
from octavo._torch.operators import grouped_mm
from octavo.cli import options
from octavo.cli.bench import allocations, cases, isolated, peers
from octavo.cli.bench.training_steps import (
    adamw,
    allocated,
    batch,
    calibrated_step,
    held_mib,
    kept_mib,
    kernels_ms,
    peak_mib,
)
from octavo.cli.timing import device_ms, eager_ms
from octavo.errors import UnsupportedConfig
from octavo.model.refresh import quantize_weights
from octavo.moe import router
from octavo.moe.experts import Experts
from octavo.moe.mixture import MoE
from octavo.ops.grouped_linear import GroupedLinear
from octavo.recipes import recipe
from octavo.weights.quantized_weight import QuantizedWeight

SHAPES = ((8192, 8, 2, 4096, 14336), (8192, 128, 8, 4096, 1536), (16384, 64, 6, 2048, 1408))
RECIPES = ("fp8-delayed", "fp8-block")
FLOOR = (1250e9, 4.2e9)  # FLOPs and bytes in a millisecond
FACTS = {"bias": False, "method": cases.MEDIAN}
COLUMNS = (
    ("ms", "ms", ".3f"), ("tokens/s", "tokens_per_s", ".0f"), ("of bf16", "of_bf16", ".2f"),
    ("of floor", "of_floor", ".2f"), ("held MiB", "held_mib", ".0f"), ("kept MiB", "kept_mib", ".0f"),
    ("codes MiB", "codes_mib", ".0f"), ("peak MiB", "peak_mib", ".0f"),
)  # fmt: skip

BRIEF: dict[str, Any] = cases.MEDIAN | {"warmup": 3, "repeats": 15}
# bf16 that every forward casts, or of which codes are cached; codes of rows, or of columns too: what titles say of each
WEIGHTS = {"cast": "", "cached": ", cached", "codes": ", codes", "columns": ", codes, columns kept"}

Shape = tuple[int, int, int, int, int]
Make = Callable[[], nn.Module]


def add_arguments(parser: ArgumentParser) -> None:
    options.add_shapes(parser, cases.SHAPES["moe"], SHAPES)
    options.add_recipes(parser, RECIPES)
    parser.add_argument(
        "--compiled", type=options.recipes_or_none, default=None, metavar="LIST",
        help="recipes whose compiled cases are timed too, comma-separated, or none; default: all that are timed",
    )  # fmt: skip
    parser.add_argument(
        "--weights", type=options.names(tuple(WEIGHTS)), default=list(WEIGHTS), metavar="LIST",
        help=f"how Octavo's experts have their weights: comma-separated, of {', '.join(WEIGHTS)}; default: all",
    )  # fmt: skip
    parser.add_argument("--optimizer", action="store_true", help="add cases whose step ends with AdamW; default: no")
    parser.add_argument(
        "--brief", action="store_true", help="compiled bf16 and Octavo's eager experts alone; default: all"
    )
    parser.add_argument("--allocations", action="store_true", help="list large allocations of eager cases; default: no")
    options.add_no_peers(parser)
    parser.add_argument("--peer", default=None, help=argparse.SUPPRESS)  # one case of another library, and nothing else


def measure(arguments: Namespace, report: dict[str, Any]) -> None:
    asked = Namespace(**vars(arguments))
    asked.compiled = compiled_of(arguments.recipes, arguments.compiled)
    report["shapes"] = []
    shapes = arguments.shape or SHAPES
    if arguments.peer is not None:
        _measure_peer(arguments.peer, shapes[0], report["shapes"])
        return
    if asked.brief:
        report["method"] = BRIEF
    for shape in shapes:
        _measure_shape(shape, asked, report["shapes"])
    if not arguments.no_peers and not asked.brief:
        _add_peers(report["shapes"])


def compiled_of(recipes: list[str], compiled: list[str] | None) -> list[str]:
    """Return the recipes whose compiled cases are timed, as `recipes` spells them. None is all of them."""
    if compiled is None:
        return recipes
    asked = [recipe(name) for name in compiled]
    timed = [recipe(name) for name in recipes]
    missing = [name for name, value in zip(compiled, asked, strict=True) if value not in timed]
    if missing:
        raise UnsupportedConfig(
            f"--compiled names recipes of --recipes, got {', '.join(missing)} besides {', '.join(recipes)}. "
            "Add it to --recipes, or leave it out."
        )
    return [name for name, value in zip(recipes, timed, strict=True) if value in asked]


class Router(nn.Module):
    """Softmax over the experts, and the largest of each token."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        _, experts, self.top_k, hidden, _ = shape
        self.weight = nn.Parameter(torch.randn(experts, hidden, device=device, dtype=torch.bfloat16) * hidden**-0.5)
        self.preference = _preference(experts, device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.weight).float() + self.preference
        probs, indices = logits.softmax(-1).topk(self.top_k)
        return probs, indices


class Stock(nn.Module):
    """The layer in plain torch, with torch's product of groups in bf16 or another one."""

    def __init__(self, shape: Shape, device: str = "cuda", product: peers.Product = grouped_mm) -> None:
        super().__init__()
        self.product = product
        _, self.experts, self.top_k, hidden, ffn = shape
        self.router = Router(shape, device)
        self.up = nn.Parameter(_weights(self.experts, 2 * ffn, hidden, device))
        self.down = nn.Parameter(_weights(self.experts, hidden, ffn, device))

    def forward(self, x: Tensor) -> Tensor:
        probs, indices = self.router(x)
        flat = indices.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=self.experts).cumsum(0).to(torch.int32)
        tokens = order // self.top_k
        h = self.product(x[tokens], self.up.transpose(1, 2), ends)
        a, b = h.chunk(2, -1)
        y = self.product(F.silu(a) * b, self.down.transpose(1, 2), ends)
        weighted = y * probs.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, tokens, weighted)


class Ours(nn.Module):
    """The layer with `octavo.moe.Experts`."""

    def __init__(self, shape: Shape, recipe: str, weights: str = "cast", device: str = "cuda") -> None:
        super().__init__()
        _, experts, _, hidden, ffn = shape
        self.router, self.first = Router(shape, device), False if weights == "cached" else None
        self.experts = Experts(experts, hidden, ffn, recipe=recipe, device=device, dtype=torch.bfloat16)
        if weights in ("codes", "columns"):
            quantize_weights(self.experts, trainable=True, keep_columns=weights == "columns")

    def forward(self, x: Tensor) -> Tensor:
        probs, indices = self.router(x)
        return self.experts(x, indices, probs, is_first_microbatch=self.first)


class PreferringRouter(router.Router):
    """The router of octavo.MoE, with the weights and the preference of the other cases."""

    def __init__(self, shape: Shape, device: str) -> None:
        _, experts, _, hidden, _ = shape
        super().__init__(hidden, experts, device=device, dtype=torch.bfloat16)
        nn.init.normal_(self.weight, std=hidden**-0.5)
        self.preference = _preference(experts, device)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.preference


def mixture(shape: Shape, recipe: str, device: str = "cuda") -> MoE:
    """Return an octavo.MoE whose router prefers the same experts as that of the other cases."""
    _, experts, top_k, hidden, ffn = shape
    layer = MoE(hidden, ffn, experts, top_k, recipe=recipe, device=device, dtype=torch.bfloat16)
    layer.router = PreferringRouter(shape, device)
    return layer


def _preference(experts: int, device: str) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return (torch.rand(experts, generator=generator, device="cpu", dtype=torch.float32) - 0.5).to(device)


def _weights(experts: int, n: int, k: int, device: str) -> Tensor:
    return torch.randn(experts, n, k, device=device, dtype=torch.bfloat16) * (1 / math.sqrt(k))


def _measure_shape(shape: Shape, asked: Namespace, shapes: list[dict[str, Any]]) -> None:
    """Measure the cases of a shape, those that matter most first: a run may be cut off."""
    results: list[dict[str, Any]] = []
    kernels: dict[str, list[dict[str, Any]]] = {}
    entry = {"shape": list(shape), "floor_ms": floors(shape), "results": results, "kernels": kernels}
    shapes.append(entry)

    def case(name: str, make: Make, way: str = "eager", **settings: Any) -> None:
        title = name if way == "eager" else f"{name}, {way}"
        title += ", AdamW" if "optimizer" in settings else ""
        listed = asked.allocations and way == "eager"
        _add(
            entry, cases.attempt(title, partial(_case, make, shape, way, brief=asked.brief, listed=listed, **settings))
        )

    case("grouped_mm bf16", partial(Stock, shape), "compiled")
    for name in asked.recipes:
        makes = _makes(shape, name, asked.weights)
        whole: dict[str, Make] = {} if asked.brief else {f"octavo.MoE {name}": partial(mixture, shape, name)}
        for title, make in (makes | whole).items():
            case(title, make)
        for title, make in whole.items():
            case(title, make, "captured")
        for title, make in (makes | whole).items() if name in asked.compiled and not asked.brief else ():
            case(title, make, "compiled")
    if asked.optimizer:
        case("grouped_mm bf16", partial(Stock, shape), "compiled", optimizer=True)
        for name in asked.recipes:
            for title, make in _makes(shape, name, [w for w in asked.weights if w != "cached"]).items():
                case(title, make, optimizer=True)
    if asked.brief:
        return
    case("grouped_mm bf16", partial(Stock, shape))
    for name in asked.recipes:
        row = cases.attempt(name, partial(_kernels, shape, name))
        kernels[name] = row.get("kernels", [row])


def _makes(shape: Shape, name: str, weights: list[str]) -> dict[str, Make]:
    """Return the constructors of Octavo's experts in a recipe, by the titles of their cases."""
    ways = weights if recipe(name).linear().fprop.right is not None else ["cast"]
    return {f"octavo {name}{WEIGHTS[way]}": partial(Ours, shape, name, weights=way) for way in ways}


def _add(entry: dict[str, Any], row: dict[str, Any]) -> None:
    """Append a row to those of a shape, with its ratios to compiled bf16 and to the floor."""
    results = entry["results"]
    alike = [one for one in results if _trains(one) == _trains(row)]
    results.append(row | _ratios(row, alike[0] if alike else row, entry["floor_ms"]))


def _trains(row: dict[str, Any]) -> bool:
    """Return whether the step of a row ends with an optimizer's."""
    return bool(row["case"].endswith("AdamW"))


# -- other libraries -------------------------------------------------------------------------------------------------


def _add_peers(shapes: list[dict[str, Any]]) -> None:
    for entry in shapes:
        for name in peers.products():
            for title in (f"{name}, compiled", name):
                _add(entry, cases.attempt(title, partial(_peer_row, title, entry["shape"])))


def _peer_row(title: str, shape: list[int]) -> dict[str, Any]:
    """Return the row of another library's case, measured in a process of its own."""
    report = isolated.report_of(["bench", "moe", "--shape", ",".join(map(str, shape)), "--peer", title])
    found: dict[str, Any] = report["shapes"][0]["results"][0]
    row = {key: value for key, value in found.items() if key not in ("case", "of_bf16")}  # that one is to itself
    if "error" in row and report["said"]:
        row["error"] += f" ({report['said']})"
    return row


def _measure_peer(title: str, shape: Shape, shapes: list[dict[str, Any]]) -> None:
    name, _, way = title.partition(", ")
    entry: dict[str, Any] = {"shape": list(shape), "floor_ms": floors(shape), "results": [], "kernels": {}}
    shapes.append(entry)

    def measured() -> dict[str, Any]:
        make = partial(Stock, shape, product=peers.products()[name]())
        return _case(make, shape, way or "eager", fullgraph=False)

    _add(entry, cases.attempt(title, measured))


# -- one case --------------------------------------------------------------------------------------------------------


def _kernels(shape: Shape, recipe: str) -> dict[str, Any]:
    return {"kernels": kernels_ms(_step(Ours(shape, recipe), shape)[0])}


def _ratios(row: dict[str, Any], bf16: dict[str, Any], floor: dict[str, float]) -> dict[str, float]:
    """Return the ratios of a row that has a time: to compiled bf16, if that has one, and to the floor."""
    if "ms" not in row:
        return {}
    casts = not any([word in row["case"] for word in (", cached", ", codes")])
    kind = "bf16" if "bf16" in row["case"] else "fp8" if casts else "cached"
    of_bf16 = {"of_bf16": row["ms"] / bf16["ms"]} if "ms" in bf16 else {}
    return of_bf16 if _trains(row) else {**of_bf16, "of_floor": row["ms"] / floor[kind]}


def _step(module: nn.Module, shape: Shape, optimizer: bool = False) -> tuple[Callable[[], None], Tensor]:
    """Return a calibrated step of the module, and its x."""
    x, dy = batch(shape[0], shape[3], shape[3], next(module.parameters()).device)
    return calibrated_step(module, x, dy, adamw(module) if optimizer else None), x


def _case(
    make: Make, shape: Shape, way: str, fullgraph: bool = True, optimizer: bool = False, brief: bool = False,
    listed: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Measure a layer eager, compiled or captured."""
    before = allocated()
    module = make()
    if way == "compiled":
        reset()  # all cases share the code of one forward, and torch compiles that only so many times
        module.compile(fullgraph=fullgraph)  # type: ignore[no-untyped-call]
    step, x = _step(module, shape, optimizer)
    if way == "captured":
        timed: list[tuple[float, list[float]]] = []
        peak = peak_mib(lambda: timed.append(device_ms(step)))
        ((ms, readings),) = timed
    else:
        ms, readings = eager_ms(step, **({} if not brief else {name: BRIEF[name] for name in ("warmup", "repeats")}))
        peak = peak_mib(step)
    found = {"allocations": allocations.of_step(step)} if listed else {}
    codes, kept = _codes_mib(module), kept_mib(module, x)
    return found | {
        "ms": ms,
        "readings_ms": readings,
        "tokens_per_s": shape[0] / ms * 1e3,
        "held_mib": held_mib(before, module, x) - x.nbytes / 2**20,  # dy is as large
        "kept_mib": kept - codes,
        "codes_mib": codes,
        "peak_mib": peak,
    }


def _codes_mib(module: nn.Module) -> float:
    """Return the MiB of the column codes of weights that a forward keeps: a byte for each weight, unless cached."""
    if not isinstance(module, Ours | MoE) or (isinstance(module, Ours) and module.first is not None):
        return 0.0
    fc1 = module.experts.get_submodule("fc1")
    assert isinstance(fc1, GroupedLinear) and fc1.recipe is not None
    if fc1.recipe.linear().fprop.right is None or isinstance(fc1.weight, QuantizedWeight):
        return 0.0
    return float(sum(p.numel() for p in module.experts.parameters()) / 2**20)


def floors(shape: Shape) -> dict[str, float]:
    """Return the least milliseconds of a step: in bf16, in FP8, and in FP8 with cached weights."""
    tokens, experts, top_k, hidden, ffn = shape
    rows = tokens * top_k
    gemms = 3 * 3 * 2 * rows * hidden * ffn
    # x and dy into codes both ways; h activated into codes; h and da into codes of dh both ways and of a; sums of y, dx
    moved = rows * (hidden * (4 + 4) + ffn * (5 + 11) + hidden * 4) + tokens * hidden * 8
    weights = 3 * experts * hidden * ffn * 4
    fast = gemms / FLOOR[0]
    plain = rows * (hidden * 16 + ffn * 20)
    return {
        "bf16": 2 * fast + plain / FLOOR[1],
        "fp8": fast + (moved + weights) / FLOOR[1],
        "cached": fast + moved / FLOOR[1],
    }


# -- as text ---------------------------------------------------------------------------------------------------------


def render(report: dict[str, Any]) -> str:
    parts = [cases.heading(report, cases.LAYER)]
    for entry in report["shapes"]:
        title = ", ".join(f"{n} {name}" for n, name in zip(entry["shape"], cases.SHAPES["moe"], strict=True))
        parts.append(f"{title}\n{cases.render(COLUMNS, entry['results'])}")
        parts += [
            allocations.render(row["allocations"], row["case"]) for row in entry["results"] if "allocations" in row
        ]
        parts += [cases.kernel_table(kernels, f"kernel, {name}") for name, kernels in entry["kernels"].items()]
    return "\n\n".join(parts)
