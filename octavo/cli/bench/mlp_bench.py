"""Time forward and backward of RMSNorm and a SwiGLU MLP: bf16 compiled, octavo.LayerNormMLP in recipes, torchao.

ms          one eager step after another, gradients dropped between them, as training runs it
graph ms    the same step replayed from a CUDA graph: the device's time alone (compiled cases are not captured)
kept MiB    memory that forward allocates and keeps for backward, including its output, without its input
of floor    floor / ms: 1 is as fast as the floor. The floor is torch's own FP8 matrix products of both layers, timed
            here, and reading and writing every tensor once, at the rate of a plain copy, timed here; for bf16 its
            matrix products
TFLOP/s     of the matrix products, the whole step's time counted
host us     microseconds the CPU takes to start one step at a tiny size; the same with backward in the thread that calls
            it (torch.autograd.set_multithreading_enabled(False)); and with all threads on one core
kernels     a second table: the GPU kernels of one step of the first recipe, the longest first

example: octavo bench mlp --recipes fp8-block
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.cli import options
from octavo.cli.bench import cases, linear_bench, peers
from octavo.cli.bench.training_steps import batch, calibrated_step, kept_mib, kernels_ms
from octavo.cli.timing import device_ms, eager_ms, hosts_us
from octavo.demo.transformer import MLP
from octavo.fusion.blocks import LayerNormMLP

SHAPE = (8192, 4096, 14336)  # tokens, hidden, feed-forward
TINY = (16, 256, 512)
RECIPES = ("fp8-delayed", "fp8-current", "fp8-block")
FACTS = {"bias": False, "method": cases.MEDIAN}
COLUMNS = (
    ("ms", "ms", ".3f"), ("graph ms", "graph_ms", ".3f"), ("kept MiB", "kept_mib", ".0f"),
    ("of floor", "of_floor", ".2f"), ("TFLOP/s", "tflops", ".0f"), ("host us, one thread, one core", "hosts", ""),
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    names = ("tokens", "hidden", "feed-forward")
    parser.add_argument(
        "--shape", type=options.sizes(*names), default=SHAPE, metavar="SHAPE",
        help=f"{','.join(names)}; default: {','.join(map(str, SHAPE))}",
    )  # fmt: skip
    options.add_recipes(parser, RECIPES)
    options.add_no_peers(parser)


class Stock(nn.Module):
    """RMSNorm and a SwiGLU MLP in plain torch."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-5, device="cuda", dtype=torch.bfloat16)
        self.mlp = MLP(hidden, ffn, gated=True).to("cuda", torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


def _stock(hidden: int, ffn: int, convert: Callable[[nn.Module], None] | None = None) -> nn.Module:
    model = Stock(hidden, ffn)
    if convert is not None:
        convert(model)
    model.compile()  # type: ignore[no-untyped-call]
    return model


def _ours(hidden: int, ffn: int, recipe: str, **settings: Any) -> nn.Module:
    fused = settings.pop("fused", True)
    model = LayerNormMLP(
        hidden, ffn, normalization="RMSNorm", activation="swiglu", bias=False, recipe=recipe, device="cuda",
        dtype=torch.bfloat16, **settings,
    )  # fmt: skip
    if not fused:
        model.rules, model.require = None, ()
    return model


def measure(arguments: Namespace, report: dict[str, Any]) -> None:
    shape, (first, *_) = arguments.shape, arguments.recipes
    makers: linear_bench.Makers = {"bf16 compiled": _stock}
    makers |= {f"octavo {name}": partial(_ours, recipe=name) for name in arguments.recipes}
    makers[f"octavo {first}, weight codes kept"] = partial(_ours, recipe=first, keep_weight_codes=True)
    makers[f"octavo {first}, not fused"] = partial(_ours, recipe=first, fused=False)
    if not arguments.no_peers:
        for name, convert in peers.conversions().items():
            makers[f"{name} compiled"] = partial(_stock, convert=convert)
    floors = _floors(*shape)
    report |= {"shape": list(shape), "host_shape": list(TINY), "floors": floors, "results": [], "kernels": []}
    for name, make in makers.items():
        report["results"].append(_case(name, make, shape, floors))
    tokens, hidden, ffn = shape
    report["kernels"] = kernels_ms(
        calibrated_step(makers[f"octavo {first}"](hidden, ffn), *batch(tokens, hidden, hidden))
    )


def _case(
    name: str, make: Callable[[int, int], nn.Module], shape: tuple[int, int, int], floors: dict[str, float]
) -> dict[str, Any]:
    tokens, hidden, ffn = shape
    module = make(hidden, ffn)
    x, dy = batch(tokens, hidden, hidden)
    step = calibrated_step(module, x, dy)
    ms, readings = eager_ms(step)
    floor = floors["bf16_ms"] if name.startswith("bf16") else floors["fp8_ms"]
    row: dict[str, Any] = {
        "case": name, "ms": ms, "readings_ms": readings, "kept_mib": kept_mib(module, x), "floor_ms": floor,
        "of_floor": floor / ms, "tflops": 18 * tokens * hidden * ffn / ms / 1e9,
    }  # fmt: skip
    if name.startswith("octavo"):
        row["graph_ms"], row["graph_readings_ms"] = device_ms(step)
    del module, step
    torch.cuda.empty_cache()
    tiny = calibrated_step(make(*TINY[1:]), *batch(TINY[0], TINY[1], TINY[1]))
    return {**row, "host_us": hosts_us(tiny, repeats=200)}


def _floors(tokens: int, hidden: int, ffn: int) -> dict[str, float]:
    layers = (tokens, hidden, 2 * ffn), (tokens, ffn, hidden)
    gemms = [linear_bench.gemms_ms(*layer) for layer in layers]
    bf16_ms, gemms_ms = (sum(sum(found[kind].values()) for found in gemms) for kind in ("bf16", "fp8"))
    moved = (
        tokens * hidden * (4 + 4 + 6)  # x normalised into codes both ways; dy into codes both ways; the norm's backward
        + 3 * ffn * hidden * 4  # weights into codes both ways
        + tokens * ffn * (5 + 11)  # h activated into codes; h and da into codes of dh both ways, and of a
    )
    bytes_ms = moved / linear_bench.copy_rate(tokens, hidden)
    return {"bf16_ms": bf16_ms, "fp8_gemms_ms": gemms_ms, "bytes_ms": bytes_ms, "fp8_ms": gemms_ms + bytes_ms}


def render(report: dict[str, Any]) -> str:
    (tokens, hidden, ffn), floors = report["shape"], report["floors"]
    title = (
        f"RMSNorm, SwiGLU MLP, {tokens} x {hidden} x {ffn}: floor {floors['fp8_ms']:.3f} ms in FP8 "
        f"(GEMMs {floors['fp8_gemms_ms']:.3f}, bytes {floors['bytes_ms']:.3f}), {floors['bf16_ms']:.3f} in bf16"
    )
    rows = [r | {"hosts": ", ".join(f"{us:.0f}" for us in r["host_us"].values())} for r in report["results"]]
    parts = ["\n".join([cases.heading(report, cases.LAYER), title, cases.render(COLUMNS, rows)])]
    return "\n\n".join([*parts, *([cases.kernel_table(report["kernels"])] if report["kernels"] else [])])
