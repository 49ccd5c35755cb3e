"""Launch the kernels that contract over the rows of each group: dw."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from octavo.kernels.grouped_gemm.hopper.contraction import depth_kernel, whole_depth_kernel
from octavo.kernels.grouped_gemm.hopper.tiles import (
    HALF_TILE,
    QUARTER_TILE,
    SPAN,
    TILE,
    can_be_copied,
    is_wide,
    processors,
    tiles_of,
)
from octavo.kernels.grouped_gemm.hopper.wide_contraction import wide_depth_kernel
from octavo.kernels.grouped_gemm.scale_strides import grouped_strides, whole
from octavo.launch import TiledLaunch, Tiles
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK

DEEP = 1024  # rows of a group on average: at 2048 wide tiles take 0.977 of the time of narrow ones, at 512 1.013
LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def takes_wgrad(a: GroupedTensor, b: GroupedTensor) -> bool:
    scales = whole(a.q.spec) or (can_be_copied(a.q.scale.T) and can_be_copied(b.q.scale.T))
    return can_be_copied(a.q.codes) and can_be_copied(b.q.codes) and scales


def grouped_wgrad(a: GroupedTensor, b: GroupedTensor, out: Tensor, accumulate: bool) -> None:
    if whole(a.q.spec):
        _whole_depth(a, b, out, accumulate)
    else:
        lines = a.groups.number * -(-out.shape[1] // BLOCK)
        # where results are written once, and groups are short, the larger tile waits longer for its end than it gains
        pays = accumulate or a.groups.rows >= DEEP * a.groups.number
        wide = pays and is_wide(out.shape[2], lines, processors(out.device))
        _depth(a, b, out, accumulate, WIDE if wide else NARROW)


class _Way(NamedTuple):
    """A kernel, the columns of its tiles, and the parts of 64 rows by which TMA writes them."""

    kernel: Any
    across: int
    part: int
    layout: gl.NVMMASharedLayout


WIDE, NARROW = _Way(wide_depth_kernel, 256, 64, QUARTER_TILE), _Way(depth_kernel, BLOCK, BLOCK, HALF_TILE)


def _depth(a: GroupedTensor, b: GroupedTensor, out: Tensor, accumulate: bool, way: _Way) -> None:
    sizes = a.groups.number, *out.shape[1:], _span(out.shape[1])
    _depth_launch(way.kernel, processors(out.device), sizes, accumulate)(
        tiles_of(a.q.codes), Tiles(b.q.codes, [way.across, BLOCK], TILE),
        Tiles(a.q.scale.T, [1, BLOCK], LINE), Tiles(b.q.scale.T, [1, way.across], LINE),  # [blocks, rows], contiguous
        out, None if accumulate else _parts(out, way.part, way.layout), a.groups.block,
    )  # fmt: skip


def _whole_depth(a: GroupedTensor, b: GroupedTensor, out: Tensor, accumulate: bool) -> None:
    left, right = grouped_strides(a), grouped_strides(b)
    sizes = a.groups.number, *out.shape[1:], left.group, right.group, _span(out.shape[1])
    halves = None if accumulate else _parts(out, BLOCK, HALF_TILE)
    launch = _whole_depth_launch(processors(out.device), sizes, left.row == 1, right.row == 1, accumulate)
    launch(tiles_of(a.q.codes), tiles_of(b.q.codes), out, halves, a.q.scale, b.q.scale, a.groups.block)


def _parts(out: Tensor, part: int, layout: gl.NVMMASharedLayout) -> Tiles | None:
    """Return `out` [G, N, K] for TMA to write 64 rows of so many columns at once; None if float32, unaligned, or rows
    of two groups would be written at once."""
    if out.dtype == torch.float32 or out.shape[1] % BLOCK or out.shape[2] % 8 or out.data_ptr() % 16:
        return None
    return Tiles(out.view(-1, out.shape[2]), [BLOCK // 2, part], layout)


def _span(n: int) -> int:
    """Return how many tiles down are computed together: as many as divide their number, SPAN at most."""
    down = -(-n // BLOCK)
    return next(span for span in range(SPAN.value, 0, -1) if down % span == 0)


@lru_cache(maxsize=4096)
def _depth_launch(kernel: Any, programs: int, sizes: tuple[int, ...], add: bool) -> TiledLaunch:
    return TiledLaunch(kernel, programs, sizes, num_warps=4, ADD=add)


@lru_cache(maxsize=4096)
def _whole_depth_launch(programs: int, sizes: tuple[int, ...], a_each: bool, b_each: bool, add: bool) -> TiledLaunch:
    return TiledLaunch(whole_depth_kernel, programs, sizes, num_warps=4, A_EACH=a_each, B_EACH=b_each, ADD=add)
