"""Norms on the GPU, in float32. A program reads a row of up to MOST elements once and keeps it in registers (narrow
rows share a program); it reads a longer row again for each sum.

dγ and dβ are summed in two steps without atomics: a fixed number of programs write partial sums to [programs, N], each
over tiles of rows that it alone takes; then those are summed. The number depends on sizes and chip, never on timing.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.column_sums import column_sums
from octavo.kernels.norm import Gradients, Norm, Normed, Residual, Statistics, Wanted, summed
from octavo.launch import Launch
from octavo.quant import tile

MOST = 8192  # more would spill in backward, which holds x, dy and two sums
LONG = 4096  # columns that a program reads at a time of a longer row
STAGES = {2: 3, 4: 2}  # by the bytes of an element: at most 96 KiB of a row of dy, x and what is added, and the next
PART_COLUMNS, PART_ROWS, PART_HEIGHT = 128, 16, 512  # dγ and dβ of long rows: a program's columns, tile, rows


@triton.jit
def _load(x, rows, columns, M, N, stride_m, stride_n):
    at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_n
    live = (rows < M)[:, None] & (columns < N)[None, :]
    return tl.load(x + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _vector(w, columns, N):
    return tl.load(w + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _gamma(weight, columns, N, ZERO_CENTERED: tl.constexpr):
    gamma = _vector(weight, columns, N)
    if ZERO_CENTERED:
        gamma += 1.0
    return gamma


@triton.jit
def _around(v, mean, columns, N, CENTER: tl.constexpr):
    """Return v - mean, and zero outside the row, where v - mean would not be."""
    if CENTER:
        return tl.where((columns < N)[None, :], v - mean[:, None], 0.0)
    else:
        return v


@triton.jit
def normed(v, mean, r, weight, bias, columns, N, CENTER: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Return y of float32 x and the statistics of its rows."""
    found = _around(v, mean, columns, N, CENTER) * r[:, None]
    if weight is not None:
        found *= _gamma(weight, columns, N, ZERO_CENTERED)
    if bias is not None:
        found += _vector(bias, columns, N)
    return found


@triton.jit
def _store_normed(
    y, v, mean, r, weight, bias, rows, columns, M, N, CENTER: tl.constexpr, ZERO_CENTERED: tl.constexpr
):  # fmt: skip
    found = normed(v, mean, r, weight, bias, columns, N, CENTER, ZERO_CENTERED)
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(y + at, found.to(y.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def _sum(v, extra, z, rows, columns, M, N, stride_m, stride_n):
    """Return v + extra as z has it, rounded; write z, at the strides of extra."""
    found = (v + _load(extra, rows, columns, M, N, stride_m, stride_n)).to(z.dtype.element_ty)
    at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_n
    tl.store(z + at, found, mask=(rows < M)[:, None] & (columns < N)[None, :])
    return found.to(tl.float32)


@triton.jit(do_not_specialize=["writes"])
def _forward_kernel(
    x, y, mean_out, rstd_out, weight, bias, extra, z, M, N, stride_m, stride_n, writes,
    EPS: tl.constexpr, CENTER: tl.constexpr, AVERAGE: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute rows of y. y is written where `writes` is not zero, which is asked at run time: without the store, rows
    might be laid out over the threads in another way, and summed in another order. `extra` and z, of whole rows, lie as
    x does."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    divisor = tl.cast(N, tl.float32) if AVERAGE else 1.0
    mean = tl.zeros((ROWS,), tl.float32)
    if WHOLE:
        v = _load(x, rows, columns, M, N, stride_m, stride_n)
        if extra is not None:
            v = _sum(v, extra, z, rows, columns, M, N, stride_m, stride_n)
        if CENTER:
            # div_rn: `/` is Triton's fast divide
            mean = tl.div_rn(tl.sum(v, 1), mean + divisor)
        c = _around(v, mean, columns, N, CENTER)
        squares = tl.sum(c * c, 1)
    else:
        # a long row is read once for each sum; sums stay by column until its end, so that there is one reduction across
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        if CENTER:
            for first in range(0, N, COLUMNS):
                total += _load(x, rows, first + columns, M, N, stride_m, stride_n)
            mean = tl.div_rn(tl.sum(total, 1), mean + divisor)
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, N, COLUMNS):
            v = _load(x, rows, first + columns, M, N, stride_m, stride_n)
            c = _around(v, mean, first + columns, N, CENTER)
            total += c * c
        squares = tl.sum(total, 1)
    ones = tl.full((ROWS,), 1.0, tl.float32)
    r = tl.div_rn(ones, tl.sqrt_rn(tl.div_rn(squares, ones * divisor) + EPS))
    if CENTER:
        tl.store(mean_out + rows, mean, mask=rows < M)
    tl.store(rstd_out + rows, r, mask=rows < M)
    if writes == 0:
        return
    if WHOLE:
        _store_normed(y, v, mean, r, weight, bias, rows, columns, M, N, CENTER, ZERO_CENTERED)
    else:
        for first in range(0, N, COLUMNS):
            v = _load(x, rows, first + columns, M, N, stride_m, stride_n)
            _store_normed(y, v, mean, r, weight, bias, rows, first + columns, M, N, CENTER, ZERO_CENTERED)


@triton.jit
def _statistics(mean, rstd, rows, M, CENTER: tl.constexpr):
    r = tl.load(rstd + rows, mask=rows < M, other=0.0)
    if CENTER:
        return tl.load(mean + rows, mask=rows < M, other=0.0), r
    else:
        return r * 0.0, r


@triton.jit
def _store_dx(dx, more, g, found, r, along, shift, rows, columns, M, N, CENTER: tl.constexpr):
    """Compute dx and store it: along = mean of g · x̂, shift = mean of g, [ROWS] each; `more` is added, or None."""
    d = g - found * along[:, None]
    if CENTER:
        d -= shift[:, None]
    d *= r[:, None]
    if more is not None:
        d += more
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def _backward_kernel(
    dy, x, rstd, mean, weight, dx, dw, db, added, M, N, dy_stride_m, dy_stride_n, stride_m, stride_n,
    CENTER: tl.constexpr, AVERAGE: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx of whole rows, and this program's part of dγ and dβ [programs, N]. Rows are copied to shared memory
    STAGES - 1 rounds before they are needed: a program that asks for a row only then waits for memory most of the
    time."""
    columns = tl.arange(0, COLUMNS)
    divisor = tl.cast(N, tl.float32) if AVERAGE else 1.0
    if weight is not None:
        # once for all rows of the program
        gamma = _gamma(weight, columns, N, ZERO_CENTERED)
    dw_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    db_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    # a program takes many rows: it keeps its part of dγ and dβ in registers and writes it once
    for first in tl.range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        m, r = _statistics(mean, rstd, rows, M, CENTER)
        g = _load(dy, rows, columns, M, N, dy_stride_m, dy_stride_n)
        v = _load(x, rows, columns, M, N, stride_m, stride_n)
        more = None
        if added is not None:
            more = _load(added, rows, columns, M, N, N, 1)
        found = _around(v, m, columns, N, CENTER) * r[:, None]
        if dw is not None:
            dw_sum += g * found
        if db is not None:
            db_sum += g
        if dx is not None:
            if weight is not None:
                g *= gamma
            along = tl.sum(g * found, 1) / divisor
            shift = along
            if CENTER:
                shift = tl.sum(g, 1) / divisor
            _store_dx(dx, more, g, found, r, along, shift, rows, columns, M, N, CENTER)
    at = tl.program_id(0).to(tl.int64) * N + columns
    if dw is not None:
        tl.store(dw + at, tl.sum(dw_sum, 0), mask=columns < N)
    if db is not None:
        tl.store(db + at, tl.sum(db_sum, 0), mask=columns < N)


@triton.jit
def _long_dx_kernel(
    dy, x, rstd, mean, weight, dx, added, M, N, dy_stride_m, dy_stride_n, stride_m, stride_n,
    CENTER: tl.constexpr, AVERAGE: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    divisor = tl.cast(N, tl.float32) if AVERAGE else 1.0
    m, r = _statistics(mean, rstd, rows, M, CENTER)
    # a row of more than MOST elements does not stay in registers: it is read again for dx
    along_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    shift_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, N, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        g = _load(dy, rows, columns, M, N, dy_stride_m, dy_stride_n)
        if weight is not None:
            g *= _gamma(weight, columns, N, ZERO_CENTERED)
        v = _load(x, rows, columns, M, N, stride_m, stride_n)
        along_sum += g * (_around(v, m, columns, N, CENTER) * r[:, None])
        shift_sum += g
    along, shift = tl.sum(along_sum, 1) / divisor, tl.sum(shift_sum, 1) / divisor
    for first in range(0, N, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        g = _load(dy, rows, columns, M, N, dy_stride_m, dy_stride_n)
        if weight is not None:
            g *= _gamma(weight, columns, N, ZERO_CENTERED)
        v = _load(x, rows, columns, M, N, stride_m, stride_n)
        found = _around(v, m, columns, N, CENTER) * r[:, None]
        more = None
        if added is not None:
            more = _load(added, rows, columns, M, N, N, 1)
        _store_dx(dx, more, g, found, r, along, shift, rows, columns, M, N, CENTER)


@triton.jit
def _long_parts_kernel(
    dy, x, rstd, mean, dw, db, M, N, dy_stride_m, dy_stride_n, stride_m, stride_n,
    CENTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """Compute this program's part of dγ and dβ, from some columns of HEIGHT rows."""
    part, across = tile.tile_index(N, COLUMNS)
    columns = across * COLUMNS + tl.arange(0, COLUMNS)
    # sums stay by row of the tile until the end: one reduction down for all rows of the part
    dw_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    db_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(part * HEIGHT, tl.minimum(part * HEIGHT + HEIGHT, M), ROWS):
        rows = first + tl.arange(0, ROWS)
        m, r = _statistics(mean, rstd, rows, M, CENTER)
        g = _load(dy, rows, columns, M, N, dy_stride_m, dy_stride_n)
        v = _load(x, rows, columns, M, N, stride_m, stride_n)
        if dw is not None:
            dw_sum += g * (_around(v, m, columns, N, CENTER) * r[:, None])
        if db is not None:
            db_sum += g
    at = part.to(tl.int64) * N + columns
    if dw is not None:
        tl.store(dw + at, tl.sum(dw_sum, 0), mask=columns < N)
    if db is not None:
        tl.store(db + at, tl.sum(db_sum, 0), mask=columns < N)


def _shape(width: int) -> tuple[int, int, int]:
    """Return the rows, columns and warps of a tile."""
    # 1024 elements or one row; more warps for a long row, so that a thread's share stays in registers
    columns = LONG if width > MOST else max(16, triton.next_power_of_2(width))
    return max(1, 1024 // columns), columns, 16 if columns > 4096 else 8 if columns > 2048 else 4


def constants(norm: Norm) -> dict[str, object]:
    return {"CENTER": norm.centers, "AVERAGE": norm.kind != "l2", "ZERO_CENTERED": norm.zero_centered}


def forward(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Residual | None = None
) -> Normed:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = _statistics_of(norm, x)
    _launch_forward(norm, x, y, mean, rstd, weight, bias, residual, writes=1)
    return Normed(y, mean, rstd)


def statistics(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Residual | None = None
) -> tuple[Tensor | None, Tensor]:
    """Return mean and rstd only, to the same bits as `forward`, whose kernel it launches."""
    mean, rstd = _statistics_of(norm, x)
    y = rstd.view(x.dtype)  # the kernel does not write it, but it has the alignment of forward's y
    _launch_forward(norm, x, y, mean, rstd, weight, bias, residual, writes=0)
    return mean, rstd


def _launch_forward(
    norm: Norm, x: Tensor, y: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual: Residual | None, writes: int,
) -> None:  # fmt: skip
    if residual is None or not _adds(x, residual):
        # the kernel adds only where that leaves its layout, and so the order of its sums, as it is
        x = summed(x, residual)
        _forward_launch(norm, (*x.shape, *x.stride(), writes))(x, y, mean, rstd, weight, bias, None, None)
    else:  # at the strides of z, which are those of a tensor just made: of one row or column, x may have others
        strides = (x.shape[1], 1)
        _forward_launch(norm, (*x.shape, *strides, writes))(x, y, mean, rstd, weight, bias, *residual)


def _adds(x: Tensor, residual: Residual) -> bool:
    """Return whether the kernel adds: to whole rows, of tensors that lie alike. Other strides or another dtype would
    lay the rows out over the threads in another way, and sum them in another order."""
    return x.shape[1] <= MOST and all(
        [t.shape == x.shape and t.dtype == x.dtype and t.is_contiguous() for t in (x, *residual)]
    )


def _statistics_of(norm: Norm, x: Tensor) -> tuple[Tensor | None, Tensor]:
    """Allocate mean (None unless the norm centers) and rstd."""
    mean = torch.empty(x.shape[0], dtype=torch.float32, device=x.device) if norm.centers else None
    return mean, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


def backward(
    norm: Norm,
    dy: Tensor,
    x: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    wanted: Wanted,
    added: Tensor | None,
) -> Gradients:
    mean, rstd = statistics
    assert rstd is not None
    m, n = x.shape
    dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if wanted.x else None
    sizes = (m, n, *dy.stride(), *x.stride())
    parts = _parts(m, n, dy.device)
    dw, db = (None if d is None else torch.empty(parts, n, dtype=torch.float32, device=dy.device) for d in wanted[1:])
    if n <= MOST:
        stages = STAGES[max(dy.element_size(), x.element_size())]
        _backward_launch(norm, sizes, parts, stages)(dy, x, rstd, mean, weight, dx, dw, db, added)
    else:
        if dx is not None:
            _long_dx_launch(norm, sizes)(dy, x, rstd, mean, weight, dx, added)
        if dw is not None or db is not None:
            _long_parts_launch(norm, sizes)(dy, x, rstd, mean, dw, db)
    return Gradients(
        dx,
        None if dw is None or wanted.weight is None else column_sums(dw, wanted.weight),
        None if db is None or wanted.bias is None else column_sums(db, wanted.bias),
    )


@lru_cache(maxsize=4096)
def _parts(m: int, n: int, device: torch.device) -> int:
    """Return the number of programs that share the sums over the rows."""
    if n > MOST:
        return -(-m // PART_HEIGHT)
    rows, _, warps = _shape(n)
    # as many as run at once with 16 warps on a multiprocessor: fewer parts to add after
    programs: int = torch.cuda.get_device_properties(device).multi_processor_count * 16 // warps
    return min(-(-m // rows), programs)


@lru_cache(maxsize=4096)
def _forward_launch(norm: Norm, sizes: tuple[int, ...]) -> Launch:
    rows, columns, warps = _shape(sizes[1])
    return Launch(
        _forward_kernel, triton.cdiv(sizes[0], rows), sizes, num_warps=warps, num_stages=1,
        EPS=norm.eps, **constants(norm), WHOLE=sizes[1] <= MOST, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _backward_launch(norm: Norm, sizes: tuple[int, ...], parts: int, stages: int) -> Launch:
    rows, columns, warps = _shape(sizes[1])
    return Launch(
        _backward_kernel, parts, sizes, num_warps=warps, num_stages=1,
        **constants(norm), ROWS=rows, COLUMNS=columns, STAGES=stages,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _long_dx_launch(norm: Norm, sizes: tuple[int, ...]) -> Launch:
    rows, columns, warps = _shape(sizes[1])
    return Launch(
        _long_dx_kernel, triton.cdiv(sizes[0], rows), sizes, num_warps=warps, num_stages=1,
        **constants(norm), ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _long_parts_launch(norm: Norm, sizes: tuple[int, ...]) -> Launch:
    grid = triton.cdiv(sizes[0], PART_HEIGHT) * triton.cdiv(sizes[1], PART_COLUMNS)
    return Launch(
        _long_parts_kernel, grid, sizes, num_warps=4, num_stages=1,
        CENTER=norm.centers, ROWS=PART_ROWS, COLUMNS=PART_COLUMNS, HEIGHT=PART_HEIGHT,
    )  # fmt: skip
