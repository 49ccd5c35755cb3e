"""Activations on the GPU: one kernel forward and one backward, in float32. The curve is a jitted function that the
kernel is compiled with. If the gradient of row scales is wanted, a program covers whole rows, so that one program sums
a row in one order; otherwise a program covers one tile."""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.activation import DRAWN_BITS, STREAM, Function, Inputs, kept_scale, threshold
from octavo.launch import Launch
from octavo.quant import tile

TILE = 2048  # elements of y
WARPS = 4
_STREAM = tl.constexpr(STREAM)
_UNUSED_BITS = tl.constexpr(32 - DRAWN_BITS)
_GELU = tl.constexpr(2 * math.sqrt(2 / math.pi))
_LOGISTIC = tl.constexpr("""
{
    .reg .f32 t;
    mul.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}
""")  # 0fBFB8AA3B: -log2(e)


@triton.jit
def _within(x, LIMIT: tl.constexpr):
    """Return x clamped; NaN stays NaN."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def _logistic(x):
    """Return 1 / (1 + e^-x), with a relative error of about 1e-7, times |x| where x is below -1; a subnormal result is
    zero. `tl.sigmoid` has more instructions, for subnormal results and for divisors above 2^126."""
    return tl.inline_asm_elementwise(_LOGISTIC, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


# A slope is a product in which one factor vanishes before the other overflows. The curve clamps the other factor there,
# which changes no bit of a finite product.


@triton.jit
def gelu(x, ALPHA: tl.constexpr):
    s = _logistic(_GELU * x * (1.0 + 0.044715 * x * x))
    near = _within(x, 30.0)
    return x * s, s + near * s * (1.0 - s) * (_GELU * (1.0 + 0.134145 * near * near))


@triton.jit
def swish(x, ALPHA: tl.constexpr):
    s = _logistic(x * ALPHA)
    value = x * s
    return value, s + value * (1.0 - s) * ALPHA  # NaN at Inf, as torch's; finite elsewhere: no factor exceeds x


@triton.jit
def sigmoid(x, ALPHA: tl.constexpr):
    s = _logistic(x)
    return s, s * (1.0 - s)


@triton.jit
def relu(x, ALPHA: tl.constexpr):
    # comparisons that NaN fails: it passes through
    return tl.where(x <= 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)


@triton.jit
def srelu(x, ALPHA: tl.constexpr):
    r = tl.where(x <= 0.0, 0.0, x)
    return r * r, 2.0 * r


@triton.jit
def linear(x, ALPHA: tl.constexpr):
    return x * ALPHA, tl.where(x == x, ALPHA, ALPHA)


@triton.jit
def _tanh(x):
    """Return the value and the slope. Near zero, where 1 - e would cancel, compute them by a polynomial: off by two
    units in the last place."""
    e, s = tl.exp(-2.0 * tl.abs(x)), x * x
    near = x * (1.0 + s * (-0.3333315 + s * (0.13325988 + s * (-0.053052943 + s * 0.017256979))))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(s < 0.25, near, tl.where(x < 0.0, -far, far)), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def softcap(x, ALPHA: tl.constexpr):
    value, slope = _tanh(x * (1.0 / ALPHA))
    return value * ALPHA, slope


@triton.jit
def situ(x, ALPHA: tl.constexpr):
    s = _logistic(x)
    cap, slope = softcap(x, ALPHA)
    return cap * s, s * (slope + cap * (1.0 - s))  # slope is a quotient: one product is added, not two


CURVES = {
    "gelu": gelu, "swish": swish, "sigmoid": sigmoid, "relu": relu, "srelu": srelu, "linear": linear,
    "softcap": softcap, "situ": situ,
}  # fmt: skip


@triton.jit
def _kept(seed, rows, first, H, DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return which elements of [ROWS, COLUMNS] stay: the counterpart of reference.kept."""
    quads = first // 4 + tl.arange(0, COLUMNS // 4)
    index = rows.to(tl.int64)[:, None] * tl.cdiv(H, 4) + quads[None, :]
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox(tl.load(seed), low, high, zero + tl.load(seed + 1).to(tl.uint32), zero + _STREAM)
    # four words of a counter side by side: neighbours in a row share a draw
    drawn = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLUMNS))
    return (drawn >> _UNUSED_BITS).to(tl.int32) >= DROP


@triton.jit
def places(columns, H, INTERLEAVE: tl.constexpr):
    """Return columns of x that hold a and b."""
    if INTERLEAVE:
        a = columns // INTERLEAVE * (2 * INTERLEAVE) + columns % INTERLEAVE
        return a, a + INTERLEAVE
    else:
        return columns, columns + H


@triton.jit
def _values(x, bias, rows, columns, live, stride_m, stride_k):
    """Return float32 of x at these places, the bias added."""
    at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
    v = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    if bias is not None:
        v += tl.load(bias + columns[None, :] + rows[:, None] * 0, mask=live, other=0.0).to(tl.float32)
    return v


@triton.jit
def clamped_a(a, LIMIT: tl.constexpr):
    if LIMIT is not None:
        return tl.where(a > LIMIT, LIMIT, a)
    else:
        return a


@triton.jit
def gate_of(b, LIMIT: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, OFFSET: tl.constexpr):
    """Return what the value at a is multiplied by, and its slope."""
    if LIMIT is not None:
        b = _within(b, LIMIT)
    value, slope = GATE(b, BETA)
    if OFFSET != 0.0:
        value += OFFSET
    return value, slope


@triton.jit
def gated_slopes(g, a, b, value, slope, gate, gate_slope, LIMIT: tl.constexpr):
    """Return da and db, from values and slopes of both curves."""
    # in this order in every kernel: the bits of a product of three depend on it
    da, db = g * slope * gate, g * value * gate_slope
    if LIMIT is not None:
        da, db = tl.where(a <= LIMIT, da, 0.0), tl.where(tl.abs(b) <= LIMIT, db, 0.0)
    return da, db


@triton.jit
def _forward_kernel(
    x, y, scales, bias, seed, end, M, H, stride_m, stride_k,
    CURVE: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GATE: tl.constexpr,
    BETA: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVE: tl.constexpr, DROP: tl.constexpr, KEPT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    pm, pk = tile.tile_index(H, COLUMNS)
    if end is not None:
        M = tl.load(end)
        # rows past the end are not read: the memory may hold anything
        if pm * ROWS >= M:
            return
    rows, columns = pm * ROWS + tl.arange(0, ROWS), pk * COLUMNS + tl.arange(0, COLUMNS)
    live = (rows < M)[:, None] & (columns < H)[None, :]
    if GATED:
        at_a, at_b = places(columns, H, INTERLEAVE)
        a = _values(x, bias, rows, at_a, live, stride_m, stride_k)
        b = _values(x, bias, rows, at_b, live, stride_m, stride_k)
        value, _ = CURVE(clamped_a(a, LIMIT), ALPHA)
        gate, _ = gate_of(b, LIMIT, GATE, BETA, OFFSET)
        value *= gate
    else:
        value, _ = CURVE(_values(x, bias, rows, columns, live, stride_m, stride_k), ALPHA)
    if scales is not None:
        value *= tl.load(scales + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    if seed is not None:
        value = tl.where(_kept(seed, rows, pk * COLUMNS, H, DROP, ROWS, COLUMNS), value * KEPT, 0.0)
    tl.store(y + rows.to(tl.int64)[:, None] * H + columns[None, :], value.to(y.dtype.element_ty), mask=live)


@triton.jit
def _backward_kernel(
    dy, x, dx, scales, ds, bias, seed, end, M, H, dy_stride_m, dy_stride_k, stride_m, stride_k,
    CURVE: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GATE: tl.constexpr,
    BETA: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVE: tl.constexpr, DROP: tl.constexpr, KEPT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # the gradient of a row's scale is a sum along the row: one program takes whole rows
    if ds is not None:
        pm, begin, stop = tl.program_id(0), 0, H
    else:
        pm, pk = tile.tile_index(H, COLUMNS)
        begin, stop = pk * COLUMNS, pk * COLUMNS + 1
    if end is not None:
        M = tl.load(end)
        if pm * ROWS >= M:
            return
    rows = pm * ROWS + tl.arange(0, ROWS)
    if scales is not None:
        scale = tl.load(scales + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, stop, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        live = (rows < M)[:, None] & (columns < H)[None, :]
        g = _values(dy, None, rows, columns, live, dy_stride_m, dy_stride_k)
        if seed is not None:
            g = tl.where(_kept(seed, rows, first, H, DROP, ROWS, COLUMNS), g * KEPT, 0.0)
        if GATED:
            at_a, at_b = places(columns, H, INTERLEAVE)
            a = _values(x, bias, rows, at_a, live, stride_m, stride_k)
            b = _values(x, bias, rows, at_b, live, stride_m, stride_k)
            value, slope = CURVE(clamped_a(a, LIMIT), ALPHA)
            gate, gate_slope = gate_of(b, LIMIT, GATE, BETA, OFFSET)
            if ds is not None:
                total += g * value * gate
            if dx is not None:
                if scales is not None:
                    g *= scale
                da, db = gated_slopes(g, a, b, value, slope, gate, gate_slope, LIMIT)
                at = rows.to(tl.int64)[:, None] * (2 * H)
                tl.store(dx + at + at_a[None, :], da.to(dx.dtype.element_ty), mask=live)
                tl.store(dx + at + at_b[None, :], db.to(dx.dtype.element_ty), mask=live)
        else:
            if x is not None:
                v = _values(x, bias, rows, columns, live, stride_m, stride_k)
            else:
                v = tl.zeros((ROWS, COLUMNS), tl.float32)
            value, slope = CURVE(v, ALPHA)
            if ds is not None:
                total += g * value
            if dx is not None:
                if scales is not None:
                    g *= scale
                at = rows.to(tl.int64)[:, None] * H + columns[None, :]
                tl.store(dx + at, (g * slope).to(dx.dtype.element_ty), mask=live)
    if ds is not None:
        tl.store(ds + rows, tl.sum(total, 1).to(ds.dtype.element_ty), mask=rows < M)


def forward(
    fn: Function,
    x: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    end: Tensor | None = None,
) -> Tensor:
    m, width = x.shape[0], x.shape[1] // 2 if fn.gated else x.shape[1]
    y = torch.empty(m, width, dtype=x.dtype, device=x.device)
    _forward_launch(fn, (m, width, *x.stride()))(x, y, scales, bias, seed, end)
    return y


def backward(
    fn: Function, dy: Tensor, inputs: Inputs, dx: Tensor | None, ds: Tensor | None, end: Tensor | None = None
) -> None:
    x, scales, bias, seed = inputs
    strides = (0, 0) if x is None else x.stride()
    _backward_launch(fn, (*dy.shape, *dy.stride(), *strides), ds is not None)(dy, x, dx, scales, ds, bias, seed, end)


def _shape(width: int) -> tuple[int, int]:
    """Return the rows and columns of a tile."""
    # a tile of as many elements whatever the width is
    columns = min(512, max(16, triton.next_power_of_2(width)))
    return TILE // columns, columns


def constants(fn: Function) -> dict[str, object]:
    """Return the constants that a kernel is compiled with, except its tile."""
    return {
        "CURVE": CURVES[fn.curve], "GATED": fn.gated, "ALPHA": fn.alpha, "LIMIT": fn.limit, "GATE": CURVES[fn.gate],
        "BETA": fn.beta, "OFFSET": fn.offset, "INTERLEAVE": fn.interleave, "DROP": threshold(fn.drop),
        "KEPT": kept_scale(fn.drop),
    }  # fmt: skip


def _constants(fn: Function, width: int) -> dict[str, object]:
    rows, columns = _shape(width)
    return {**constants(fn), "ROWS": rows, "COLUMNS": columns}


@lru_cache(maxsize=4096)
def _forward_launch(fn: Function, sizes: tuple[int, ...]) -> Launch:
    rows, columns = _shape(sizes[1])
    grid = triton.cdiv(sizes[0], rows) * triton.cdiv(sizes[1], columns)
    return Launch(_forward_kernel, grid, sizes, num_warps=WARPS, num_stages=1, **_constants(fn, sizes[1]))


@lru_cache(maxsize=4096)
def _backward_launch(fn: Function, sizes: tuple[int, ...], whole_rows: bool) -> Launch:
    rows, columns = _shape(sizes[1])
    grid = triton.cdiv(sizes[0], rows) * (1 if whole_rows else triton.cdiv(sizes[1], columns))
    return Launch(_backward_kernel, grid, sizes, num_warps=WARPS, num_stages=1, **_constants(fn, sizes[1]))
