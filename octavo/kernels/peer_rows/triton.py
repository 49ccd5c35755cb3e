"""Rows in memory of other ranks on the GPU: a kernel writes or reads it by its address, over NVLink where it is another
GPU's. Each program moves a part of a row. The caller waits for the ranks before and after."""

# mypy: allow-untyped-defs, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.peer_rows import HEIGHT, HEIGHT_BITS, Peers
from octavo.launch import Launch
from octavo.quant.tile import Variant

COLUMNS = 1024  # words of a row in one program
WARPS = 4
_BITS, _ROW = tl.constexpr(HEIGHT_BITS), tl.constexpr(HEIGHT - 1)


@triton.jit
def _address(addresses, at, W, like):
    """Return a pointer to the row at a place."""
    memory = tl.multiple_of(tl.load(addresses + (at >> _BITS)).to(like.dtype), 16)
    return memory + (at & _ROW) * W


@triton.jit
def _put_kernel(x, addresses, numbers, target, W, COLUMNS: tl.constexpr):
    across = tl.cdiv(W, COLUMNS)
    number, columns = tl.program_id(0) // across, tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.load(target + number)
    if at >= 0:
        row = number
        if numbers is not None:
            row = tl.load(numbers + number)
        value = tl.load(x + row.to(tl.int64) * W + columns, mask=columns < W)
        tl.store(_address(addresses, at, W, x) + columns, value, mask=columns < W)


@triton.jit
def _get_kernel(out, addresses, target, W, COLUMNS: tl.constexpr):
    across = tl.cdiv(W, COLUMNS)
    number, columns = tl.program_id(0) // across, tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.load(target + number)
    if at >= 0:
        value = tl.load(_address(addresses, at, W, out) + columns, mask=columns < W)
        tl.store(out + number.to(tl.int64) * W + columns, value, mask=columns < W)


def put(x: Tensor, source: Tensor | None, target: Tensor, peers: Peers) -> None:
    _launch(_put_kernel, target.shape[0], x.shape[1])(x, peers.addresses, source, target)


def get(out: Tensor, target: Tensor, peers: Peers) -> None:
    _launch(_get_kernel, target.shape[0], out.shape[1])(out, peers.addresses, target)


@lru_cache(maxsize=4096)
def _launch(kernel, rows: int, width: int) -> Launch:
    columns = min(COLUMNS, max(triton.next_power_of_2(width), 32))
    return Launch(kernel, rows * triton.cdiv(width, columns), (width,), num_warps=WARPS, COLUMNS=columns)


def variants() -> list[Variant]:
    found = []
    places, fixed = {"addresses": "*i64", "target": "*i64", "W": "i32"}, {"COLUMNS": COLUMNS}
    for kind in ("*i64", "*i32", "*u8"):
        numbered = {"x": kind, "numbers": "*i32", **places}
        found.append(Variant(f"peer rows put {kind}, by number", _put_kernel, numbered, fixed, WARPS))
        every = fixed | {"numbers": None}
        found.append(Variant(f"peer rows put {kind}, every one", _put_kernel, {"x": kind, **places}, every, WARPS))
        found.append(Variant(f"peer rows get {kind}", _get_kernel, {"out": kind, **places}, fixed, WARPS))
    return found
