"""The permutation on the GPU.

The sort takes three launches: a histogram of each block of assignments, the sums of these over the blocks before, and
the rows of the assignments. Two assignments of a block that name one expert are ranked by comparing all pairs, so the
work does not grow with the number of experts. Row kernels run one program for each part of a token: it reads the token
once and writes its rows, or reads its rows and writes the token. Programs at the end of the grid write the rows without
an assignment.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, no-check-untyped-defs

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.permute import PAD, TAIL, Assignments, Sorted
from octavo.launch import Launch

ITEMS, OTHERS = 256, 16  # assignments of a block, and how many of them each is compared with at a time
SCAN = (256, 16)  # blocks and experts of a tile of histograms
FILL = 1024  # rows of the tail that one program of the sort marks
MASK = 4096  # elements of a mask's tile
COLUMNS = 1024  # of a row, in one program
EMPTY = 16  # rows that one program looks at for empty ones
TAKEN = 1024  # probabilities of one program
WARPS = 4
_PAD, _TAIL = tl.constexpr(PAD), tl.constexpr(TAIL)


# -- sort --------------------------------------------------------------------------------------------------------------


@triton.jit
def _listed_kernel(mask, index, T, E, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tokens = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    # experts of a token in ascending order: an assignment's place is the number of experts before it
    used = tl.zeros((ROWS,), tl.int32)
    for first in range(0, E, COLUMNS):
        experts = (first + tl.arange(0, COLUMNS))[None, :]
        live = (tokens < T) & (experts < E)
        chosen = (tl.load(mask + tokens * E + experts, mask=live, other=0) != 0).to(tl.int32)
        assignment = used[:, None] + tl.cumsum(chosen, 1) - chosen
        tl.store(
            index + tokens * K + assignment, experts + tokens.to(tl.int32) * 0, mask=(chosen != 0) & (assignment < K)
        )
        used += tl.sum(chosen, 1)
    for first in range(0, K, COLUMNS):
        assignment = (first + tl.arange(0, COLUMNS))[None, :]
        left = (tokens < T) & (assignment < K) & (assignment >= used[:, None])
        tl.store(index + tokens * K + assignment, tl.full((ROWS, COLUMNS), -1, tl.int32), mask=left)


@triton.jit
def _experts_of(index, at, N, E):
    """Return experts of these assignments; E where there is none."""
    found = tl.load(index + at, mask=at < N, other=-1)
    return tl.where((found >= 0) & (found < E), found, E).to(tl.int32)


@triton.jit
def _histogram_kernel(index, counts, N, E, ITEMS: tl.constexpr, BINS: tl.constexpr):
    block = tl.program_id(0)
    experts = _experts_of(index, block * ITEMS + tl.arange(0, ITEMS), N, E)
    # one bin more than there are experts takes what has none
    bins = tl.arange(0, BINS)
    tl.store(counts + block.to(tl.int64) * E + bins, tl.histogram(experts, BINS), mask=bins < E)


@triton.jit
def _scan_kernel(counts, totals, B, E, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace the counts of each block by their sums over the blocks before it."""
    experts = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    # blocks one tile after the other: the sum of the blocks before is carried along
    for first in range(0, B, ROWS):
        blocks = first + tl.arange(0, ROWS)
        live = (blocks < B)[:, None] & (experts < E)[None, :]
        at = counts + blocks.to(tl.int64)[:, None] * E + experts[None, :]
        n = tl.load(at, mask=live, other=0)
        tl.store(at, total[None, :] + tl.cumsum(n, 0) - n, mask=live)
        total += tl.sum(n, 0)
    tl.store(totals + experts, total, mask=experts < E)


@triton.jit
def _place_kernel(
    index, counts, totals, sizes, positions, assignments, N, E, B, C, ALIGN, PADDED,
    ITEMS: tl.constexpr, OTHERS: tl.constexpr, EXPERTS: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Place the assignments of a block (the first B programs), mark the pads of an expert (the next PADDED), or mark
    the tail (the others)."""
    e = tl.arange(0, EXPERTS)
    n = tl.load(totals + e, mask=e < E, other=0)
    padded = (n + ALIGN - 1) // ALIGN * ALIGN
    ends = tl.cumsum(padded, 0)
    starts = ends - padded
    pid = tl.program_id(0)
    # one launch for three kinds of work: a sort takes a fixed number of launches
    if pid < B:
        if pid == 0:
            size = tl.minimum(ends, C) - tl.minimum(starts, C)
            tl.store(sizes + e, size.to(tl.int64), mask=e < E)
        within = tl.arange(0, ITEMS)
        at = pid * ITEMS + within
        expert = _experts_of(index, at, N, E)
        # the number of earlier assignments of the block with the same expert: the sort is stable, without atomics
        rank = tl.zeros((ITEMS,), tl.int32)
        for first in range(0, ITEMS, OTHERS):
            others = first + tl.arange(0, OTHERS)
            same = expert[:, None] == _experts_of(index, pid * ITEMS + others, N, E)[None, :]
            rank += tl.sum((same & (others[None, :] < within[:, None])).to(tl.int32), 1)
        known = expert < E
        before = tl.load(counts + pid.to(tl.int64) * E + expert, mask=known, other=0)
        row = tl.gather(starts, tl.where(known, expert, 0), 0) + before + rank
        # rows are as many as the caller allotted; what does not fit is dropped, and position -1 tells
        kept = known & (row < C)
        tl.store(positions + at, tl.where(kept, row, -1), mask=at < N)
        tl.store(assignments + row, at, mask=kept)
    elif pid < B + PADDED:
        own = e == pid - B
        begin = tl.sum(tl.where(own, starts + n, 0), 0)
        end = tl.minimum(tl.sum(tl.where(own, ends, 0), 0), C)
        # pads of an expert are fewer than ALIGN
        for first in range(begin, end, 32):
            row = first + tl.arange(0, 32)
            tl.store(assignments + row, tl.full((32,), _PAD, tl.int32), mask=row < end)
    else:
        row = (pid - B - PADDED) * FILL + tl.arange(0, FILL)
        tail = (row >= tl.max(ends, 0)) & (row < C)
        tl.store(assignments + row, tl.full((FILL,), _TAIL, tl.int32), mask=tail)


def listed(mask: Tensor, index: Tensor) -> None:
    _listed_launch(*mask.shape, index.shape[1])(mask, index)


def sort(index: Tensor, align: int, made: Sorted) -> None:
    number, experts, rows = index.numel(), made.sizes.shape[0], made.assignments.shape[0]
    # one even without tokens: sizes must be written
    blocks = max(triton.cdiv(number, ITEMS), 1)
    counts = torch.empty(blocks + 1, experts, dtype=torch.int32, device=index.device)
    totals = counts[blocks]
    histogram, scan, place = _sort_launches(number, experts, rows, align)
    histogram(index, counts)
    scan(counts, totals)
    place(index, counts, totals, *made)


@lru_cache(maxsize=4096)
def _listed_launch(tokens: int, experts: int, top_k: int) -> Launch:
    columns = min(max(triton.next_power_of_2(experts), 16), 128)
    rows = MASK // columns
    grid = triton.cdiv(tokens, rows)
    return Launch(_listed_kernel, grid, (tokens, experts, top_k), num_warps=WARPS, ROWS=rows, COLUMNS=columns)


@lru_cache(maxsize=4096)
def _sort_launches(number: int, experts: int, rows: int, align: int) -> tuple[Launch, Launch, Launch]:
    blocks = max(triton.cdiv(number, ITEMS), 1)
    # programs that mark pads, where there may be some
    padded = experts if align > 1 else 0
    histogram = Launch(
        _histogram_kernel, blocks, (number, experts), num_warps=WARPS, ITEMS=ITEMS, BINS=_bins(experts + 1)
    )
    scan = Launch(
        _scan_kernel, triton.cdiv(experts, SCAN[1]), (blocks, experts), num_warps=8, ROWS=SCAN[0], COLUMNS=SCAN[1]
    )
    place = Launch(
        _place_kernel, blocks + padded + triton.cdiv(rows, FILL), (number, experts, blocks, rows, align, padded),
        num_warps=8, ITEMS=ITEMS, OTHERS=OTHERS, EXPERTS=_bins(experts), FILL=FILL,
    )  # fmt: skip
    return histogram, scan, place


def _bins(number: int) -> int:
    return max(int(triton.next_power_of_2(number)), 32)


# -- rows --------------------------------------------------------------------------------------------------------------


@triton.jit
def _probability(probs, experts, token, k, K, W, live):
    """Return float32 of an assignment's probability; zero where it is not live."""
    column = k
    if experts is not None:
        column = tl.load(experts + token * K + k, mask=live, other=0)
    return tl.load(probs + token.to(tl.int64) * W + column, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _fill_empty(out, assignments, block, C, D, ZERO_TAIL: tl.constexpr, EMPTY: tl.constexpr, COLUMNS: tl.constexpr):
    """Write zeros to the rows of a block that have no assignment."""
    for i in range(EMPTY):
        row = block * EMPTY + i
        assignment = tl.load(assignments + row, mask=row < C, other=0)
        empty = assignment < 0
        if not ZERO_TAIL:
            empty = assignment == _PAD
        # a branch for each row: most blocks have no empty one
        if empty:
            for first in range(0, D, COLUMNS):
                columns = first + tl.arange(0, COLUMNS)
                zeros = tl.zeros((COLUMNS,), tl.float32).to(out.dtype.element_ty)
                tl.store(out + row.to(tl.int64) * D + columns, zeros, mask=columns < D)


@triton.jit
def _scatter_kernel(
    x, out, positions, assignments, probs, experts, T, K, C, D, W, stride_m, stride_k,
    ZERO_TAIL: tl.constexpr, EMPTY: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(D, COLUMNS)
    pid = tl.program_id(0)
    if pid < T * across:
        token, columns = pid // across, pid % across * COLUMNS + tl.arange(0, COLUMNS)
        live = columns < D
        # a token is read once for all of its rows
        value = tl.load(x + token.to(tl.int64) * stride_m + columns.to(tl.int64) * stride_k, mask=live)
        for k in range(K):
            row = tl.load(positions + token * K + k)
            if row >= 0:
                moved = value
                if probs is not None:
                    p = _probability(probs, experts, token, k, K, W, True)
                    moved = (value.to(tl.float32) * p).to(out.dtype.element_ty)
                tl.store(out + row.to(tl.int64) * D + columns, moved, mask=live)
    else:
        _fill_empty(out, assignments, pid - T * across, C, D, ZERO_TAIL, EMPTY, COLUMNS)


@triton.jit
def _row_and_weight(positions, probs, experts, token, k, K, W):
    """Return row and weight of an assignment; -1 and 0 for one without a row."""
    row = tl.load(positions + token * K + k, mask=k < K, other=-1)
    weight = 0.0
    if probs is not None:
        weight = _probability(probs, experts, token, k, K, W, row >= 0)
    return row, weight


@triton.jit
def _values(rows, row, columns, live, stride_m, stride_k):
    at = row.to(tl.int64) * stride_m + columns.to(tl.int64) * stride_k
    return tl.load(rows + at, mask=live & (row >= 0), other=0.0).to(tl.float32)


@triton.jit
def _added(total, value, weight, WEIGHTED: tl.constexpr):
    if WEIGHTED:
        # one rounding for product and sum, which the reference computes too
        return tl.fma(value, weight, total)
    else:
        return total + value


@triton.jit
def _combine_kernel(
    rows, y, positions, probs, experts, K, D, W, stride_m, stride_k, COLUMNS: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(D, COLUMNS)
    token = tl.program_id(0) // across
    columns = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    live = columns < D
    total = tl.zeros((COLUMNS,), tl.float32)
    WEIGHTED: tl.constexpr = probs is not None
    for k in range(0, K, 4):  # the loads of four rows are in flight at a time
        row_a, a = _row_and_weight(positions, probs, experts, token, k, K, W)
        row_b, b = _row_and_weight(positions, probs, experts, token, k + 1, K, W)
        row_c, c = _row_and_weight(positions, probs, experts, token, k + 2, K, W)
        row_d, d = _row_and_weight(positions, probs, experts, token, k + 3, K, W)
        at_a = _values(rows, row_a, columns, live, stride_m, stride_k)
        at_b = _values(rows, row_b, columns, live, stride_m, stride_k)
        at_c = _values(rows, row_c, columns, live, stride_m, stride_k)
        at_d = _values(rows, row_d, columns, live, stride_m, stride_k)
        total = _added(_added(total, at_a, a, WEIGHTED), at_b, b, WEIGHTED)
        total = _added(_added(total, at_c, c, WEIGHTED), at_d, d, WEIGHTED)
    tl.store(y + token.to(tl.int64) * D + columns, total.to(y.dtype.element_ty), mask=live)


@triton.jit
def _combine_backward_kernel(
    dy, rows, positions, assignments, probs, experts, drows, dprobs, T, K, C, D, W, dy_stride_m, dy_stride_k, stride_m,
    stride_k, ZERO_TAIL: tl.constexpr, EMPTY: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    if token < T:
        for k in range(K):
            row, weight = _row_and_weight(positions, probs, experts, token, k, K, W)
            column = k
            if experts is not None:
                column = tl.load(experts + token * K + k)
            # summed by column first, in a fixed order
            dot = tl.zeros((COLUMNS,), tl.float32)
            if row >= 0:
                for first in range(0, D, COLUMNS):
                    columns = first + tl.arange(0, COLUMNS)
                    live = columns < D
                    g = _values(dy, token, columns, live, dy_stride_m, dy_stride_k)
                    dot += g * _values(rows, row, columns, live, stride_m, stride_k)
                    if drows is not None:
                        at = drows + row.to(tl.int64) * D + columns
                        tl.store(at, (g * weight).to(drows.dtype.element_ty), mask=live)
            found = tl.sum(dot, 0).to(dprobs.dtype.element_ty)
            if column >= 0:  # an assignment that a mask left has no expert
                tl.store(dprobs + token.to(tl.int64) * W + column, found)
    else:
        if drows is not None:
            _fill_empty(drows, assignments, token - T, C, D, ZERO_TAIL, EMPTY, COLUMNS)


@triton.jit
def _take_kernel(probs, out, assignments, experts, C, K, W, SIZE: tl.constexpr):
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    assignment = tl.load(assignments + row, mask=row < C, other=-1)
    live = assignment >= 0
    # probabilities are [T, K] by assignment, or [T, E] by expert
    column = assignment % K
    if experts is not None:
        column = tl.load(experts + assignment, mask=live, other=0)
    found = tl.load(probs + (assignment // K).to(tl.int64) * W + column, mask=live, other=0.0)
    tl.store(out + row, found, mask=row < C)


@triton.jit
def _take_backward_kernel(grad, dprobs, positions, experts, N, K, W, SIZE: tl.constexpr):
    assignment = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    live = assignment < N
    row = tl.load(positions + assignment, mask=live, other=-1)
    column = assignment % K
    if experts is not None:
        column = tl.load(experts + assignment, mask=live, other=-1)
    found = tl.load(grad + row, mask=row >= 0, other=0.0)
    tl.store(dprobs + (assignment // K).to(tl.int64) * W + column, found, mask=live & (column >= 0))


def scatter(
    x: Tensor, out: Tensor, assignments: Assignments, sources: Tensor, probs: Tensor | None, zero_tail: bool
) -> None:
    probs = None if probs is None else probs.contiguous()
    tokens, top_k = assignments.positions.shape
    sizes = (tokens, top_k, *out.shape, 0 if probs is None else probs.shape[1], *x.stride())
    _scatter_launch(sizes, zero_tail)(x, out, assignments.positions, sources, probs, _experts(assignments, probs))


def combine(rows: Tensor, y: Tensor, assignments: Assignments, probs: Tensor | None) -> None:
    probs = None if probs is None else probs.contiguous()
    sizes = (assignments.positions.shape[1], y.shape[1], 0 if probs is None else probs.shape[1], *rows.stride())
    _combine_launch(y.shape[0], sizes)(rows, y, assignments.positions, probs, _experts(assignments, probs))


def combine_backward(
    dy: Tensor, rows: Tensor, assignments: Assignments, sources: Tensor, probs: Tensor, drows: Tensor | None,
    dprobs: Tensor,
    zero_tail: bool,
) -> None:  # fmt: skip
    probs = probs.contiguous()
    tokens, top_k = assignments.positions.shape
    sizes = (tokens, top_k, sources.shape[0], dy.shape[1], probs.shape[1], *dy.stride(), *rows.stride())
    launch = _combine_backward_launch(sizes, zero_tail, drows is not None)
    launch(dy, rows, assignments.positions, sources, probs, assignments.experts, drows, dprobs)


def take(probs: Tensor, out: Tensor, assignments: Assignments, sources: Tensor) -> None:
    launch = _take_launch(_take_kernel, (out.shape[0], assignments.positions.shape[1], probs.shape[1]))
    launch(probs, out, sources, assignments.experts)


def take_backward(grad: Tensor, dprobs: Tensor, assignments: Assignments) -> None:
    sizes = (assignments.positions.numel(), assignments.positions.shape[1], dprobs.shape[1])
    _take_launch(_take_backward_kernel, sizes)(grad, dprobs, assignments.positions, assignments.experts)


def _experts(assignments: Assignments, probs: Tensor | None) -> Tensor | None:
    return None if probs is None else assignments.experts


def _columns(width: int) -> int:
    return min(max(int(triton.next_power_of_2(width)), 128), COLUMNS)


@lru_cache(maxsize=4096)
def _scatter_launch(sizes: tuple[int, ...], zero_tail: bool) -> Launch:
    tokens, _, rows, width = sizes[:4]
    columns = _columns(width)
    return Launch(
        _scatter_kernel, tokens * triton.cdiv(width, columns) + triton.cdiv(rows, EMPTY), sizes, num_warps=WARPS,
        ZERO_TAIL=zero_tail, EMPTY=EMPTY, COLUMNS=columns,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _combine_launch(tokens: int, sizes: tuple[int, ...]) -> Launch:
    columns = _columns(sizes[1])
    grid = tokens * triton.cdiv(sizes[1], columns)
    return Launch(_combine_kernel, grid, sizes, num_warps=WARPS, COLUMNS=columns)


@lru_cache(maxsize=4096)
def _combine_backward_launch(sizes: tuple[int, ...], zero_tail: bool, fills: bool) -> Launch:
    grid = sizes[0] + (triton.cdiv(sizes[2], EMPTY) if fills else 0)
    return Launch(
        _combine_backward_kernel, grid, sizes, num_warps=WARPS, ZERO_TAIL=zero_tail, EMPTY=EMPTY,
        COLUMNS=min(2 * COLUMNS, max(triton.next_power_of_2(sizes[3]), 128)),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _take_launch(kernel, sizes: tuple[int, ...]) -> Launch:
    return Launch(kernel, triton.cdiv(sizes[0], TAKEN), sizes, num_warps=WARPS, SIZE=TAKEN)
