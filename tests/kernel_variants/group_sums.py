"""The compilations of sums for rows in groups."""

from octavo.kernels.activation.cast.group_sums import (
    ACROSS,
    DOWN,
    ROWS_ACROSS,
    WARPS,
    _group_sums_kernel,
    _row_sums_kernel,
)
from octavo.quant.groups import BLOCK
from octavo.quant.tile import Variant


def variants() -> list[Variant]:
    found = []
    for out in ("*fp32", "*bf16"):
        signature = {"parts": "*fp32", "out": out, "block": "*i32", "N": "i32"}
        fixed = {"EACH": 2, "DOWN": DOWN, "ACROSS": ACROSS}
        found.append(Variant(f"sums of groups to {out}", _group_sums_kernel, signature, fixed, WARPS))
        where = {"source_row": "*i32", "used_rows": "*i32"}
        signature = {"parts": "*fp32", "out": out, **where, "TILES": "i32", "M": "i32"}
        fixed = {"SIZE": BLOCK, "DOWN": DOWN, "ACROSS": ROWS_ACROSS}
        found.append(Variant(f"sums of rows in groups to {out}", _row_sums_kernel, signature, fixed, WARPS))
    return found
