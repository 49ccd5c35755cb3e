"""A program has some positions, and one tile of channels after the other: a tile lies in q, in k or in v. It reads the
other channels of pairs as well, which neighbours in the tile read too. The factors of its positions are in the chip's
first cache from its second tile on: for a tile they are twice as many bytes as the gradient. The product of the lower
channel of a pair is fused into the sum, as in `octavo.kernels.rotary.triton`."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.kernels import tile_cast
from octavo.kernels.rotary.cast import plain_backward
from octavo.kernels.tile_cast import TileCast
from octavo.kernels.tile_cast import triton as tile_casts
from octavo.launch import Launch
from octavo.quant import dual, tile
from octavo.quant.quantizer import Quantizer
from octavo.quant.tensorwise.triton import store_given_scale, transposes_codes
from octavo.quant.tile import Config, tile_index

CONFIGS = (Config(64, 128, 8), Config(128, 128, 16))
TURNS = 4  # tiles of a program: 0.139 ms for 8192 x 12288 on an H200, and 0.157 with one


@gluon.jit
def _turned_tile(
    dq, dk, dv, own, other, M, T, H, S, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    pm, pk, D: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Return a tile of the gradient, in its dtype; zero below the last row."""
    layout: gl.constexpr = dual.row_layout(COLUMNS, W)
    rows = pm * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    first = pk * COLUMNS
    # a tile has columns of one part, since tiles divide the widths: the branch is the same for all threads
    part, start, batch, token, step = dq, first, q_batch, q_token, q_head
    if first >= H * D:
        part, start, batch, token, step = dk, first - H * D, k_batch, k_token, k_head
    if first >= (H + S) * D:
        part, start, batch, token, step = dv, first - (H + S) * D, v_batch, v_token, v_head
    columns = start + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    head, channel = columns // D, columns % D
    HALF: gl.constexpr = D // 2
    is_low = channel < HALF
    t = rows % T
    place = (rows // T).to(gl.int64) * batch + t.to(gl.int64) * token
    heads = place[:, None] + (head.to(gl.int64) * step)[None, :]
    live = (rows < M)[:, None]
    if first < (H + S) * D:
        # both channels of a pair read the same two values: the second read hits the cache
        pair = gl.where(is_low, channel, channel - HALF)[None, :]  # its lower channel, for both
        low = gl.load(part + heads + pair, mask=live, other=0.0).to(gl.float32)
        high = gl.load(part + heads + pair + HALF, mask=live, other=0.0).to(gl.float32)
        cosine = gl.load(own + (t * D)[:, None] + pair, mask=live, other=0.0).to(gl.float32)
        sine = gl.load(other + (t * D)[:, None] + pair + HALF, mask=live, other=0.0).to(gl.float32)
        of_low, of_high = gl.where(is_low[None, :], cosine, -1.0 * sine), gl.where(is_low[None, :], sine, cosine)
        # fused as in the kernel that writes the gradient, so that bits agree
        x = gl.fma(low, of_low, high * of_high).to(dq.dtype.element_ty)
    else:
        x = gl.load(part + heads + channel[None, :], mask=live, other=0.0)
    return x


@gluon.jit
def _cast_kernel(
    dq, dk, dv, own, other, row, column, row_scale, column_scale, inverse_scale, running_amax, M, K, T, H, S,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    row_stride, row_block_stride, column_stride, column_block_stride,
    D: gl.constexpr, TURNS: gl.constexpr, PUT: gl.constexpr, RULE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    pm, turn = tile_index(K, COLUMNS * TURNS)
    s = 1.0
    if inverse_scale is not None:
        s = gl.load(inverse_scale)
    # between the loads and the arithmetic: a branch, past which no load is moved
    store_given_scale(row_scale, column_scale, inverse_scale, s)
    # several heads of the same positions: their factors, twice the bytes of a tile, stay in the cache
    for pk in range(turn * TURNS, gl.minimum(turn * TURNS + TURNS, K // COLUMNS)):
        x = _turned_tile(
            dq, dk, dv, own, other, M, T, H, S, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token,
            v_head, pm, pk, D, ROWS, COLUMNS, W,
        )  # fmt: skip
        PUT(
            x, row, column, row_scale, column_scale, s, running_amax, M, K, K, pm * ROWS, pk * COLUMNS,
            row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
        )  # fmt: skip


def backward(
    dq: Tensor, dk: Tensor, dv: Tensor, own: Tensor, other: Tensor, target: TileCast, config: Config | None = None,
    turns: int = TURNS,
) -> None:  # fmt: skip
    pair, cast_args = target
    batch, length, heads, channels = dq.shape
    shared = dk.shape[2]
    spec = tile_casts.spec_of(pair)
    config = config or tile_casts.fitting(CONFIGS, spec)
    # see `_turned_tile`: no tile may have columns of two parts
    whole = heads * channels % config.columns == 0 == shared * channels % config.columns
    spills = dq.dtype == torch.float32 and tile_casts.is_block(spec)
    if (
        dq.numel() == 0
        or not whole
        or spills
        or tile_cast.unsupported_reason(pair, cast_args, dq.dtype, "the gradient of q, k and v")
    ):
        plain_backward(dq, dk, dv, own, other, target)
        return
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    shape = (batch * length, (heads + 2 * shared) * channels)
    steps = tuple(step for t in (dq, dk, dv) for step in t.stride()[:3])
    sizes = (*shape, length, heads, shared, *steps, *tile_casts.strides(pair))
    _cast_launch(spec, dq.dtype, channels, sizes, config, turns, transposes_codes(config, dq.device))(
        dq, dk, dv, own.contiguous(), other.contiguous(), *tile_casts.pointers(pair, cast_args)
    )


def _constants(
    spec: Quantizer, dtype: torch.dtype, channels: int, config: Config, turns: int, transpose_codes: bool
) -> dict[str, Any]:
    return {
        "D": channels, "TURNS": turns, **tile_casts.constants(spec, dtype, transpose_codes),
        "ROWS": config.rows, "COLUMNS": config.columns, "W": config.warps,
    }  # fmt: skip


@lru_cache(maxsize=4096)
def _cast_launch(
    spec: Quantizer, dtype: torch.dtype, channels: int, sizes: tuple[int, ...], config: Config, turns: int,
    transpose_codes: bool,
) -> Launch:  # fmt: skip
    own = _constants(spec, dtype, channels, config, turns, transpose_codes)
    strip = config._replace(columns=turns * config.columns)
    return Launch(_cast_kernel, tile.tiles(sizes[:2], strip), sizes, num_warps=config.warps, **own)
