"""Triton building blocks of the quantize kernels. A kernel reads a tile of x once and writes it in both orientations.

Every kernel runs a one-dimensional grid of tiles, row by row, addresses elements in 64 bits, masks the edges and leaves
at once where the skip flag says so. Casts to FP8 are the hardware's: round to nearest even, saturate, NaN to 0x7f.
`/` is Triton's fast divide, so every division here is `tl.div_rn`.
"""

from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Quantizer

S = TypeVar("S", bound=Quantizer)


class Config(NamedTuple):
    """A tile and the warps that work on it."""

    rows: int
    columns: int
    warps: int


class Variant(NamedTuple):
    """One compilation of a kernel, for compiling it where there is no GPU."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    is_matmul: bool = False


POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


def tiles(x: Tensor, config: Config) -> tuple[int]:
    """The grid: at least one tile each way, so that scales of empty tensors are written too."""
    m, k = x.shape
    return (max(1, triton.cdiv(m, config.rows)) * max(1, triton.cdiv(k, config.columns)),)


def spec_of(kind: type[S], row: QTensor | None, column: QTensor | None) -> S:
    """The quantizer that both orientations share."""
    specs = {q.spec for q in (row, column) if q is not None}
    spec = specs.pop()
    assert not specs and isinstance(spec, kind)
    return spec


def bytes_of(q: QTensor | None) -> Tensor | None:
    return None if q is None else q.codes


def scales_of(q: QTensor | None) -> Tensor | None:
    return None if q is None else q.scale


@triton.jit
def tile_index(K, COLUMNS: tl.constexpr):
    """(tile row, tile column) of this program."""
    across = tl.maximum(tl.cdiv(K, COLUMNS), 1)
    pid = tl.program_id(0)
    return pid // across, pid % across


@triton.jit
def load_tile(x, M, K, stride_m, stride_k, rows, columns):
    """x[rows, columns] in its own dtype; zero outside."""
    at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
    return tl.load(x + at, mask=(rows < M)[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit
def store_codes(codes, tile, M, K, rows, columns):
    """tile -> codes[rows, columns] of a contiguous [M, K]."""
    at = rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(codes + at, tile, mask=(rows < M)[:, None] & (columns < K)[None, :])


@triton.jit
def encode_scale(amax, MAX: tl.constexpr, EPS: tl.constexpr, CEILING: tl.constexpr, POW2: tl.constexpr):
    """The twin of octavo.quant.scale.encode_scale."""
    a = tl.where(amax < EPS, EPS, amax)  # a NaN passes
    s = tl.div_rn(tl.zeros_like(a) + MAX, a)
    s = tl.where(s == float("inf"), CEILING, s)
    odd = (a == 0) | (a == float("inf")) | (a != a)
    s = tl.where(odd, 1.0, s)
    if POW2:
        s = (s.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return s


@triton.jit
def reciprocal(s):
    return tl.div_rn(tl.zeros_like(s) + 1.0, s)


@triton.jit
def magnitude_bits(v):
    """|v| as int32: ordered as the magnitudes are, NaN above all, so that an integer max is an amax that keeps NaN."""
    return v.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_along(v, axis: tl.constexpr):
    """Largest magnitude along an axis of v, NaN kept."""
    return tl.max(magnitude_bits(v), axis).to(tl.float32, bitcast=True)


@triton.jit
def _tensor_amax_kernel(x, out, skip, M, K, stride_m, stride_k, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if skip is not None:
        if tl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    rows, columns = pm * ROWS + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    v = load_tile(x, M, K, stride_m, stride_k, rows, columns)
    tl.atomic_max(out, tl.max(tl.max(magnitude_bits(v), 1), 0), sem="relaxed")


AMAX_CONFIGS = (Config(64, 256, 8), Config(32, 256, 4), Config(128, 128, 8))


def tensor_amax(x: Tensor, skip: Tensor | None, config: Config = AMAX_CONFIGS[0]) -> Tensor:
    """max|x| as float32 [1]. An atomic max of integers: the same bits in any order."""
    out = torch.zeros(1, dtype=torch.int32, device=x.device)
    _tensor_amax_kernel[tiles(x, config)](
        x, out, skip, *x.shape, *x.stride(), ROWS=config.rows, COLUMNS=config.columns, num_warps=config.warps
    )
    return out.view(torch.float32)


SIZES = {"M": "i32", "K": "i32", "stride_m": "i32"}
CONTIGUOUS = {"stride_k": 1}


def variants() -> list[Variant]:
    return [
        Variant(
            f"tensor_amax {dtype} {config}",
            _tensor_amax_kernel,
            {"x": POINTERS[dtype], "out": "*i32", **SIZES},
            {"skip": None, **CONTIGUOUS, "ROWS": config.rows, "COLUMNS": config.columns},
            config.warps,
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for config in AMAX_CONFIGS
    ]
