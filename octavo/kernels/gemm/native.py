"""The chip's own scaled GEMM, through torch.nn.functional.scaled_mm, and the probe that decides whether to trust it.

Octavo uses a mode only after a probe on this device came within the rounding bound of the reference; the process caches
the verdict. Sizes that the hardware does not accept are padded with zeros, which add nothing to any sum:

    K, N         multiples of 16; for blocks K of 128, and M of 16 too
    128x128      its scales, along K, in multiples of 4
    bias         bfloat16 or float16 results only; otherwise added afterwards
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import backend
from octavo._torch.cuda import is_capturing
from octavo._torch.operators import scaled_mm
from octavo.errors import UnsupportedHardware
from octavo.formats import E4M3, Format
from octavo.kernels.gemm import reference
from octavo.kernels.probe import CAPTURED, Support, answer_of, error_of, noise, verdict
from octavo.quant.block import Block1D, Block2D
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Quantizer
from octavo.quant.rowwise import Rowwise
from octavo.quant.scale_blocks import Block
from octavo.quant.tensorwise import Tensorwise

_KINDS: dict[Block, tuple[str, Quantizer]] = {  # block -> name in torch, a quantizer to probe it with
    (None, None): ("TensorWise", Tensorwise()),
    (1, None): ("RowWise", Rowwise()),
    (1, 128): ("BlockWise1x128", Block1D()),
    (128, 128): ("BlockWise128x128", Block2D()),
}
_PROBE_SHAPE = (144, 272, 640)  # M, N, K: more than one tile, more than one block, an odd number of scale blocks


def support(a: Quantizer, b: Quantizer, device: torch.device) -> Support:
    """Return whether the chip multiplies these operands. Cached per device and pair; the first call runs a probe."""
    if a.scale_format is not None or a.block not in _KINDS or b.block not in _KINDS:
        return Support(False, f"torch's scaled_mm is not used for {a} by {b}: their codes are multiplied exactly")
    found = _probed(device, a.block, b.block, a.fmt, b.fmt)
    if not found.ok:
        backend.refuse_emulation(found.reason)
    return found


@cache
def _probed(device: torch.device, a: Block, b: Block, a_fmt: Format, b_fmt: Format) -> Support:
    if is_capturing():
        raise UnsupportedHardware(CAPTURED)
    # all that a layer may ask for at once: a verdict holds for the pair, whatever its first call wants
    uses = _uses(a)
    what = f"scaled_mm of {_name(a)} {a_fmt} by {_name(b)} {b_fmt}"
    return verdict(what, device, lambda: max(_probe(device, a, b, a_fmt, b_fmt, dtype, fast) for dtype, fast in uses))


def _uses(a: Block) -> tuple[tuple[torch.dtype, bool], ...]:
    """List every (output dtype, fast accumulation) that `gemm` may request; blocks are always promoted."""
    precise = ((torch.bfloat16, False), (torch.float16, False), (torch.float32, False))
    return precise if a[1] is not None else (*precise, (torch.bfloat16, True))


def _probe(
    device: torch.device, a: Block, b: Block, a_fmt: Format, b_fmt: Format, dtype: torch.dtype, fast: bool
) -> float:
    """Return the largest error of one product, bias included, as a fraction of its bound (docs/numerics.md)."""
    m, n, k = _PROBE_SHAPE
    qa, qb = (
        _with_format(_KINDS[block][1], fmt).quantize(noise(rows, k, seed=rows).to(device, torch.bfloat16))
        for block, fmt, rows in ((a, a_fmt, m), (b, b_fmt, n))
    )
    bias = noise(1, n, seed=k)[0].to(device, dtype)
    got = answer_of(lambda: gemm(qa, qb, dtype, bias, fast)).double()
    want = reference.gemm(qa, qb, torch.float32, bias).double()
    size = qa.dequantize(torch.float32).abs().double() @ qb.dequantize(torch.float32).abs().double().T
    return error_of(got, want, size, max(2e-4, 1e-6 * k) if fast else 2e-4, bias.abs())


def _with_format(spec: Quantizer, fmt: Format) -> Quantizer:
    return spec if fmt == E4M3 else type(spec)(fmt=fmt)  # type: ignore[call-arg]


def gemm(a: QTensor, b: QTensor, dtype: torch.dtype, bias: Tensor | None, fast: bool) -> Tensor:
    one_scale = a.spec.block == b.spec.block == (None, None)
    if one_scale and bias is None and (b.codes.shape[0] | a.codes.shape[1]) & 15 == 0:  # nothing to pad or lay out
        return scaled_mm(a.codes, b.codes.T, a.scale, b.scale, None, None, dtype, fast)
    blocks = a.spec.block[1] is not None
    # cuBLAS takes dims of codes in multiples of 16, and whole blocks of scales
    rows, multiple = (16, 128) if blocks else (1, 16)
    m, n = a.rows, b.rows
    a_codes, b_codes = _pad(a.codes, rows, multiple), _pad(b.codes, 16, multiple)
    fused_bias = None
    # scaled_mm adds a bias of the result's own dtype alone; another one is added in float32 after
    if bias is not None and dtype != torch.float32 and bias.dtype == dtype:
        fused_bias = F.pad(bias, (0, b_codes.shape[0] - n)) if b_codes.shape[0] != n else bias
    a_scale, a_kind = _scale(a, b, a_codes.shape[0])
    b_scale, b_kind = _scale(b, a, b_codes.shape[0])
    if blocks:
        kinds = getattr(F.ScalingType, a_kind), getattr(F.ScalingType, b_kind)
        y = F.scaled_mm(
            a_codes, b_codes.T, a_scale, kinds[0], b_scale, kinds[1], bias=fused_bias, output_dtype=dtype
        )  # fmt: skip
    else:
        # runs the kernels of F.scaled_mm in a third less host time
        b_scale = b_scale.T if b_kind == "RowWise" else b_scale  # [1, N]
        y = scaled_mm(a_codes, b_codes.T, a_scale, b_scale, fused_bias, None, dtype, fast)
    if b_codes.shape[0] != n or a_codes.shape[0] != m:
        # a node returns no view of a larger result
        y = y[:m, :n].contiguous()
    return y if bias is None or fused_bias is not None else (y.float() + bias.float()).to(dtype)


def _pad(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Append zero codes up to this size; return `codes` itself if none are missing."""
    down, across = -codes.shape[0] % rows, -codes.shape[1] % columns
    if not (down or across):
        return codes
    # as bytes: torch pads no FP8 tensors, and a zero byte is the code of zero
    return F.pad(codes.view(torch.uint8), (0, across, 0, down)).view(codes.dtype)


def _scale(q: QTensor, other: QTensor, rows: int) -> tuple[Tensor, str]:
    """Return q's scale for `rows` rows, padding included, in scaled_mm's layout, and the name of its kind."""
    block = q.spec.block
    # both sides must have one kind: a single scale beside row scales is repeated for each row
    if block == (None, None) and other.spec.block == (None, None):
        return q.scale, "TensorWise"
    if block[1] is None:
        return _pad_rows(q.scale.expand(q.rows, 1), rows).contiguous(), "RowWise"
    if block == (1, 128):
        return _rows_fastest(_pad_rows(q.scale, rows)), "BlockWise1x128"
    # [K/128 padded to 4, rows/128], K fastest, on either side
    return F.pad(q.scale, (0, -q.scale.shape[1] % 4)).contiguous().T, "BlockWise128x128"


def _pad_rows(scale: Tensor, rows: int) -> Tensor:
    missing = rows - scale.shape[0]
    # ones: any finite scale will do for codes of zero
    return scale if missing == 0 else torch.cat((scale, scale.new_ones(missing, scale.shape[1])))


def _rows_fastest(scale: Tensor) -> Tensor:
    """Return [rows, blocks] with strides (1, rows), which scaled_mm checks even if there is only one block."""
    rows, blocks = scale.shape
    return scale if scale.stride() == (1, rows) else scale.T.contiguous().as_strided((rows, blocks), (1, rows))


def _name(block: Block) -> str:
    return _KINDS[block][0]


def high_precision(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Compute the unquantized product with torch's GEMM, accumulated in float32."""
    if dtype == a.dtype and bias is not None and bias.dtype == dtype:
        return torch.addmm(bias, a, b.T)
    y = a @ b.T if dtype == a.dtype or a.dtype == torch.float32 else torch.mm(a, b.T, out_dtype=torch.float32)
    return (y if bias is None else y.float() + bias.float()).to(dtype)
