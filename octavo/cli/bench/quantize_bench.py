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

from octavo.cli import machine
from octavo.cli.options import count
from octavo.cli.timing import REPEATS, WARMUP, copy_ms, device_ms, host_us
from octavo.formats import E4M3, E5M2
from octavo.inspection import table
from octavo.quant import MX, NVFP4, Block1D, Block2D, QTensor, Rowwise, Tensorwise


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=count, default=16384, metavar="N", help="rows of the matrix; default: %(default)s"
    )
    parser.add_argument("--columns", type=count, default=8192, metavar="N", help="its columns; default: %(default)s")


def measure(arguments: Namespace, report: dict[str, Any]) -> None:
    rows, columns = arguments.rows, arguments.columns
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    ms_of_copy, copy_all = copy_ms(x)
    copy_rate = 2 * x.numel() * x.element_size() / ms_of_copy / 1e9
    copied = {"ms": ms_of_copy, "tb_per_s": copy_rate, "ms_after": None, "readings_ms": copy_all}
    results: list[dict[str, Any]] = []
    report |= {
        "suite": "quantize",
        "machine": machine.describe(x.device),
        "shape": [rows, columns],
        "dtype": "bfloat16",
        "method": {"warmup": WARMUP, "repeats": REPEATS, "statistic": "median of CUDA graph replays, timed by events"},
        "copy": copied,
        "results": results,
    }
    for name, call in cases(x).items():
        ms, readings = device_ms(call)
        moved = x.numel() * x.element_size() + sum(q.nbytes() for q in call() if isinstance(q, QTensor))
        rate = moved / ms / 1e9
        results.append(
            {
                "case": name,
                "ms": ms,
                "bytes": moved,
                "tb_per_s": rate,
                "of_copy": rate / copy_rate,
                "host_us": host_us(call),
                "readings_ms": readings,
            }
        )
    copied["ms_after"], _ = copy_ms(x)


def cases(x: torch.Tensor) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Returns the cases: functions that quantize x both ways, by name."""
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
    if not report.get("results"):
        return ""
    facts, copy = report["machine"], report["copy"]
    after = "" if copy["ms_after"] is None else f" (at the end: {copy['ms_after']:.3f} ms)"
    rows = [
        [
            r["case"],
            f"{r['ms']:.3f}",
            f"{r['bytes'] / 1e6:.0f}",
            f"{r['tb_per_s']:.2f}",
            f"{r['of_copy']:.2f}",
            f"{r['host_us']:.0f}",
        ]
        for r in report["results"]
    ]
    head = (
        f"{facts['gpu']}, torch {facts['torch']}, triton {facts['triton']}; "
        f"x {report['shape'][0]}x{report['shape'][1]} bfloat16\n"
        f"plain copy: {copy['ms']:.3f} ms, {copy['tb_per_s']:.2f} TB/s{after}"
    )
    return head + "\n\n" + table.render(("case", "ms", "MB", "TB/s", "of copy", "host us"), rows)
