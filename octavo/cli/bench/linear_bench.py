"""Time forward and backward of one linear layer: in bf16, in every recipe, and in other libraries if installed.

ms          one eager step after another, gradients dropped between them, as training runs it
graph ms    the same step replayed from a CUDA graph: the device's time alone (other libraries are not captured)
of floor    floor / ms: 1 is as fast as the floor. The floor is torch's own FP8 matrix products, timed here (fast
            accumulation in the forward one only), and the bytes that casting once must move, at the rate of a plain
            copy, timed here; for bf16 its matrix products
host us     microseconds the CPU takes to start one step of a tiny layer: alone, and its share in a stack of sixteen,
            where all backwards share one change of threads; each also with backward in the calling thread
            (torch.autograd.set_multithreading_enabled(False)), and with all threads on one core
TFLOP/s     of the three matrix products, the whole step's time counted
saved MiB   kept from forward to backward, parameters not counted; peak MiB: the most that was allocated beyond them

example: octavo bench linear --shape 8192,4096,14336 --recipes fp8-current,fp8-block
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.cli import options
from octavo.cli.bench import cases, peers
from octavo.cli.bench.training_steps import batch, calibrated_step, peak_mib
from octavo.cli.timing import device_ms, eager_ms, hosts_us
from octavo.demo.numerics import bytes_saved
from octavo.formats import E4M3, E5M2
from octavo.ops.linear import Linear
from octavo.recipes import SHIPPED
from octavo.text import table

SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (16384, 8192, 8192))  # tokens, in, out
TINY, STACK = (16, 256, 256), 16
FACTS = {"bias": False, "method": cases.MEDIAN}
COLUMNS = (
    ("ms", "ms", ".3f"), ("graph ms", "graph_ms", ".3f"), ("of floor", "of_floor", ".2f"), ("TFLOP/s", "tflops", ".0f"),
    ("saved MiB", "saved_mib", ".0f"), ("peak MiB", "peak_mib", ".0f"),
)  # fmt: skip

Makers = dict[str, Callable[[int, int], nn.Module]]


def add_arguments(parser: ArgumentParser) -> None:
    options.add_shapes(parser, cases.SHAPES["linear"], SHAPES)
    options.add_recipes(parser, SHIPPED)
    options.add_no_peers(parser)


def measure(arguments: Namespace, report: dict[str, Any]) -> None:
    makers: Makers = {"nn.Linear": stock}
    makers |= {f"octavo {name}": partial(low, recipe=name) for name in arguments.recipes}
    if not arguments.no_peers:
        makers |= peers.linears()
    report |= {"host_shape": list(TINY), "host_stack": STACK, "host_us": {}, "shapes": []}
    for name, make in makers.items():
        report["host_us"][name] = _hosts(make)
    for shape in arguments.shape or SHAPES:
        _measure_shape(shape, makers, report["shapes"])


def stock(k: int, n: int, device: torch.device | str = "cuda") -> nn.Module:
    return nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)


def low(k: int, n: int, recipe: str, device: torch.device | str = "cuda", **settings: Any) -> nn.Module:
    return Linear(k, n, bias=False, device=device, dtype=torch.bfloat16, recipe=recipe, **settings)


def _hosts(make: Callable[[int, int], nn.Module]) -> dict[str, float]:
    """Return the host's microseconds per tiny layer, alone and in a stack."""
    alone, stack = (hosts_us(_tiny_step(make, layers), repeats=200 // layers + 10) for layers in (1, STACK))
    return {**alone, **{f"in a stack, {name}": us / STACK for name, us in stack.items()}}


def _tiny_step(make: Callable[[int, int], nn.Module], layers: int) -> Callable[[], None]:
    return calibrated_step(nn.Sequential(*[make(*TINY[1:]) for _ in range(layers)]), *batch(*TINY))


def _measure_shape(shape: tuple[int, int, int], makers: Makers, shapes: list[dict[str, Any]]) -> None:
    tokens, k, n = shape
    floors = _floors(*shape)
    results: list[dict[str, Any]] = []
    shapes.append({"shape": list(shape), "floors": floors, "results": results})
    for name, make in makers.items():
        module = make(k, n)
        step = calibrated_step(module, *batch(*shape))
        ms, readings = eager_ms(step)
        row: dict[str, Any] = {"case": name, "ms": ms, "readings_ms": readings, **_memory(module, step)}
        floor = floors["bf16_ms"] if name in ("nn.Linear", "octavo bf16") else floors["fp8_ms"]
        row |= {"floor_ms": floor, "of_floor": floor / ms, "tflops": 6 * tokens * k * n / ms / 1e9}
        if name == "nn.Linear" or name.startswith("octavo"):
            row["graph_ms"], row["graph_readings_ms"] = device_ms(step)
        results.append(row)
        del module, step
        torch.cuda.empty_cache()


def _floors(tokens: int, k: int, n: int) -> dict[str, float]:
    """Time torch's GEMMs of this shape, and add the time to read three tensors once and write their codes twice."""
    gemms = gemms_ms(tokens, k, n)
    quantize_ms = 4 * (tokens * k + n * k + tokens * n) / copy_rate(tokens, k)
    return {
        **{f"{kind}_{name}_ms": ms for kind, found in gemms.items() for name, ms in found.items()},
        "quantize_ms": quantize_ms,
        "bf16_ms": sum(gemms["bf16"].values()),
        "fp8_ms": sum(gemms["fp8"].values()) + quantize_ms,
    }


def copy_rate(rows: int, columns: int) -> float:
    """Return the bytes that a plain copy of a bfloat16 matrix reads and writes in a millisecond."""
    source = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_ms(lambda: target.copy_(source))[0]


def gemms_ms(tokens: int, k: int, n: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of torch's three GEMMs of a layer, in bf16 and in FP8."""
    return {
        kind: {name: device_ms(call)[0] for name, call in _gemms(tokens, k, n, quantized=kind == "fp8").items()}
        for kind in ("bf16", "fp8")
    }


def _gemms(tokens: int, k: int, n: int, *, quantized: bool) -> dict[str, Callable[[], Tensor]]:
    x, w, dy = (
        torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        for rows, columns in ((tokens, k), (n, k), (tokens, n))
    )
    if not quantized:
        return {"fprop": lambda: x @ w.T, "dgrad": lambda: dy @ w, "wgrad": lambda: dy.T @ x}
    one = torch.ones(1, device="cuda", dtype=torch.float32)
    codes = {
        "x": x.to(E4M3.dtype), "xt": x.T.contiguous().to(E4M3.dtype), "w": w.to(E4M3.dtype),
        "wt": w.T.contiguous().to(E4M3.dtype), "dy": dy.to(E5M2.dtype), "dyt": dy.T.contiguous().to(E5M2.dtype),
    }  # fmt: skip

    def product(a: str, b: str, fast: bool) -> Callable[[], Tensor]:
        kind = F.ScalingType.TensorWise
        return lambda: F.scaled_mm(
            codes[a], codes[b].T, one, kind, one, kind, output_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return {
        "fprop": product("x", "w", True),
        "dgrad": product("dy", "wt", False),
        "wgrad": product("dyt", "xt", False),
    }


def _memory(module: nn.Module, step: Callable[[], None]) -> dict[str, float | None]:
    """Return the MiB kept for backward, without parameters, and the peak of one step."""
    return {"saved_mib": bytes_saved(module, step) / 2**20, "peak_mib": peak_mib(step)}


def render(report: dict[str, Any]) -> str:
    parts = [cases.heading(report, cases.LAYER)]
    for entry in report["shapes"]:
        (tokens, k, n), floors = entry["shape"], entry["floors"]
        title = f"{tokens} x {k} -> {n}: floor {floors['fp8_ms']:.3f} ms in FP8, {floors['bf16_ms']:.3f} in bf16"
        parts.append(f"{title}\n{cases.render(COLUMNS, entry['results'])}")
    tokens, k, n = report["host_shape"]
    title = f"host us of a step, one layer of {tokens} x {k} -> {n}, and one of a stack of {report['host_stack']}"
    hosts = report["host_us"]
    rows = [[case, *[f"{us:.0f}" for us in found.values()]] for case, found in hosts.items()]
    names = [name.replace("in a stack", "stack").replace("one ", "1 ") for name in next(iter(hosts.values()))]
    return "\n\n".join([*parts, f"{title}\n{table(('case', *names), rows)}"])
