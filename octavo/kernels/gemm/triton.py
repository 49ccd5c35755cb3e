"""The emulated GEMM: true codes, decoded to bfloat16 (every code of every format fits), multiplied by the tensor cores
with float32 accumulation. Products are exact, so only the order of additions differs from the reference.

On Hopper codes with scales of 16 or 32 are first decoded to memory, unless there are few rows (`decode.is_worth_it`),
and then multiplied by the kernel in `hopper.py`. The kernel of this file decodes as it multiplies, in every other case.
It applies a scale at a step that depends on how far the scale reaches along K:

    all of K      once, on the sum                                     tensorwise, rowwise
    128           on the partial sum of each block                     float32 block scales
    16 or 32      on the values, before they are multiplied            E4M3 and E8M0 scales: code * scale fits bfloat16,
                  for E8M0 bytes 3...246; below, values under 2^-133 are rounded away, above they saturate
"""

from collections.abc import Collection
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import UnsupportedConfig
from octavo.kernels.decode import decode, is_worth_it
from octavo.kernels.decode.triton import SCALES, operand
from octavo.kernels.gemm import hopper
from octavo.launch import Launch
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Quantizer

Config = tuple[int, int, int, int, int]  # rows of a, rows of b, K, warps, stages

CONFIGS: dict[int, tuple[Config, ...]] = {  # by how far a scale reaches along K; 0: all of it
    0: ((128, 128, 64, 8, 3), (64, 64, 64, 4, 3)),
    128: ((128, 128, 128, 8, 2), (64, 64, 128, 4, 3)),
    32: ((128, 128, 64, 8, 2), (64, 64, 64, 4, 2)),
    16: ((128, 128, 64, 8, 2), (64, 64, 64, 4, 2)),
}


@triton.jit
def _row_scales(scale, rows, block, COUNT, row_stride, block_stride, SCALE_ROWS: tl.constexpr):
    """Return float32 [R]: the scale of each row in one block of columns. SCALE_ROWS 0: one scale for all rows."""
    if SCALE_ROWS == 0:
        at = rows * 0 + tl.cast(block, tl.int64) * block_stride
    else:
        at = (rows // SCALE_ROWS).to(tl.int64) * row_stride + tl.cast(block, tl.int64) * block_stride
    return tl.load(scale + at, mask=rows < COUNT, other=0.0)


@triton.jit
def product(
    a, b, a_scale, b_scale, rows, columns, M, N, K,
    a_stride, b_stride, a_scale_row, a_scale_block, b_scale_row, b_scale_block,
    REACH: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return float32 [BM, BN], scaled by all but a global scale."""
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        left = operand(
            a, a_scale, rows, first, M, K, a_stride, a_scale_row, a_scale_block,
            REACH, A_ROWS, KIND, PACKED, BM, BK,
        )  # fmt: skip
        right = operand(
            b, b_scale, columns, first, N, K, b_stride, b_scale_row, b_scale_block,
            REACH, B_ROWS, KIND, PACKED, BN, BK,
        )  # fmt: skip
        if REACH == 128:
            # a scale reaches 128 far, as one step does: the product is scaled before it is added
            partial = tl.dot(left, tl.trans(right))
            sa = _row_scales(a_scale, rows, first // 128, M, a_scale_row, a_scale_block, A_ROWS)
            sb = _row_scales(b_scale, columns, first // 128, N, b_scale_row, b_scale_block, B_ROWS)
            total += (partial * sa[:, None]) * sb[None, :]
        else:
            total = tl.dot(left, tl.trans(right), total)
    # one scale for all of K multiplies the sum, once
    if REACH == 0:
        sa = _row_scales(a_scale, rows, 0, M, a_scale_row, 0, A_ROWS)
        sb = _row_scales(b_scale, columns, 0, N, b_scale_row, 0, B_ROWS)
        total = (total * sa[:, None]) * sb[None, :]
    return total


@triton.jit
def _gemm_kernel(
    a, b, y, a_scale, b_scale, a_global, b_global, bias,
    M, N, K, a_stride, b_stride, a_scale_row, a_scale_block, b_scale_row, b_scale_block,
    REACH: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    pm, pn = tl.program_id(0) // across, tl.program_id(0) % across
    rows, columns = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN)
    total = product(
        a, b, a_scale, b_scale, rows, columns, M, N, K,
        a_stride, b_stride, a_scale_row, a_scale_block, b_scale_row, b_scale_block,
        REACH, A_ROWS, B_ROWS, KIND, PACKED, BM, BN, BK,
    )  # fmt: skip
    if a_global is not None:
        # the product of the two is rounded to float32 first, as in the reference
        total *= tl.load(a_global) * tl.load(b_global)
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def gemm(a: QTensor, b: QTensor, dtype: torch.dtype, bias: Tensor | None, config: Config | None = None) -> Tensor:
    if config is None and is_worth_it(a, a.rows, b.rows):
        return hopper.gemm(decode(a), decode(b), dtype, bias, (a.global_scale, b.global_scale))
    reach = a.spec.block[1] or 0
    y = torch.empty(a.rows, b.rows, dtype=dtype, device=a.device)
    sizes = (
        a.rows, b.rows, a.columns, a.codes.stride(0), b.codes.stride(0), *a.scale.stride(), *b.scale.stride()
    )  # fmt: skip
    _gemm_launch(a.spec, b.spec, sizes, config or _choose(reach, a.rows, b.rows))(
        a.codes, b.codes, y, a.scale, b.scale, a.global_scale, b.global_scale, bias
    )
    return y


@lru_cache(maxsize=4096)
def _gemm_launch(a: Quantizer, b: Quantizer, sizes: tuple[int, ...], config: Config) -> Launch:
    bm, bn, bk, warps, stages = config
    return Launch(
        _gemm_kernel, triton.cdiv(sizes[0], bm) * triton.cdiv(sizes[1], bn), sizes, num_warps=warps, num_stages=stages,
        REACH=a.block[1] or 0, A_ROWS=a.block[0] or 0, B_ROWS=b.block[0] or 0, KIND=SCALES[a.scale_format],
        PACKED=a.fmt.packed == 2, BM=bm, BN=bn, BK=bk,
    )  # fmt: skip


def check_reach(reach: int, known: Collection[int]) -> None:
    """Raise for scales that no kernel supports."""
    if reach not in known:
        raise UnsupportedConfig(
            f"The emulated GEMM takes scales over {', '.join(map(str, sorted(known)))} elements of the contraction "
            f"(0: all), got {reach}. Call octavo.backend.use('reference') to run plain torch instead."
        )


def _choose(reach: int, m: int, n: int) -> Config:
    check_reach(reach, CONFIGS)
    large, small = CONFIGS[reach]
    return large if min(m, n) > 64 else small
