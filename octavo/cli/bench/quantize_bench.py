"""Time the cast of one bfloat16 matrix to every low-precision format, beside a plain copy of it.

Each case produces both results that training needs: values and scales of the matrix, and of its transpose.

ms          time on the GPU
MB, TB/s    bytes that must be moved, and their rate: one read of the matrix, every write of values and scales
of copy     that rate / the rate of a plain copy. Some cases must read the matrix twice; the second read is not counted,
            so they reach at most 2/3
host us     microseconds the CPU takes to start one cast

example: octavo bench quantize --rows 8192 --columns 4096
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch

from octavo.cli.bench.cases import REPLAYS, heading
from octavo.cli.bench.cases import render as table
from octavo.cli.options import count
from octavo.cli.timing import copy_ms, device_ms, host_us
from octavo.formats import E4M3, E5M2
from octavo.quant import MX, NVFP4, Block1D, Block2D, QTensor, Rowwise, Tensorwise

FACTS = {"method": REPLAYS}
COLUMNS = (
    ("ms", "ms", ".3f"), ("MB", "mb", ".0f"), ("TB/s", "tb_per_s", ".2f"), ("of copy", "of_copy", ".2f"),
    ("host us", "host_us", ".0f"),
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=count, default=16384, metavar="N", help="rows of the matrix; default: %(default)s"
    )
    parser.add_argument("--columns", type=count, default=8192, metavar="N", help="its columns; default: %(default)s")


def measure(arguments: Namespace, report: dict[str, Any]) -> None:
    x = torch.randn(arguments.rows, arguments.columns, device="cuda", dtype=torch.bfloat16)
    ms_of_copy, copy_all = copy_ms(x)
    copy_rate = 2 * x.nbytes / ms_of_copy / 1e9
    copied = {"ms": ms_of_copy, "tb_per_s": copy_rate, "ms_after": None, "readings_ms": copy_all}
    report |= {"shape": list(x.shape), "copy": copied, "results": []}
    for name, call in cases(x).items():
        ms, readings = device_ms(call)
        moved = x.nbytes + sum(q.nbytes() for q in call() if isinstance(q, QTensor))
        rate = moved / ms / 1e9
        row = {"case": name, "ms": ms, "bytes": moved, "tb_per_s": rate, "of_copy": rate / copy_rate}
        report["results"].append(row | {"host_us": host_us(call), "readings_ms": readings})
    copied["ms_after"], _ = copy_ms(x)


def cases(x: torch.Tensor) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Return the cases: functions that quantize x both ways, by name."""
    inverse_scale = torch.full((1,), 100.0, device=x.device, dtype=torch.float32)
    seed = torch.tensor([1, 2], device=x.device, dtype=torch.int64)
    given, gradient = Tensorwise(), Tensorwise(E5M2)
    plain: dict[str, Callable[[], tuple[Any, ...]]] = {
        "tensorwise, given scale": lambda: given.quantize_both(x, inverse_scale=inverse_scale),
        "tensorwise, given scale, amax measured": lambda: given.observe(x, inverse_scale),
        "tensorwise, given scale, E5M2": lambda: gradient.quantize_both(x, inverse_scale=inverse_scale),
        "tensorwise, current": lambda: given.quantize_both(x),
    }
    for spec in (Rowwise(), Block1D(), Block1D(scale="fp32"), Block2D(), MX(E4M3), MX(square=True)):
        plain[str(spec)] = lambda spec=spec: spec.quantize_both(x)  # type: ignore[misc]
    plain["nvfp4 weights"] = lambda: NVFP4(square=True).quantize_both(x)
    plain["nvfp4 activations"] = lambda: NVFP4().quantize_both(x, column=NVFP4(rht=True))
    dy = NVFP4(stochastic=True)
    plain["nvfp4 gradients"] = lambda: dy.quantize_both(x, seed=seed, column=NVFP4(rht=True, stochastic=True))
    return plain


def render(report: dict[str, Any]) -> str:
    copy, (rows, columns) = report["copy"], report["shape"]
    after = "" if copy["ms_after"] is None else f" (at the end: {copy['ms_after']:.3f} ms)"
    head = heading(report, f"x {rows}x{columns} bfloat16")
    copied = f"plain copy: {copy['ms']:.3f} ms, {copy['tb_per_s']:.2f} TB/s{after}"
    return f"{head}\n{copied}\n\n{table(COLUMNS, [r | {'mb': r['bytes'] / 1e6} for r in report['results']])}"
