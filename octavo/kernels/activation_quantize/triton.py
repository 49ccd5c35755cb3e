"""Activations into codes on the GPU, in Gluon, on tiles in the layout of `octavo.quant.dual`. The functions of
`octavo.kernels.activation.triton` compute each element in float32; the kernel rounds it, then casts it.

Bits agree with the kernels that write the value because both call the same functions, so that the compiler contracts
the same additions to a fused multiply-add. It has a choice only where two products are added, and none of these
functions does that. Keep it so.

Backward of a gated function has two kernels. With one scale for the whole tensor, and a and b as halves, a program
reads dy, a and b of a tile once and writes da, db and y. Otherwise a program covers a tile of dx, whose columns may
alternate between a and b: it computes both gradients of every pair and keeps one. Its second reads hit the cache,
since the programs that run at the same time cover a few hundred rows. (With blocks the first kernel would need a
128 x 128 tile of each, and spill.)
"""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.formats import E4M3, E5M2
from octavo.kernels import tile_cast
from octavo.kernels.activation import ACTIVATIONS, DRAWN_BITS, STREAM, Function, Inputs
from octavo.kernels.activation.triton import clamped_a, constants, gate_of, gated_slopes, places
from octavo.kernels.activation_quantize import plain_backward, plain_forward
from octavo.kernels.column_sums import column_sums
from octavo.kernels.tile_cast import NOTHING, Target
from octavo.kernels.tile_cast import triton as tile_casts
from octavo.launch import Launch
from octavo.quant import dual, tile
from octavo.quant.block import Block1D, Block2D
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.tile import Config, Variant, tile_index

# fastest first, measured on an H200 with [8192, 28672] into both orientations; blocks take the first of 128 x 128
CONFIGS = (Config(64, 64, 4), Config(128, 128, 16), Config(64, 128, 8))  # forward, and backward of one tile
GATED_CONFIGS = (Config(64, 64, 4), Config(64, 64, 8), Config(64, 128, 8))  # backward of da and db
ROWS_ALONE = Config(64, 128, 8)  # forward into row codes only: 0.164 ms, against 0.172 with the first of 128 x 128
_STREAM = gl.constexpr(STREAM)
_UNUSED_BITS = gl.constexpr(32 - DRAWN_BITS)


@gluon.jit
def _places_of_tile(first_row, first_column, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Rows [R] and columns [C] of a tile."""
    layout: gl.constexpr = dual.row_layout(C, W)
    rows = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    return rows, columns


@gluon.jit
def _raw(x, rows, columns, live, stride_m, stride_k):
    at = rows.to(gl.int64)[:, None] * stride_m + columns.to(gl.int64)[None, :] * stride_k
    return gl.load(x + at, mask=live, other=0.0)


@gluon.jit
def _added(v, bias, columns, limit, live):
    """float32 of v, the bias added; zero outside, as v is: the twin of activation.triton._values."""
    wide = v.to(gl.float32)
    if bias is not None:
        wide += gl.load(bias + columns, mask=columns < limit, other=0.0).to(gl.float32)[None, :]
        wide = gl.where(live, wide, 0.0)
    return wide


@gluon.jit
def _kept(v, seed, rows, columns, H, DROP: gl.constexpr, KEPT: gl.constexpr):
    """v where it stays, made larger, or zero: the twin of reference.kept, a counter for every element."""
    index = rows.to(gl.int64)[:, None] * gl.cdiv(H, 4) + (columns // 4)[None, :]
    low, high = index.to(gl.uint32), (index >> 32).to(gl.uint32)
    zero = low * 0
    step = gl.load(seed + 1).to(gl.uint32)
    a, b, c, d = triton.language.philox(gl.load(seed), low, high, zero + step, zero + _STREAM)
    word = (columns % 4)[None, :]
    drawn = gl.where(word < 2, gl.where(word == 0, a, b), gl.where(word == 2, c, d))
    return gl.where((drawn >> _UNUSED_BITS).to(gl.int32) >= DROP, v * KEPT, 0.0)


@gluon.jit
def _scales_of(scales, rows, M):
    return gl.load(scales + rows, mask=rows < M, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def _multiplier_of(encode):
    """Asked for early, so that it comes while x does; 1 of a sink that finds its own."""
    if encode is not None:
        return gl.load(encode)
    else:
        return 1.0


@gluon.jit
def _finished(
    value, like, scales, seed, rows, columns, live, M, H,
    DROP: gl.constexpr, KEPT: gl.constexpr, AT_ZERO: gl.constexpr,
):  # fmt: skip
    """y of the function's own value, as it would have been written; zero outside, where the function need not be."""
    if AT_ZERO:
        value = gl.where(live, value, 0.0)
    if scales is not None:
        value = gl.where(live, value * _scales_of(scales, rows, M), 0.0)  # a scale of Inf, times zero
    if seed is not None:
        value = _kept(value, seed, rows, columns, H, DROP, KEPT)
    return value.to(like.dtype.element_ty)


@gluon.jit
def _begun(dy, scales, seed, rows, columns, live, M, H, DROP: gl.constexpr, KEPT: gl.constexpr):
    """The gradient of the function's own value: zero outside, and so is all that is made of it."""
    g = dy.to(gl.float32)
    if seed is not None:
        g = _kept(g, seed, rows, columns, H, DROP, KEPT)
    if scales is not None:
        g = gl.where(live, g * _scales_of(scales, rows, M), 0.0)
    return g


@gluon.jit
def _store_sums(parts, v, pm, columns, limit, N):
    """Sums of a tile down its columns, to a row of parts [tiles down, N]."""
    total = gl.sum(v.to(gl.float32), 0)
    gl.store(parts + pm.to(gl.int64) * N + columns, total, mask=columns < limit)


@gluon.jit
def _forward_kernel(
    x, scales, bias, seed, row, column, row_scale, column_scale, encode, observed,
    M, H, stride_m, stride_k, row_stride, row_block_stride, column_stride, column_block_stride,
    CURVE: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, GATE: gl.constexpr,
    BETA: gl.constexpr, OFFSET: gl.constexpr, INTERLEAVE: gl.constexpr, DROP: gl.constexpr, KEPT: gl.constexpr,
    AT_ZERO: gl.constexpr, PUT: gl.constexpr, RULE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    pm, pk = tile_index(H, COLUMNS)
    rows, columns = _places_of_tile(pm * ROWS, pk * COLUMNS, ROWS, COLUMNS, W)
    live = (rows < M)[:, None] & (columns < H)[None, :]
    s = _multiplier_of(encode)
    if GATED:
        at_a, at_b = places(columns, H, INTERLEAVE)
        a, b = _raw(x, rows, at_a, live, stride_m, stride_k), _raw(x, rows, at_b, live, stride_m, stride_k)
        a, b = _added(a, bias, at_a, 2 * H, live), _added(b, bias, at_b, 2 * H, live)
        value, _ = CURVE(clamped_a(a, LIMIT), ALPHA)
        gate, _ = gate_of(b, LIMIT, GATE, BETA, OFFSET)
        value *= gate
    else:
        value, _ = CURVE(_added(_raw(x, rows, columns, live, stride_m, stride_k), bias, columns, H, live), ALPHA)
    y = _finished(value, x, scales, seed, rows, columns, live, M, H, DROP, KEPT, AT_ZERO)
    PUT(
        y, row, column, row_scale, column_scale, s, observed, M, H, H, pm * ROWS, pk * COLUMNS,
        row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
    )  # fmt: skip


@gluon.jit
def _backward_kernel(
    dy, x, scales, bias, seed, parts, row, column, row_scale, column_scale, encode, observed,
    again, again_scale, again_encode, again_observed,
    M, H, dy_stride_m, dy_stride_k, stride_m, stride_k,
    row_stride, row_block_stride, column_stride, column_block_stride, again_stride, again_block_stride,
    CURVE: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, GATE: gl.constexpr,
    BETA: gl.constexpr, OFFSET: gl.constexpr, INTERLEAVE: gl.constexpr, DROP: gl.constexpr, KEPT: gl.constexpr,
    AT_ZERO: gl.constexpr, PUT: gl.constexpr, RULE: gl.constexpr, AGAIN_PUT: gl.constexpr, AGAIN_RULE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """A tile of dy, and all that follows from it."""
    pm, pk = tile_index(H, COLUMNS)
    rows, columns = _places_of_tile(pm * ROWS, pk * COLUMNS, ROWS, COLUMNS, W)
    live = (rows < M)[:, None] & (columns < H)[None, :]
    s, again_s = _multiplier_of(encode), _multiplier_of(again_encode)
    g = _raw(dy, rows, columns, live, dy_stride_m, dy_stride_k)
    if GATED:
        a = _raw(x, rows, columns, live, stride_m, stride_k)
        b = _raw(x, rows, columns + H, live, stride_m, stride_k)
        a, b = _added(a, bias, columns, H, live), _added(b, bias, columns + H, 2 * H, live)
        value, slope = CURVE(clamped_a(a, LIMIT), ALPHA)
        gate, gate_slope = gate_of(b, LIMIT, GATE, BETA, OFFSET)
        g = _begun(g, scales, seed, rows, columns, live, M, H, DROP, KEPT)
        da, db = gated_slopes(g, a, b, value, slope, gate, gate_slope, LIMIT)
        value *= gate
        da, db = da.to(dy.dtype.element_ty), db.to(dy.dtype.element_ty)
    else:
        if x is not None:
            v = _added(_raw(x, rows, columns, live, stride_m, stride_k), bias, columns, H, live)
        else:
            v = gl.zeros((ROWS, COLUMNS), gl.float32, dual.row_layout(COLUMNS, W))
        value, slope = CURVE(v, ALPHA)
        g = _begun(g, scales, seed, rows, columns, live, M, H, DROP, KEPT)
        da = (g * slope).to(dy.dtype.element_ty)
    N = 2 * H if GATED else H
    if again is not None:
        y = _finished(value, x, scales, seed, rows, columns, live, M, H, DROP, KEPT, AT_ZERO)
        AGAIN_PUT(
            y, None, again, None, again_scale, again_s, again_observed, M, H, H, pm * ROWS, pk * COLUMNS,
            0, 0, again_stride, again_block_stride, AGAIN_RULE, ROWS, COLUMNS, W,
        )  # fmt: skip
    if parts is not None:
        _store_sums(parts, da, pm, columns, H, N)
    if PUT is not None:
        PUT(
            da, row, column, row_scale, column_scale, s, observed, M, H, N, pm * ROWS, pk * COLUMNS,
            row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
        )  # fmt: skip
    if GATED:
        if parts is not None:
            _store_sums(parts, db, pm, columns + H, N, N)
        if PUT is not None:
            PUT(
                db, row, column, row_scale, column_scale, s, observed, M, N, N, pm * ROWS, H + pk * COLUMNS,
                row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
            )  # fmt: skip


@gluon.jit
def _pairs_of(columns, H, INTERLEAVE: gl.constexpr):
    """Of columns of x: the column of dy that they belong to, where its a and b are, and whether they hold a."""
    if INTERLEAVE:
        pair, within = columns // (2 * INTERLEAVE), columns % INTERLEAVE
        a = pair * (2 * INTERLEAVE) + within
        return pair * INTERLEAVE + within, a, a + INTERLEAVE, columns - a < INTERLEAVE
    else:
        a = gl.where(columns < H, columns, columns - H)
        return a, a, a + H, columns < H


@gluon.jit
def _woven_kernel(
    dy, x, scales, bias, seed, parts, row, column, row_scale, column_scale, encode, observed,
    M, H, dy_stride_m, dy_stride_k, stride_m, stride_k,
    row_stride, row_block_stride, column_stride, column_block_stride,
    CURVE: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr,
    OFFSET: gl.constexpr, INTERLEAVE: gl.constexpr, DROP: gl.constexpr, KEPT: gl.constexpr, AT_ZERO: gl.constexpr,
    PUT: gl.constexpr, RULE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """A tile of dx of a gated function, wherever its a and b are."""
    N = 2 * H
    pm, pk = tile_index(N, COLUMNS)
    rows, columns = _places_of_tile(pm * ROWS, pk * COLUMNS, ROWS, COLUMNS, W)
    live = (rows < M)[:, None] & (columns < N)[None, :]
    s = _multiplier_of(encode)
    owner, at_a, at_b, is_a = _pairs_of(columns, H, INTERLEAVE)
    g = _raw(dy, rows, owner, live, dy_stride_m, dy_stride_k)
    a, b = _raw(x, rows, at_a, live, stride_m, stride_k), _raw(x, rows, at_b, live, stride_m, stride_k)
    a, b = _added(a, bias, at_a, N, live), _added(b, bias, at_b, N, live)
    value, slope = CURVE(clamped_a(a, LIMIT), ALPHA)
    gate, gate_slope = gate_of(b, LIMIT, GATE, BETA, OFFSET)
    g = _begun(g, scales, seed, rows, owner, live, M, H, DROP, KEPT)
    da, db = gated_slopes(g, a, b, value, slope, gate, gate_slope, LIMIT)
    d = gl.where(is_a[None, :], da, db).to(dy.dtype.element_ty)
    if parts is not None:
        _store_sums(parts, d, pm, columns, N, N)
    if PUT is not None:
        PUT(
            d, row, column, row_scale, column_scale, s, observed, M, N, N, pm * ROWS, pk * COLUMNS,
            row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
        )  # fmt: skip


# -- launches ----------------------------------------------------------------------------------------------------------

_WHAT = "the activation"
_ZERO_AT_ZERO = ("gelu", "swish", "relu", "srelu", "linear", "softcap", "situ")  # curves that are zero where x is
_NO_CAST: dict[str, Any] = {"PUT": None, "RULE": ()}


def forward(fn: Function, inputs: Inputs, y: Target, config: Config | None = None) -> None:
    x, pair = inputs.x, y.pair
    assert x is not None
    if x.numel() == 0 or tile_cast.refusal(pair, y.cast_args, x.dtype, _WHAT):
        return plain_forward(fn, inputs, y)
    spec = tile_casts.spec_of(pair)
    sizes = (x.shape[0], x.shape[1] // 2 if fn.gated else x.shape[1], *x.stride(), *tile_casts.strides(pair))
    if config is None:
        configs = CONFIGS if pair[1] is not None else (ROWS_ALONE, *CONFIGS)
        config = tile_casts.fitting(configs, spec)
    _forward_launch(fn, spec, x.dtype, sizes, config)(*inputs, *tile_casts.pointers(pair, y.cast_args))


def backward(
    fn: Function,
    dy: Tensor,
    inputs: Inputs,
    dx: Target,
    y: Target,
    bias_grad: torch.dtype | None,
    config: Config | None = None,
) -> Tensor | None:
    wanted = dx.pair != (None, None)
    spec = tile_casts.spec_of(dx.pair) if wanted else None
    woven = fn.gated and not _by_halves(fn, spec)
    # with blocks, write-then-cast is faster (0.53 ms against 0.59): a fused program computes da and db and keeps one
    apart = woven and (
        dy.dtype == torch.float32 or inputs.seed is not None or spec is None or tile_casts.is_block(spec)
    )
    if dy.numel() == 0 or apart or (wanted and tile_cast.refusal(dx.pair, dx.cast_args, dy.dtype, _WHAT)):
        return plain_backward(fn, dy, inputs, dx, y, bias_grad)
    if y.pair[1] is not None and (woven or not _beside(fn, inputs.x, y.pair[1], y.cast_args)):
        forward(fn, inputs, y)
        y = NOTHING
    again = y.pair[1]
    if not wanted and again is None and bias_grad is None:
        return None
    if config is None:
        configs = _gated_configs(dy.dtype) if fn.gated and not woven else CONFIGS
        config = tile_casts.fitting(configs, spec, None if again is None else again.spec)
    parts = None
    if bias_grad is not None:
        shape = -(-dy.shape[0] // config.rows), dy.shape[1] * (2 if fn.gated else 1)
        parts = torch.empty(shape, dtype=torch.float32, device=dy.device)
    sizes = (*dy.shape, *dy.stride(), *((0, 0) if inputs.x is None else inputs.x.stride()))
    sizes += tile_casts.strides(dx.pair) if wanted else (0, 0, 0, 0)
    pointers = (dy, *inputs, parts, *(tile_casts.pointers(dx.pair, dx.cast_args) if wanted else (None,) * 6))
    if woven:
        _woven_launch(fn, spec, dy.dtype, sizes, config)(*pointers)
    else:
        _launch_backward(fn, spec, pointers, sizes, y, config)
    return None if parts is None or bias_grad is None else column_sums(parts, bias_grad)


def _gated_configs(dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the tiles for this dtype. float32 skips the one on four warps, which would spill."""
    return GATED_CONFIGS[1:] if dtype == torch.float32 else GATED_CONFIGS


def _launch_backward(
    fn: Function,
    spec: Quantizer | None,
    pointers: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    y: Target,
    config: Config,
) -> None:
    """Launches the backward kernel; it also writes the column codes of y if `y` has them."""
    dy, x, again = *pointers[:2], y.pair[1]
    assert dy is not None
    if again is None or x is None:
        _backward_launch(fn, spec, dy.dtype, None, dy.dtype, (*sizes, 0, 0), config)(*pointers, *(None,) * 4)
        return
    _, codes, _, scale, encode, observed = tile_casts.pointers(y.pair, y.cast_args)
    sizes += tile_casts.strides(y.pair)[2:]
    launch = _backward_launch(fn, spec, dy.dtype, again.spec, x.dtype, sizes, config)
    launch(*pointers, codes, scale, encode, observed)


def _by_halves(fn: Function, spec: Quantizer | None) -> bool:
    """Whether one program writes both da and db of a gated function."""
    return not fn.interleave and (spec is None or not tile_casts.is_block(spec))


def _beside(fn: Function, x: Tensor | None, again: QTensor, cast_args: CastArgs) -> bool:
    """Whether the kernel that writes dx may write y too; otherwise y takes a pass of its own."""
    assert x is not None
    spills = tile_casts.is_block(again.spec) and (fn.gated or x.dtype == torch.float32)
    return not spills and not tile_cast.refusal((None, again), cast_args, x.dtype, _WHAT)


def _constants(fn: Function) -> dict[str, Any]:
    """Returns the function's constants and AT_ZERO: whether y may be nonzero at x = 0, which masked loads return."""
    gate = not fn.gated or fn.offset != 0.0 or fn.gate not in _ZERO_AT_ZERO
    return {**constants(fn), "AT_ZERO": gate and fn.curve not in _ZERO_AT_ZERO}


def _tile(config: Config) -> dict[str, int]:
    return {"ROWS": config.rows, "COLUMNS": config.columns, "W": config.warps}


@lru_cache(maxsize=4096)
def _forward_launch(
    fn: Function, spec: Quantizer, dtype: torch.dtype, sizes: tuple[int, ...], config: Config
) -> Launch:
    return Launch(
        _forward_kernel, tile.tiles(sizes[:2], config), sizes, num_warps=config.warps,
        **_constants(fn), **tile_casts.constants(spec, dtype), **_tile(config),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _backward_launch(
    fn: Function,
    spec: Quantizer | None,
    dtype: torch.dtype,
    again: Quantizer | None,
    again_dtype: torch.dtype,
    sizes: tuple[int, ...],
    config: Config,
) -> Launch:
    return Launch(
        _backward_kernel, tile.tiles(sizes[:2], config), sizes, num_warps=config.warps,
        **_constants(fn), **_cast_constants(spec, dtype), **_again(again, again_dtype), **_tile(config),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _woven_launch(
    fn: Function, spec: Quantizer | None, dtype: torch.dtype, sizes: tuple[int, ...], config: Config
) -> Launch:
    own = {name: value for name, value in _constants(fn).items() if name != "GATED"}
    grid = tile.tiles((sizes[0], 2 * sizes[1]), config)
    return Launch(
        _woven_kernel, grid, sizes, num_warps=config.warps, **own, **_cast_constants(spec, dtype), **_tile(config)
    )


def _cast_constants(spec: Quantizer | None, dtype: torch.dtype) -> dict[str, Any]:
    return _NO_CAST if spec is None else tile_casts.constants(spec, dtype)


def _again(spec: Quantizer | None, dtype: torch.dtype) -> dict[str, Any]:
    return {f"AGAIN_{name}": value for name, value in _cast_constants(spec, dtype).items()}


# -- the record of compilations ----------------------------------------------------------------------------------------


def variants() -> list[Variant]:
    """Lists the compilations: every tile, every kind of cast, every activation and its optional inputs."""
    swiglu, clamped, gelu = (ACTIVATIONS[name] for name in ("swiglu", "clamped-swiglu", "gelu"))
    given, gradient, rows, square = Tensorwise(), Tensorwise(E5M2), Block1D(), Block2D(E4M3, "fp32")
    half = torch.bfloat16
    found = [_forward_variant("swiglu", swiglu, given, half, config=config) for config in CONFIGS]
    found += [_forward_variant(name, fn, given, half) for name, fn in ACTIVATIONS.items() if name != "swiglu"]
    found += [_forward_variant("swiglu", swiglu, spec, half) for spec in (rows, square)]
    found += [_forward_variant("swiglu", swiglu, spec, torch.float32) for spec in (given, rows, square)]
    found += [
        _forward_variant("swiglu", swiglu, given, torch.float16),
        _forward_variant("swiglu", swiglu, given, half, sides="row", config=ROWS_ALONE),
        _forward_variant("swiglu", swiglu, rows, half, sides="column"),
        _forward_variant("clamped-swiglu by 32", clamped._replace(interleave=32), rows, half, "scales"),
        _forward_variant("gelu", gelu, given, half, "bias"),
        _forward_variant("gelu with dropout", gelu._replace(drop=0.1), given, half, "seed"),
    ]
    found += [_backward_variant("swiglu", swiglu, gradient, half, config, again=given) for config in GATED_CONFIGS]
    found += [_backward_variant(name, fn, gradient, half) for name, fn in ACTIVATIONS.items()]
    found += [
        _backward_variant("swiglu", swiglu, gradient, half, extra="bias", again=given),
        _backward_variant("swiglu", swiglu, gradient, torch.float16, again=given),
        _backward_variant("swiglu", swiglu, gradient, torch.float32, again=given),
        _backward_variant("swiglu", swiglu, gradient, half, sides="row", again=given),
        _backward_variant("clamped-swiglu", clamped, gradient, half, extra="scales", again=given),
        _backward_variant("gelu with dropout", gelu._replace(drop=0.1), gradient, half, extra="seed"),
        _backward_variant("gelu", gelu, rows, half, extra="bias", again=rows),
        _backward_variant("gelu", gelu, square, half, extra="bias", again=square),
        _backward_variant("gelu", gelu, square, torch.float32, extra="bias"),
    ]
    by_32, situ = clamped._replace(interleave=32), ACTIVATIONS["situglu"]
    found += [
        _woven_variant("clamped-swiglu by 32", by_32, gradient, half),
        _woven_variant("clamped-swiglu by 32", by_32, gradient, half, "scales"),
        _woven_variant("clamped-swiglu by 32", by_32, gradient, torch.float16, "bias"),
        _woven_variant("situglu by 32", situ._replace(interleave=32), gradient, half, "scales"),
    ]
    # the curves that need the most registers, with the options that need the most
    found += [_backward_variant("situglu", situ, gradient, half, config, again=given) for config in GATED_CONFIGS]
    found += [_forward_variant("situglu", situ, spec, torch.float32) for spec in (given, rows, square)]
    found += [
        _forward_variant("situglu", situ, rows, half, "scales"),
        _backward_variant("situglu", situ, gradient, half, extra="bias", again=given),
        _backward_variant("situglu", situ, gradient, torch.float32, again=given),
    ]
    return found


def _variant(title: str, kernel: Any, kinds: dict[str, Any], fixed: dict[str, Any], config: Config) -> Variant:
    signature = {name: kinds[name] for name in kernel.arg_names if kinds.get(name) is not None}
    own = {name: fixed.get(name) for name in kernel.arg_names if name not in signature}
    return Variant(f"{title} {config}", kernel, signature, own, config.warps)


def _kinds(fn: Function, spec: Quantizer, dtype: torch.dtype, extra: str, sides: str) -> tuple[Any, Any]:
    """Returns (signature, constants) of the parameters that all kernels share."""
    kind = tile.POINTERS[dtype]
    there, fixed = tile_casts.signature(spec, sides != "column", sides != "row")
    numbers = dict.fromkeys(("M", "H", "stride_m", "dy_stride_m"), "i32")
    signature = there | numbers | {
        "dy": kind, "x": kind, "scales": "*fp32" if extra == "scales" else None,
        "bias": kind if extra == "bias" else None, "parts": "*fp32" if extra == "bias" else None,
        "seed": "*i64" if extra == "seed" else None,
    }  # fmt: skip
    return signature, fixed | {"stride_k": 1, "dy_stride_k": 1, **_constants(fn), **tile_casts.constants(spec, dtype)}


def _title(what: str, spec: Quantizer, dtype: torch.dtype, extra: str, sides: str) -> str:
    return ", ".join(filter(None, (f"{what} {dtype} to {spec}", extra, sides and f"{sides} alone")))


def _forward_variant(name, fn, spec, dtype, extra="", config=None, sides=""):
    config = config or tile_casts.fitting(CONFIGS, spec)
    kinds, fixed = _kinds(fn, spec, dtype, extra, sides)
    title = _title(f"activation quantize {name}", spec, dtype, extra, sides)
    return _variant(title, _forward_kernel, kinds, fixed | _tile(config), config)


def _backward_variant(name, fn, spec, dtype, config=None, extra="", again=None, sides=""):
    config = config or tile_casts.fitting(_gated_configs(dtype) if fn.gated else CONFIGS, spec, again)
    kinds, fixed = _kinds(fn, spec, dtype, extra, sides)
    title = _title(f"activation quantize backward {name}", spec, dtype, extra, sides)
    fixed |= _again(again, dtype) | {"again_stride": 0, "again_block_stride": 0}
    if again is not None:
        title += f", again {again.fmt}"
        there, steps = tile_casts.signature(again, row=False)
        kinds |= {"again": there["column"], "again_scale": "*fp32"}
        kinds |= {f"again_{n}": there.get(n) for n in ("encode", "observed")}
        kinds |= {f"again{n[6:]}": there.get(n) for n in tile_casts.STRIDES[2:]}
        fixed |= {f"again{n[6:]}": steps.get(n) for n in tile_casts.STRIDES[2:]}
    return _variant(title, _backward_kernel, kinds, fixed | _tile(config), config)


def _woven_variant(name, fn, spec, dtype, extra=""):
    config = tile_casts.fitting(CONFIGS, spec)
    kinds, fixed = _kinds(fn, spec, dtype, extra, "")
    title = _title(f"activation quantize backward, woven {name}", spec, dtype, extra, "")
    return _variant(title, _woven_kernel, kinds, fixed | _tile(config), config)
