"""Sums down the columns, in float32. Few rows take one launch; torch sums many, sharing them among programs, and
rounds in a second pass."""

# mypy: allow-untyped-defs, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.launch import Launch
from octavo.quant.tile import Variant

FEW = 1024
ROWS, COLUMNS, WARPS = 64, 32, 4  # of a tile


@triton.jit
def _sums_kernel(x, out, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, M, ROWS):
        rows = first + tl.arange(0, ROWS)
        live = (rows < M)[:, None] & (columns < N)[None, :]
        total += tl.load(x + rows.to(tl.int64)[:, None] * N + columns[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(out + columns, tl.sum(total, 0).to(out.dtype.element_ty), mask=columns < N)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.shape[0] > FEW or x.numel() == 0 or not x.is_contiguous():
        # torch shares many rows among programs, which one column of tiles here would read one after the other
        return x.sum(0, dtype=torch.float32).to(dtype)
    out = torch.empty(x.shape[1], dtype=dtype, device=x.device)
    _launch(x.shape[0], x.shape[1])(x, out)
    return out


@lru_cache(maxsize=4096)
def _launch(m: int, n: int) -> Launch:
    return Launch(_sums_kernel, triton.cdiv(n, COLUMNS), (m, n), num_warps=WARPS, ROWS=ROWS, COLUMNS=COLUMNS)


def variants() -> list[Variant]:
    sizes, fixed = {"M": "i32", "N": "i32"}, {"ROWS": ROWS, "COLUMNS": COLUMNS}
    kinds = [("*fp32", "*bf16"), ("*fp32", "*fp32"), ("*bf16", "*bf16"), ("*fp16", "*fp16")]
    return [
        Variant(f"sums of {x} to {out}", _sums_kernel, {"x": x, "out": out, **sizes}, fixed, WARPS) for x, out in kinds
    ]
