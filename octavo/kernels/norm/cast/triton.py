"""Norms into codes on the GPU. The norm's own kernel computes the statistics; a cast in Gluon normalises its tile with
`octavo.kernels.norm.triton.normed`, as the norm's kernel does before it writes y, and rounds before it casts. The
compiler contracts the same operations (x̂ · γ + β) in both kernels."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.kernels import tile_cast
from octavo.kernels.norm import Norm, Residual
from octavo.kernels.norm.cast import Statistics, plain_forward
from octavo.kernels.norm.triton import normed, statistics
from octavo.kernels.tile_cast import QTensorPair
from octavo.kernels.tile_cast import triton as tile_casts
from octavo.launch import Launch
from octavo.quant import dual, tile
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.scale_blocks import is_square
from octavo.quant.tensorwise.triton import store_given_scale, transposes_codes
from octavo.quant.tile import Config, tile_index

CONFIGS = (Config(64, 128, 8), Config(128, 128, 16), Config(128, 128, 8))


@gluon.jit
def _cast_kernel(
    x, rstd, mean, weight, bias, row, column, row_scale, column_scale, inverse_scale, running_amax,
    M, K, stride_m, stride_k, row_stride, row_block_stride, column_stride, column_block_stride,
    CENTER: gl.constexpr, ZERO_CENTERED: gl.constexpr, PUT: gl.constexpr, RULE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    pm, pk = tile_index(K, COLUMNS)
    layout: gl.constexpr = dual.row_layout(COLUMNS, W)
    rows = pm * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = pk * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    s = 1.0
    if inverse_scale is not None:
        s = gl.load(inverse_scale)
    r = gl.load(rstd + rows, mask=rows < M, other=0.0)
    m = r
    if CENTER:
        m = gl.load(mean + rows, mask=rows < M, other=0.0)
    # the whole tile is on its way before the branch below, past which no load is moved
    v = dual.load_tile(x, M, K, stride_m, stride_k, pm * ROWS, pk * COLUMNS, ROWS, COLUMNS, W)
    store_given_scale(row_scale, column_scale, inverse_scale, s)
    y = normed(v.to(gl.float32), m, r, weight, bias, columns, K, CENTER, ZERO_CENTERED)
    y = dual.only(y, M - pm * ROWS, K - pk * COLUMNS)  # below the last row β is not zero, nor 0 · γ if γ is Inf
    PUT(
        y.to(x.dtype.element_ty), row, column, row_scale, column_scale, s, running_amax, M, K, K,
        pm * ROWS, pk * COLUMNS,
        row_stride, row_block_stride, column_stride, column_block_stride, RULE, ROWS, COLUMNS, W,
    )  # fmt: skip


def forward(
    norm: Norm,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    pair: QTensorPair,
    cast_args: CastArgs,
    residual: Residual | None = None,
    config: Config | None = None,
) -> Statistics:
    if x.numel() == 0 or tile_cast.unsupported_reason(pair, cast_args, x.dtype, "the normalised rows"):
        return plain_forward(norm, x, weight, bias, pair, cast_args, residual)
    # by the norm's own kernel: a row is wider than a tile of codes
    mean, rstd = statistics(norm, x, weight, bias, residual)
    if residual is not None:
        # the sum, which that kernel has written and rounded
        x = residual.z
    spec = tile_casts.spec_of(pair)
    sizes = (*x.shape, *x.stride(), *tile_casts.strides(pair))
    config = config or _config(spec)
    transpose_codes = transposes_codes(config, x.device)
    _cast_launch(norm.centers, norm.zero_centered, spec, x.dtype, sizes, config, transpose_codes)(
        x, rstd, mean, weight, bias, *tile_casts.pointers(pair, cast_args)
    )
    return mean, rstd


def _config(spec: Quantizer) -> Config:
    """Return the tile and its warps. Square blocks of float16 would spill on 16 warps."""
    return CONFIGS[2] if is_square(spec.block) and tile_casts.is_block(spec) else tile_casts.fitting(CONFIGS, spec)


def _constants(
    center: bool, zero_centered: bool, spec: Quantizer, dtype: torch.dtype, config: Config, transpose_codes: bool
) -> dict[str, Any]:
    return {
        "CENTER": center, "ZERO_CENTERED": zero_centered, **tile_casts.constants(spec, dtype, transpose_codes),
        "ROWS": config.rows, "COLUMNS": config.columns, "W": config.warps,
    }  # fmt: skip


@lru_cache(maxsize=4096)
def _cast_launch(
    center: bool, zero_centered: bool, spec: Quantizer, dtype: torch.dtype, sizes: tuple[int, ...], config: Config,
    transpose_codes: bool,
) -> Launch:  # fmt: skip
    own = _constants(center, zero_centered, spec, dtype, config, transpose_codes)
    return Launch(_cast_kernel, tile.tiles(sizes[:2], config), sizes, num_warps=config.warps, **own)
