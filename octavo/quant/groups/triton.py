"""The layout of groups in one launch. Every program sums all sizes and places some of the blocks."""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from octavo.launch import Launch
from octavo.quant import tile
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.tile import Variant

_WORK = 4096  # comparisons of blocks with groups at a time: more would not fit in registers
_PROGRAMS = 128


@triton.jit
def _split_kernel(
    start, block, owner, source, live, splits,
    ROWS, G, B, EACH,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, GROUPS)
    inside = g < G
    if splits is None:  # all of one size
        n = tl.where(inside, EACH, 0).to(tl.int64)
    else:
        n = tl.load(splits + g, mask=inside, other=0).to(tl.int64)
    n = tl.where(n < 0, 0, tl.where(n < ROWS, n, ROWS))  # so that no sum of them overflows
    total = tl.cumsum(n, 0)
    ends = tl.where(total < ROWS, total, ROWS)
    begins = tl.where(total - n < ROWS, total - n, ROWS)
    blocks = (ends - begins + SIZE - 1) // SIZE
    last = tl.cumsum(blocks, 0)
    first = last - blocks
    if tl.program_id(0) == 0:
        tl.store(start + g, begins.to(tl.int32), mask=inside)
        tl.store(block + g, first.to(tl.int32), mask=inside)
        tl.store(start + G, tl.max(ends, 0).to(tl.int32))
        tl.store(block + G, tl.max(last, 0).to(tl.int32))
    for chunk in range(tl.program_id(0) * CHUNK, B, tl.num_programs(0) * CHUNK):
        b = chunk + tl.arange(0, CHUNK).to(tl.int64)
        group = tl.sum(((last[None, :] <= b[:, None]) & inside[None, :]).to(tl.int32), 1)
        mine = g[None, :] == group[:, None]
        at = tl.sum(tl.where(mine, begins[None, :] + (b[:, None] - first[None, :]) * SIZE, 0), 1)
        left = tl.sum(tl.where(mine, ends[None, :], 0), 1) - at
        used = group < G
        tl.store(owner + b, tl.where(used, group, -1), mask=b < B)
        tl.store(source + b, tl.where(used, at, 0).to(tl.int32), mask=b < B)
        tl.store(live + b, tl.where(used, tl.minimum(left, SIZE), 0).to(tl.int32), mask=b < B)


def split(splits: Tensor | None, each: int, groups: Groups) -> None:
    """Fill the tensors of `groups` from these sizes, or from the size `each` for all if `splits` is None."""
    launch = _split_launch(groups.rows, groups.number, groups.owner.shape[0], each)
    launch(*groups.tensors(), None if splits is None else splits.contiguous())


@lru_cache(maxsize=4096)
def _split_launch(rows: int, groups: int, blocks: int, each: int) -> Launch:
    width = triton.next_power_of_2(groups)
    chunk = max(_WORK // width, 1)
    return Launch(
        _split_kernel, min(max(triton.cdiv(blocks, chunk), 1), _PROGRAMS), (rows, groups, blocks, each), num_warps=4,
        SIZE=BLOCK, GROUPS=width, CHUNK=chunk,
    )  # fmt: skip


def variants() -> list[Variant]:
    pointers = dict.fromkeys(("start", "block", "owner", "source", "live"), "*i32")
    return [
        tile.variant_of(f"split {kind} {groups} groups", _split_launch(4096, groups, 64, 16), splits=kind, **pointers)
        for kind in ("*i32", "*i64")
        for groups in (8, 256)
    ]
