"""Which recipe runs how on this machine, each cell proven by running a tile against the reference.

native     the chip's own instructions        emulated   the true codes, multiplied in bfloat16, float32 accumulation
reference  plain torch, float64 accumulation  failed     the tile came out wrong or raised: exit code 1
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from octavo import backend
from octavo.cli import machine, table
from octavo.cli.known_bad import known_bad
from octavo.kernels.gemm import gemm, native, reference, route
from octavo.quant import QTensor, Quantizer
from octavo.recipes import SHIPPED, GemmQuant, Recipe, recipe

COLUMNS = ("quantize", "fprop", "dgrad", "wgrad", "grouped")
TILE = (160, 192, 256)  # tokens, out, in: not multiples of 128, so that edges are crossed


@dataclass(frozen=True)
class Cell:
    """One probe's outcome. `why` explains anything but success on the first route."""

    status: str
    why: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--device", default=None, help="cpu or cuda[:index]; default: the GPU if there is one")


def run(arguments: argparse.Namespace) -> int:
    device = machine.default_device() if arguments.device is None else torch.device(arguments.device)
    report = diagnose(device)
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return 1 if report["failed"] else 0


def diagnose(device: torch.device) -> dict[str, Any]:
    """The whole report, as plain data."""
    rows = {name: {c: asdict(cell) for c, cell in probe(recipe(name), device).items()} for name in SHIPPED}
    failed = [f"{name} {column}" for name, cells in rows.items() for column, cell in cells.items()
              if cell["status"] == "failed"]  # fmt: skip
    facts = machine.describe(device)
    return {
        "machine": facts,
        "recipes": rows,
        "known_bad": known_bad(facts, dict(os.environ)),
        "failed": failed,
    }


def probe(subject: Recipe, device: torch.device) -> dict[str, Cell]:
    """A cell for each column."""
    quant = subject.linear()
    tokens, out, inner = TILE
    shapes = {"fprop": (tokens, out, inner), "dgrad": (tokens, inner, out), "wgrad": (out, inner, tokens)}
    gemms: dict[str, GemmQuant] = {name: getattr(quant, name) for name in shapes}
    specs = list(dict.fromkeys(s for g in gemms.values() for s in (g.left, g.right) if s is not None))
    cells = {"quantize": _guarded(lambda: _probe_quantizers(specs, device)) if specs else Cell("-")}
    for name, g in gemms.items():
        cells[name] = _guarded(lambda g=g, name=name: _probe_gemm(g, shapes[name], device))  # type: ignore[misc]
    return cells | {"grouped": Cell("absent", "GroupedLinear is not part of this version")}


def _guarded(check: Callable[[], Cell]) -> Cell:
    """A probe that raises is a failed probe, whatever it raised: the doctor reports, it does not crash."""
    try:
        return check()
    except Exception as error:
        return Cell("failed", f"{type(error).__name__}: {error}")


def _tile(rows: int, columns: int, salt: int) -> torch.Tensor:
    """Signed data over a wide range, made on the CPU so that every device sees the same."""
    generator = torch.Generator().manual_seed(salt)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator))).to(torch.bfloat16)


def _operand(spec: Quantizer | None, x: torch.Tensor) -> QTensor | torch.Tensor:
    if spec is None:
        return x
    seed = torch.tensor([1, 2], device=x.device) if spec.draws else None
    return spec.quantize(x, seed=seed)


def _probe_quantizers(specs: list[Quantizer], device: torch.device) -> Cell:
    """Codes and scales on the device are the CPU reference's, byte for byte, and decode to the values."""
    x = _tile(TILE[0], TILE[2], salt=0)
    for spec in specs:
        here, there = _operand(spec, x.to(device)), _operand(spec, x)
        assert isinstance(here, QTensor) and isinstance(there, QTensor)
        for got, want in zip(here.tensors(), there.tensors(), strict=True):
            if not torch.equal(got.cpu().reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)):
                return Cell("failed", f"{spec} differs from the reference on {device}")
        error = (there.dequantize(torch.float32) - x.float()).norm() / x.float().norm()
        if not error < 0.25:
            return Cell("failed", f"{spec} decodes with a relative error of {error:.3f}")
    return Cell("native" if backend.choose(device) == "triton" else "reference")


def _probe_gemm(g: GemmQuant, shape: tuple[int, int, int], device: torch.device) -> Cell:
    m, n, k = shape
    a, b = _operand(g.left, _tile(m, k, 1).to(device)), _operand(g.right, _tile(n, k, 2).to(device))
    got = gemm(a, b, out_dtype=torch.bfloat16, accumulation=g.accumulation).double()
    worst = _error(got, a, b, fast=g.accumulation == "fast", k=k)
    status = route(a, b)
    if not worst <= 1.0:
        return Cell("failed", f"{status} GEMM is off its error bound by a factor {worst:.3g}")
    why = ""
    if status == "emulated":
        assert isinstance(a, QTensor) and isinstance(b, QTensor)
        why = native.support(a, b).reason
    return Cell(status, why)


def _error(got: torch.Tensor, a: QTensor | torch.Tensor, b: QTensor | torch.Tensor, *, fast: bool, k: int) -> float:
    """Largest deviation from float64, as a fraction of the bound in docs/numerics.md."""
    want = reference.gemm(a, b, torch.float32, None).double()
    sizes = [(q.spec.values(q) if isinstance(q, QTensor) else q).abs().double() for q in (a, b)]
    size = sizes[0] @ sizes[1].T
    for q in (a, b):
        if isinstance(q, QTensor) and q.global_scale is not None:
            size = size * q.global_scale.double()
    relative = max(2e-4, 1e-6 * k) if fast else 2e-4
    return float(((got - want).abs() / (relative * size + 2**-8 * want.abs() + 1e-30)).max())


def render(report: dict[str, Any]) -> str:
    facts = report["machine"]
    gpu = f"{facts['gpu']} ({facts['capability']}, {facts['memory_gib']} GiB)" if facts["gpu"] else "no GPU"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("octavo", "torch", "triton", "cuda") if facts[name])
    rows = [[name, *(cells[c]["status"] for c in COLUMNS)] for name, cells in report["recipes"].items()]
    parts = [f"{gpu}; python {facts['python']}, {versions}", table.render(("recipe", *COLUMNS), rows)]
    notes = dict.fromkeys(
        f"{name} {column}: {cell['why']}"
        for name, cells in report["recipes"].items()
        for column, cell in cells.items()
        if cell["status"] == "failed"
    )
    parts += ["\n".join(notes)] if notes else []
    parts += [f"known bad: {entry['what']} ({entry['where']}). {entry['octavo']}" for entry in report["known_bad"]]
    parts.append(_verdict(report))
    return "\n\n".join(parts)


def _verdict(report: dict[str, Any]) -> str:
    if report["failed"]:
        return f"{len(report['failed'])} probes failed: {', '.join(report['failed'])}."
    count = len(report["recipes"])
    if report["machine"]["gpu"] is None:
        return f"All {count} recipes run here, on the reference: exact codes and scales, no speed."
    return f"All {count} recipes run here; every cell above was checked against the reference."
