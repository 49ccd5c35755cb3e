"""The compilations of norms: kinds, widths and dtypes, with a residual or an added gradient where fusions have one."""

import torch

from octavo.kernels.norm import Norm
from octavo.kernels.norm.triton import (
    MOST,
    PART_COLUMNS,
    PART_HEIGHT,
    PART_ROWS,
    STAGES,
    _backward_kernel,
    _forward_kernel,
    _long_dx_kernel,
    _long_parts_kernel,
    _shape,
    constants,
)
from octavo.quant import tile
from octavo.quant.tile import Variant


def variants() -> list[Variant]:
    layer, rms, l2 = Norm("layer", 1e-5), Norm("rms", 1e-5, zero_centered=True), Norm("l2", 1e-6)
    cases = [(norm, n, torch.bfloat16) for norm in (layer, rms, l2) for n in (128, 4096, MOST, 4 * MOST)]
    cases += [(layer, 4096, torch.float32), (layer, MOST, torch.float32), (rms, MOST, torch.float16)]
    return [variant for case in cases for variant in _variants(*case)]


def _variants(norm: Norm, n: int, dtype: torch.dtype) -> list[Variant]:
    """Lists the kernels that a norm of rows of n elements launches."""
    kind, (rows, columns, warps) = tile.POINTERS[dtype], _shape(n)
    title = f"{norm.kind} {dtype} {rows}x{columns}{'' if n <= MOST else ', long'}"
    weight, bias = norm.kind != "l2", norm.centers
    pointers = {
        "x": kind, "y": kind, "dy": kind, "dx": kind, "rstd": "*fp32", "rstd_out": "*fp32",
        "mean": "*fp32" if norm.centers else None, "mean_out": "*fp32" if norm.centers else None,
        "weight": kind if weight else None, "dw": "*fp32" if weight else None,
        "bias": kind if bias else None, "db": "*fp32" if bias else None,
    }  # fmt: skip
    sizes = dict.fromkeys(("M", "N", "stride_m", "dy_stride_m", "writes"), "i32")
    fixed = {
        "stride_n": 1, "dy_stride_n": 1, "EPS": norm.eps, **constants(norm), "WHOLE": n <= MOST,
        "ROWS": rows, "COLUMNS": columns, "HEIGHT": PART_HEIGHT, "STAGES": STAGES[dtype.itemsize],
    }  # fmt: skip

    def variant(name, kernel, warps=warps, added=None, extra=None, **changed):
        said, own = {**pointers, **sizes, "added": added, "extra": extra, "z": extra}, {**fixed, **changed}
        signature = {k: said[k] for k in kernel.arg_names if said.get(k) is not None}
        own = {k: own.get(k) for k in kernel.arg_names if k not in signature}
        return Variant(f"{name} {title}", kernel, signature, own, warps, 1)

    found = [variant("norm", _forward_kernel)]
    if weight and n <= MOST:  # octavo/fusion/rules/add_norm_linear.py
        found.append(variant("norm of a sum", _forward_kernel, extra=kind))
    backward = _backward_kernel if n <= MOST else _long_dx_kernel
    found.append(variant("norm backward", backward))
    if norm.kind == "rms" and dtype != torch.float32:  # octavo/fusion/rules/fork_sum.py
        found.append(variant("norm backward, added", backward, added=kind))
    if n > MOST and (weight or bias):
        found.append(variant("norm sums", _long_parts_kernel, 4, ROWS=PART_ROWS, COLUMNS=PART_COLUMNS))
    return found
