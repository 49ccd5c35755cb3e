"""Grouped GEMMs on a GPU: with the Hopper kernels where one applies, to the codes or to their decoded values, else with
those that run on any GPU; and the small kernels around them. All of them have a fixed grid and read the number of rows
on the device."""

from functools import lru_cache
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo._torch.operators import grouped_mm
from octavo.kernels.decode import is_worth_it
from octavo.kernels.grouped_gemm import decoded, emulated, hopper, hopper_support
from octavo.kernels.grouped_gemm.scale_strides import whole
from octavo.launch import Launch
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.qtensor import QTensor


def rows(
    a: GroupedTensor, b: QTensor, out: Tensor, bias: Tensor | None, scales: Tensor | None, height: int, along: str,
    accumulation: str,
) -> None:  # fmt: skip
    # a sum may stay in the tensor cores only where its scales multiply it at the end
    takes, fast = hopper.takes_rows(a, b), accumulation == "fast" and whole(a.q.spec)
    if takes and fast and hopper_support.rows(a.q.spec, b.spec, out.device, fast=True):
        hopper.fast_rows(a, b, out, bias, scales, height, along)
        return
    fits = takes and hopper_support.rows(a.q.spec, b.spec, out.device)
    # the host does not know the sizes of groups: the mean decides
    each = a.groups.rows // a.groups.number
    _coded_way(fits, a, each, out.shape[1]).rows(a, b, out, bias, scales, height, along)


def grouped_wgrad(a: GroupedTensor, b: GroupedTensor, out: Tensor, accumulate: bool) -> None:
    fits = hopper_support.grouped_wgrad(a.q.spec, b.q.spec, out.device) and hopper.takes_wgrad(a, b)
    _coded_way(fits, a, *out.shape[1:]).grouped_wgrad(a, b, out, accumulate)


def plain_rows(a: Tensor, b: Tensor, out: Tensor, groups: Groups, bias: Tensor | None, scales: Tensor | None) -> None:
    fits = hopper_support.runs("plain rows", out.device) and hopper.takes_plain_rows(a, b)
    (hopper if fits else emulated).plain_rows(a, b, out, groups, bias, scales)


def _coded_way(fits: bool, a: GroupedTensor, m: int, n: int) -> ModuleType:
    """Return the module for codes, of m rows by n for each group; `fits` says that a Hopper kernel multiplies them."""
    # decoding takes the time of one product: it pays where tiles of codes would be decoded often
    if fits:
        return hopper
    return decoded if is_worth_it(a.q, m, n) and hopper_support.support("plain rows", a.q.device).ok else emulated


def plain_wgrad(a: Tensor, b: Tensor, out: Tensor, groups: Groups, accumulate: bool) -> None:
    if out.dtype == torch.bfloat16 and _is_torch_s(a) and _is_torch_s(b):
        dw = grouped_mm(a.T, b, groups.start[1:])
        _ = out.add_(dw) if accumulate else out.copy_(dw)
    else:
        emulated.plain_wgrad(a, b, out, groups, accumulate)


def fresh_wgrad(a: Tensor, b: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Use torch's grouped GEMM if it takes the operands (bfloat16): it reads no size on the host, but allocates dw."""
    if dtype == torch.bfloat16 and _is_torch_s(a) and _is_torch_s(b):
        return grouped_mm(a.T, b, groups.start[1:])
    out = torch.empty(groups.number, a.shape[1], b.shape[1], dtype=dtype, device=a.device)
    emulated.plain_wgrad(a, b, out, groups, False)
    return out


def _is_torch_s(x: Tensor) -> bool:
    # torch's kernel copies by TMA: 16 bytes, and rows that follow each other
    aligned = x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0
    return x.dtype == torch.bfloat16 and x.is_contiguous() and aligned


# -- around them -------------------------------------------------------------------------------------------------------


@triton.jit
def _zero_tail_kernel(out, start, ROWS, N, G, SIZE: tl.constexpr):
    # the tail begins where the last group ends, which the device alone knows: the grid covers any tail
    first = tl.load(start + G).to(tl.int64) * N
    total = tl.cast(ROWS, tl.int64) * N
    for at in range(first + tl.program_id(0) * SIZE, total, tl.num_programs(0) * SIZE):
        i = at + tl.arange(0, SIZE)
        tl.store(out + i, tl.zeros((SIZE,), out.dtype.element_ty), mask=i < total)


def zero_tail(out: Tensor, groups: Groups) -> None:
    _zero_tail_launch(out.shape, groups.number, hopper.processors(out.device))(out, groups.start)


@lru_cache(maxsize=4096)
def _zero_tail_launch(shape: tuple[int, ...], groups: int, programs: int) -> Launch:
    return Launch(_zero_tail_kernel, programs, (shape[0], shape[1], groups), num_warps=4, SIZE=2048)


@triton.jit
def _column_sums_kernel(
    dy, out, start, scales, N, stride_m, stride_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(N, COLUMNS)
    g, n = tl.program_id(0) // across, tl.program_id(0) % across
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    first, end = tl.load(start + g), tl.load(start + g + 1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(first, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_n
        v = tl.load(dy + at, mask=(rows < end)[:, None] & (columns < N)[None, :], other=0.0).to(tl.float32)
        if scales is not None:
            v *= tl.load(scales + rows, mask=rows < end, other=0.0).to(tl.float32)[:, None]
        total += v
    tl.store(out + g.to(tl.int64) * N + columns, tl.sum(total, 0).to(out.dtype.element_ty), mask=columns < N)


def column_sums(dy: Tensor, groups: Groups, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    out = torch.empty(groups.number, dy.shape[1], dtype=dtype, device=dy.device)
    _column_sums_launch(groups.number, (dy.shape[1], *dy.stride()))(dy, out, groups.start, scales)
    return out


@lru_cache(maxsize=4096)
def _column_sums_launch(groups: int, sizes: tuple[int, ...]) -> Launch:
    grid = groups * triton.cdiv(sizes[0], 128)
    return Launch(_column_sums_kernel, grid, sizes, num_warps=4, ROWS=32, COLUMNS=128)


@triton.jit
def _bias_products_kernel(
    dy, bias, out, owner, source, live, N, stride_m, stride_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    block, before = tl.program_id(0) // (SIZE // ROWS), tl.program_id(0) % (SIZE // ROWS) * ROWS
    rows = before + tl.arange(0, ROWS)
    mine = rows < tl.load(live + block)
    group, t = tl.load(owner + block).to(tl.int64), tl.load(source + block) + rows
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, N, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        at = t.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_n
        v = tl.load(dy + at, mask=mine[:, None] & (columns < N)[None, :], other=0.0).to(tl.float32)
        b = tl.load(bias + group * N + columns, mask=(columns < N) & (group >= 0), other=0.0).to(tl.float32)
        total += v * b[None, :]
    tl.store(out + t, tl.sum(total, 1).to(out.dtype.element_ty), mask=mine)


def bias_products(dy: Tensor, bias: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(dy.shape[0], dtype=dtype, device=dy.device)
    _bias_products_launch(groups.owner.shape[0], (dy.shape[1], *dy.stride()))(
        dy, bias, out, groups.owner, groups.source, groups.live
    )
    return out


@lru_cache(maxsize=4096)
def _bias_products_launch(blocks: int, sizes: tuple[int, ...]) -> Launch:
    grid = blocks * (BLOCK // 16)
    return Launch(_bias_products_kernel, grid, sizes, num_warps=4, ROWS=16, COLUMNS=256, SIZE=BLOCK)
