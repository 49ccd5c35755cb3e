"""Check how each recipe runs on this machine, and print a table with one row per recipe.

For each entry the command runs a small computation here and compares it with a slow, exact one. This takes a few
seconds. The first run on a GPU takes a minute or more, because it compiles kernels.

    quantize               the casts to low precision
    fprop, dgrad, wgrad    the three GEMMs of a linear layer: output, gradient of the input, gradient of the weight
    grouped                a layer of several experts

    native      the GPU's low-precision instructions
    emulated    the same low-precision values, multiplied in bfloat16: correct, but slower than bf16
    reference   plain torch, for machines without a supported GPU: correct, but slow
    failed      a wrong result or an error; the exit code is then 1
    -           not applicable: bf16 has no cast

example: octavo doctor --json > doctor.json
"""

import argparse
import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo import backend
from octavo._torch.fast_paths import FAST_PATHS
from octavo._torch.inductor import DIRECT_CALLS
from octavo._torch.tensors import GUARDS, WITHOUT_DISPATCHER
from octavo.cli import machine, output
from octavo.cli.known_bad import known_bad
from octavo.kernels import grouped_gemm
from octavo.kernels.gemm import gemm, native, route
from octavo.launch import DIRECT_LAUNCHES
from octavo.ops.grouped_linear import GroupedLinear
from octavo.quant import QTensor, Quantizer
from octavo.recipes import SHIPPED, Recipe, recipe
from octavo.text import table

COLUMNS = ("quantize", "fprop", "dgrad", "wgrad", "grouped")
TILE = (160, 192, 256)  # tokens, out, in: not all multiples of 128, to test partial tiles
CPU = torch.device("cpu")
ROUTES = ("native", "emulated", "reference")
Part = tuple[Tensor, int, Quantizer | None]


@dataclass(frozen=True)
class Cell:
    """The outcome of one probe. `why` explains a failure or an emulated route."""

    status: str
    why: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    machine.add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    device = machine.parse_device(arguments.device)
    head, target = output.head("doctor", arguments), "-" if arguments.json else None
    report = output.produce(partial(examine, device), render, target, head=head)
    return 1 if report["failed"] else 0


def examine(device: torch.device, report: dict[str, Any]) -> None:
    """Fill the report, one recipe after another."""
    facts = machine.describe(device)
    report |= {"machine": facts, "recipes": {}, "known_bad": known_bad(facts, dict(os.environ)), "failed": []}
    report["fast_paths"] = fast_paths_of(device)
    for name in SHIPPED:
        cells = probe(recipe(name), device)
        report["recipes"][name] = {column: asdict(cell) for column, cell in cells.items()}
        report["failed"] += [f"{name} {column}" for column, cell in cells.items() if cell.status == "failed"]
        report["emulated"] = backend.emulated()


def fast_paths_of(device: torch.device) -> list[dict[str, Any]]:
    """Check every fast path, and return its state: `on` is None for one that has no use on this device."""
    asked = [GUARDS, WITHOUT_DISPATCHER, DIRECT_CALLS]
    if device.type == "cuda" and backend.unsupported_by_triton(device) is None:
        from octavo.kernels.activation.cast import triton as casts  # with every tile that transposes codes
        from octavo.quant.tensorwise.triton import transposes_codes

        asked.append(DIRECT_LAUNCHES)
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        for config in {*casts.CONFIGS, *casts.GATED_CONFIGS, *casts.GROUP_CONFIGS}:
            transposes_codes(config, device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for path in asked:
            path.is_on()
    return [path.state() for path in FAST_PATHS]


@torch.inference_mode(False)
@torch.enable_grad()  # a caller without gradients still asks for the backward of a layer
def probe(subject: Recipe, device: torch.device) -> dict[str, Cell]:
    """Return a cell for each column, from the three tensors of one small linear layer."""
    quant = subject.linear()
    tokens, out, inner = TILE
    x, w, dy = _tile(tokens, inner, 0), _tile(out, inner, 1), _tile(tokens, out, 2)
    operands = {  # (tensor, axis of its contraction, quantizer), left and right
        "fprop": ((x, -1, quant.fprop.left), (w, -1, quant.fprop.right)),
        "dgrad": ((dy, -1, quant.dgrad.left), (w, 0, quant.dgrad.right)),
        "wgrad": ((dy, 0, quant.wgrad.left), (x, 0, quant.wgrad.right)),
    }
    parts = [part for pair in operands.values() for part in pair if part[2] is not None]
    delayed = subject.stateful
    cells = {"quantize": _guarded(lambda: _probe_quantizers(parts, device, delayed)) if parts else Cell("-")}
    for name, pair in operands.items():
        accumulation = getattr(quant, name).accumulation
        cells[name] = _guarded(lambda p=pair, a=accumulation: _probe_gemm(p, device, delayed, a))  # type: ignore[misc]
    return cells | {"grouped": _guarded(lambda: _probe_grouped(subject, device))}


def _guarded(check: Callable[[], Cell]) -> Cell:
    """Run a probe. A probe that raises any exception is a failed probe, so that the doctor reports it."""
    try:
        return check()
    except Exception as error:
        return Cell("failed", f"{type(error).__name__}: {error}")


def _tile(rows: int, columns: int, salt: int) -> Tensor:
    """Return signed data with a wide range, made on the CPU so that it is the same on every device."""
    generator = torch.Generator("cpu").manual_seed(salt)
    x = torch.randn(rows, columns, generator=generator, device="cpu", dtype=torch.float32)
    exponent = torch.randint(-3, 4, (rows, 1), generator=generator, device="cpu", dtype=torch.int64)
    return (x * torch.exp2(exponent.float())).to(torch.bfloat16)


def _operand(part: Part, device: torch.device, delayed: bool) -> QTensor | Tensor:
    """Return one operand of a GEMM, quantized as in a layer: along its contraction; if delayed, by a fixed factor."""
    x, axis, spec = part[0].to(device), part[1], part[2]
    if spec is None:
        return x if axis == -1 else x.T
    if delayed:
        return spec.quantize(x, axis, inverse_scale=torch.full((1,), 2.0, device=device, dtype=torch.float32))
    seed = torch.tensor([1, 2], device=device, dtype=torch.int64) if spec.is_stochastic else None
    return spec.quantize(x, axis, seed=seed)


def _probe_quantizers(parts: list[Part], device: torch.device, delayed: bool) -> Cell:
    """Check that codes and scales equal the CPU reference's, byte for byte, and dequantize to about the values."""
    for part in parts:
        here, there = _operand(part, device, delayed), _operand(part, CPU, delayed)
        assert isinstance(here, QTensor) and isinstance(there, QTensor)
        for got, want in zip(here.tensors(), there.tensors(), strict=True):
            if not torch.equal(got.cpu().reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)):
                return Cell("failed", f"{here.spec} differs from the reference on {device}")
        x = (part[0] if part[1] == -1 else part[0].T).float()
        error = (there.dequantize(torch.float32) - x).norm() / x.norm()
        if not error < 0.25:
            return Cell("failed", f"{here.spec} decodes with a relative error of {error:.3f}")
    return Cell("native" if backend.choose(device) == "triton" else "reference")


def _probe_gemm(pair: tuple[Part, Part], device: torch.device, delayed: bool, accumulation: str) -> Cell:
    """Compare the product of a layer's operands with the float64 product of their dequantized values."""
    a, b = (_operand(part, device, delayed) for part in pair)
    got = gemm(a, b, out_dtype=torch.bfloat16, accumulation=accumulation).double()
    left, right = ((q.dequantize(torch.float32) if isinstance(q, QTensor) else q).double() for q in (a, b))
    want, size = left @ right.T, left.abs() @ right.abs().T
    # the error of FP8 tensor cores grows with the spread of the terms, wide here; a wrong scale far exceeds this bound
    worst = float(((got - want).abs() / (1e-3 * size + 2**-8 * want.abs() + 1e-30)).max())
    status = route(a, b)
    if not worst <= 1.0:
        return Cell("failed", f"{status} GEMM is off its error bound by a factor {worst:.3g}")
    if status == "emulated" and isinstance(a, QTensor) and isinstance(b, QTensor):
        return Cell(status, native.support(a.spec, b.spec, a.device).reason)
    return Cell(status)


def _probe_grouped(subject: Recipe, device: torch.device) -> Cell:
    """Check three experts, one without tokens: y is near the exact product, and all results are near the CPU's."""
    tokens, out, inner = TILE
    there: Any = GroupedLinear(3, inner, out, bias=False, recipe=subject, device="cpu", dtype=torch.bfloat16)
    with torch.no_grad():
        there.weight.copy_(torch.stack([_tile(out, inner, 3 + g) for g in range(3)]))
    here = copy.deepcopy(there).to(device)
    x, dy = _tile(tokens, inner, 0), _tile(tokens, out, 2)
    sizes = torch.tensor([tokens - 60, 0, 60], device="cpu", dtype=torch.int64)
    got, want = (_grouped_step(layer, x, dy, sizes) for layer in (here, there))
    weights = there.weight.detach().double().repeat_interleave(sizes, 0)
    exact = torch.einsum("tk,tnk->tn", x.double(), weights)
    apart = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, want, strict=True)]
    error = float((want[0].double() - exact).norm() / exact.norm())
    quant = subject.linear()
    gemms = (quant.fprop, quant.dgrad, quant.wgrad)
    status = max((grouped_gemm.route(g.left, g.right, device) for g in gemms), key=ROUTES.index)
    if not (max(apart) < 0.02 and error < 0.25):
        return Cell("failed", f"{status}: off the product by {error:.3f}, off the reference by {max(apart):.3f}")
    return Cell(status)


def _grouped_step(layer: Any, x: Tensor, dy: Tensor, sizes: Tensor) -> list[Tensor]:
    """Run forward and backward, and return y, dx and dw on the CPU."""
    device = layer.weight.device
    leaf = x.clone().to(device).requires_grad_()
    y = layer(leaf, sizes.to(device))
    return [t.detach().cpu() for t in (y, *torch.autograd.grad(y, (leaf, layer.weight), dy.to(device)))]


def render(report: dict[str, Any]) -> str:
    if not report.get("recipes"):
        return ""
    facts = report["machine"]
    gpu = f"{facts['gpu']} ({facts['capability']}, {facts['memory_gib']} GiB)" if facts["gpu"] else "no GPU"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("octavo", "torch", "triton", "cuda") if facts[name])
    rows = [[name, *(cells[c]["status"] for c in COLUMNS)] for name, cells in report["recipes"].items()]
    parts = [f"{gpu}; python {facts['python']}, {versions}", table(("recipe", *COLUMNS), rows)]
    notes = dict.fromkeys(
        f"{name} {column}: {cell['why']}"
        for name, cells in report["recipes"].items()
        for column, cell in cells.items()
        if cell["status"] == "failed"
    )
    parts += ["\n".join(notes)] if notes else []
    parts += [f"emulated: {why}" for why in report["emulated"].values()]
    off = [path for path in report["fast_paths"] if path["why"]]
    parts += [f"{path['name']}: off, because {path['why']}. {path['what']}" for path in off]
    parts += [f"known bad: {entry['what']} ({entry['where']}). {entry['octavo']}" for entry in report["known_bad"]]
    parts.append(_verdict(report))
    return "\n\n".join(parts)


def _verdict(report: dict[str, Any]) -> str:
    if report["failed"]:
        return f"{len(report['failed'])} probes failed: {', '.join(report['failed'])}."
    count = len(report["recipes"])
    if "interrupted" in report:
        return f"Interrupted: {count} of {len(SHIPPED)} recipes were checked, and run here."
    if report["machine"]["gpu"] is None:
        return f"All {count} recipes run here, on the reference: exact codes and scales, no speed."
    return f"All {count} recipes run here: each was checked against the reference, byte for byte or within its bound."
