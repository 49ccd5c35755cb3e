"""Decoding on the GPU: one pass that reads codes and scales and writes bfloat16. `operand` decodes a tile, for this
kernel and for the GEMMs that decode as they multiply."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3, E8M0
from octavo.launch import Launch
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Quantizer
from octavo.quant.tile import Config

SCALES = {None: "float32", E8M0: "e8m0", E4M3: "e4m3"}
CONFIG = Config(32, 256, 4)


@triton.jit
def _e2m1(codes):
    """Decode nibbles: move their bits to the float32 that they would be but for its bias of 127. Subnormals are
    subnormals there, too."""
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    # exact: a power of two
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _scale_values(stored, KIND: tl.constexpr):
    if KIND == "e8m0":
        byte = stored.to(tl.int32)
        # 2^-127 is a subnormal of float32
        bits = tl.where(byte == 0, 0x400000, byte << 23)
        return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif KIND == "e4m3":
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return stored


@triton.jit
def operand(
    codes, scale, rows, first, COUNT, K, row_stride, scale_row_stride, scale_block_stride,
    REACH: tl.constexpr, SCALE_ROWS: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return bfloat16 [R, BK] of codes[rows, first:first+BK], with scales of 16 and 32 folded in."""
    live = (rows < COUNT)[:, None]
    at = rows.to(tl.int64)[:, None] * row_stride
    if PACKED:
        k = first // 2 + tl.arange(0, BK // 2)
        pairs = tl.load(codes + at + k[None, :], mask=live & (k < row_stride)[None, :], other=0).to(tl.int32)
        # the low nibble is the even element
        values = _e2m1(tl.reshape(tl.join(pairs & 15, pairs >> 4), (R, BK)))
    else:
        k = first + tl.arange(0, BK)
        values = tl.load(codes + at + k[None, :], mask=live & (k < K)[None, :], other=0.0)
    if REACH == 16 or REACH == 32:
        groups: tl.constexpr = BK // REACH
        group = first // REACH + tl.arange(0, groups)
        scale_rows = (rows // SCALE_ROWS).to(tl.int64)
        stored = tl.load(
            scale + scale_rows[:, None] * scale_row_stride + group.to(tl.int64)[None, :] * scale_block_stride,
            mask=live & (group < tl.cdiv(K, REACH))[None, :], other=0,
        )  # fmt: skip
        s = _scale_values(stored, KIND)
        # a product of a code and a byte scale is exact in bfloat16, but at the ends of its range
        scaled = tl.reshape(values.to(tl.float32), (R, groups, REACH)) * s[:, :, None]
        if KIND != "e4m3":  # whose largest value is far below bfloat16's; a power of two rounded up may pass it
            largest: tl.constexpr = 3.3895313892515355e38
            limited = tl.clamp(scaled, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
            if codes.dtype.element_ty == tl.float8e5:  # a code of Inf stays one
                infinite = tl.abs(tl.reshape(values.to(tl.float32), (R, groups, REACH))) == float("inf")
                limited = tl.where(infinite, scaled, limited)
            scaled = limited
        return tl.reshape(scaled, (R, BK)).to(tl.bfloat16)
    elif codes.dtype.element_ty == tl.float8e5:
        # straight to bfloat16 Triton shifts bits and multiplies, which makes 65536 of Inf and a number of NaN
        return values.to(tl.float32).to(tl.bfloat16)
    else:
        return values.to(tl.bfloat16)


@triton.jit
def _decode_kernel(
    codes, scale, out, source, live, M, K, row_stride, out_stride, scale_row_stride, scale_block_stride,
    REACH: tl.constexpr, SCALE_ROWS: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(K, C)
    top, first = tl.program_id(0) // across * R, tl.program_id(0) % across * C
    begin, end = top, M  # the row of `out` for the first row of the tile; the row of codes at which the group ends
    if source is not None:
        block = top // SIZE
        end = block * SIZE + tl.load(live + block)
        # blocks that pad a group
        if top >= end:
            return
        begin = tl.load(source + block) + top % SIZE
    rows, lanes, columns = top + tl.arange(0, R), tl.arange(0, R), first + tl.arange(0, C)
    values = operand(
        codes, scale, rows, first, end, K, row_stride, scale_row_stride, scale_block_stride,
        REACH, SCALE_ROWS, KIND, PACKED, R, C,
    )  # fmt: skip
    at = (begin + lanes).to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out + at, values, mask=(rows < end)[:, None] & (columns < K)[None, :])


def decode(q: QTensor, groups: Groups | None) -> Tensor:
    codes, columns = q.codes, q.codes.shape[1] * q.spec.fmt.packed
    rows = codes.shape[0] if groups is None else groups.rows
    # rows begin at multiples of 16 bytes, which TMA needs
    out = torch.empty(rows, -(-columns // 8) * 8, dtype=torch.bfloat16, device=codes.device)
    if out.numel():
        sizes = codes.shape[0], columns, codes.stride(0), out.stride(0), *q.scale.stride()
        source, live = (None, None) if groups is None else (groups.source, groups.live)
        _decode_launch(q.spec, sizes)(codes, q.scale, out, source, live)
    return out if out.shape[1] == columns else out[:, :columns]


@lru_cache(maxsize=4096)
def _decode_launch(spec: Quantizer, sizes: tuple[int, ...]) -> Launch:
    grid = triton.cdiv(sizes[0], CONFIG.rows) * triton.cdiv(sizes[1], CONFIG.columns)
    return Launch(
        _decode_kernel, grid, sizes, num_warps=CONFIG.warps, REACH=spec.block[1] or 0, SCALE_ROWS=spec.block[0] or 0,
        KIND=SCALES[spec.scale_format], PACKED=spec.fmt.packed == 2, R=CONFIG.rows, C=CONFIG.columns, SIZE=BLOCK,
    )  # fmt: skip
