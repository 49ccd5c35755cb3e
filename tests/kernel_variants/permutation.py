"""The compilations of the permutation: its sort, and its rows in every dtype and with every kind of probabilities."""

from typing import Any

import torch

from octavo.kernels.permute.triton import (
    COLUMNS,
    EMPTY,
    FILL,
    ITEMS,
    MASK,
    OTHERS,
    SCAN,
    TAKEN,
    WARPS,
    _bins,
    _combine_backward_kernel,
    _combine_kernel,
    _histogram_kernel,
    _listed_kernel,
    _place_kernel,
    _scan_kernel,
    _scatter_kernel,
    _take_backward_kernel,
    _take_kernel,
)
from octavo.quant import tile
from octavo.quant.tile import Variant


def variants() -> list[Variant]:
    return [*_sort_variants(), *_row_variants()]


def _variant(name: str, kernel, pointers: dict[str, Any], constants: dict[str, Any], warps: int = WARPS) -> Variant:
    """Sizes are int32; strides of one element, pointers that are None and constants are known to the compiler."""
    known = {"stride_k": 1, "dy_stride_k": 1, **constants}
    names = kernel.arg_names
    signature = {n: pointers.get(n, "i32") for n in names if n not in known and pointers.get(n, "") is not None}
    fixed = {n: known.get(n) for n in names if n not in signature}
    return Variant(name, kernel, signature, fixed, warps)


def _sort_variants() -> list[Variant]:
    numbers = {n: "*i32" for n in ("counts", "totals", "positions", "assignments")} | {"sizes": "*i64", "mask": "*u8"}
    found = []
    for experts in (16, 128):
        tile_of = {"ROWS": MASK // experts, "COLUMNS": experts}
        found.append(_variant(f"listed {experts} experts", _listed_kernel, numbers | {"index": "*i32"}, tile_of))
    for kind in ("*i32", "*i64"):
        for experts in (8, 128, 1024):
            said, pointers = f"{kind} {experts} experts", numbers | {"index": kind}
            bins = {"ITEMS": ITEMS, "BINS": _bins(experts + 1)}
            found.append(_variant(f"sort histogram {said}", _histogram_kernel, pointers, bins))
            place = {"ITEMS": ITEMS, "OTHERS": OTHERS, "EXPERTS": _bins(experts), "FILL": FILL}
            found.append(_variant(f"sort place {said}", _place_kernel, pointers, place, 8))
    found.append(_variant("sort scan", _scan_kernel, numbers, {"ROWS": SCAN[0], "COLUMNS": SCAN[1]}, 8))
    return found


def _row_variants() -> list[Variant]:
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kind = tile.POINTERS[dtype]
        matrices = dict.fromkeys(("x", "out", "rows", "y", "dy", "drows"), kind)
        for way, probs, experts in (("", None, None), (", probs", "*fp32", None), (", dense probs", kind, "*i32")):
            pointers = matrices | {
                "positions": "*i32",
                "assignments": "*i32",
                "probs": probs,
                "experts": experts,
                "dprobs": probs,
            }
            for zero in (True, False):
                fixed = {"ZERO_TAIL": zero, "EMPTY": EMPTY, "COLUMNS": COLUMNS}
                name = f"{kind}{way}{'' if zero else ', tail untouched'}"
                found.append(_variant(f"scatter rows {name}", _scatter_kernel, pointers, fixed))
                if probs is not None:
                    fixed = fixed | {"COLUMNS": 2 * COLUMNS}
                    found.append(_variant(f"combine backward {name}", _combine_backward_kernel, pointers, fixed))
            found.append(_variant(f"combine rows {kind}{way}", _combine_kernel, pointers, {"COLUMNS": COLUMNS}))
        for way, experts in (("", None), (", dense", "*i32")):
            pointers = {"positions": "*i32", "assignments": "*i32", "experts": experts}
            pointers |= dict.fromkeys(("probs", "out", "grad", "dprobs"), kind)
            found.append(_variant(f"take {kind}{way}", _take_kernel, pointers, {"SIZE": TAKEN}))
            found.append(_variant(f"take backward {kind}{way}", _take_backward_kernel, pointers, {"SIZE": TAKEN}))
    return found
