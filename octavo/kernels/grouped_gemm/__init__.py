"""GEMMs over ragged groups of rows, each group with a matrix of its own.

    rows            y[g]  = a[g] · b[g]ᵀ + bias[g]    fprop and dgrad: as many rows as the group has
    grouped_wgrad   dw[g] = dy[g]ᵀ · x[g]             wgrad: over the rows of the group; zeros for an empty one

They write into `out` and leave the rows of its tail unchanged. `scales` has one number per packed row, which multiplies
the bias of that row; products and sums stay in float32 until one rounding to out's dtype. Stacked matrices b are one
QTensor, in which the matrix of a group begins `height` rows (fprop: w's row codes) or columns (dgrad: w's column codes)
after the previous one; `height` is a multiple of 128.

Three routes compute the same function, as in `octavo.kernels.gemm`:

    native      kernels for Hopper: FP8 codes with float32 scales, and unquantized rows in sixteen bits
    emulated    MX and NVFP4 on Hopper, decoded to memory first (`octavo.kernels.decode`); Triton, on any GPU that it
                supports: all other cases
    reference   group by group in float64, anywhere: reads the sizes of the groups on the host
"""

import torch
from torch import Tensor

from octavo import backend
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape, check_choice
from octavo.formats import FLOATS
from octavo.kernels.gemm import ACCUMULATIONS
from octavo.kernels.grouped_gemm import hopper_support
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.pairs import check_pair
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Quantizer

_OPERANDS = "The operands of a grouped GEMM"


def rows(
    a: GroupedTensor,
    b: QTensor,
    out: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    height: int,
    along: str = "rows",
    accumulation: str = "precise",
) -> Tensor:
    """Fill `out` [rows, N]. `along` says how b's matrices are stacked: "rows" for fprop, "columns" for dgrad.
    `accumulation` is that of `octavo.kernels.gemm`: sums under a scale per block are promoted in any case."""
    check_choice(along, ("rows", "columns"), what="along")
    check_choice(accumulation, ACCUMULATIONS, what="accumulation")
    check_pair(a.q.spec, b.spec, operands=_OPERANDS)
    _check_out(out)
    if height % BLOCK:
        raise UnsupportedConfig(f"Stacked matrices begin at multiples of {BLOCK}, got a height of {height}. Pad them.")
    if out.numel() and a.groups.padded:
        backend.implementation(__name__, out).rows(a, b, out, *_dense(bias, scales), height, along, accumulation)
    return out


def grouped_wgrad(a: GroupedTensor, b: GroupedTensor, out: Tensor, *, accumulate: bool = False) -> Tensor:
    """Fill `out` [G, N, K], or add to it. Codes may have more rows than N and K."""
    check_pair(a.q.spec, b.q.spec, operands=_OPERANDS)
    _check_out(out)
    if a.groups.padded == 0:  # no rows, so the contraction has no steps
        return out if accumulate else out.zero_()
    if out.numel():
        backend.implementation(__name__, out).grouped_wgrad(a, b, out, accumulate)
    return out


def plain_rows(
    a: Tensor, b: Tensor, out: Tensor, groups: Groups, bias: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """Compute `rows` for unquantized a [rows, K] and b [G, N, K], of any strides."""
    _check_plain(a, b, out)
    if out.numel():
        backend.implementation(__name__, out).plain_rows(a, b, out, groups, *_dense(bias, scales))
    return out


def plain_wgrad(a: Tensor, b: Tensor, out: Tensor, groups: Groups, *, accumulate: bool = False) -> Tensor:
    """Compute `grouped_wgrad` for unquantized a [rows, N] and b [rows, K]."""
    _check_plain(a, b, out)
    if groups.rows == 0:
        return out if accumulate else out.zero_()
    if out.numel():
        backend.implementation(__name__, out).plain_wgrad(a, b, out, groups, accumulate)
    return out


def fresh_wgrad(a: Tensor, b: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return `plain_wgrad` in a new tensor, which saves a copy if torch's GEMM allocates the result itself."""
    if groups.rows == 0 or a.shape[1] * b.shape[1] == 0:
        return torch.zeros(groups.number, a.shape[1], b.shape[1], dtype=dtype, device=a.device)
    return backend.implementation(__name__, a).fresh_wgrad(a, b, groups, dtype)


def zero_tail(out: Tensor, groups: Groups) -> None:
    """Zero the rows after the last group."""
    _check_out(out)
    if out.numel():
        backend.implementation(__name__, out).zero_tail(out, groups)


def column_sums_of(dy: Tensor, groups: Groups, dtype: torch.dtype, scales: Tensor | None = None) -> Tensor:
    """Sum dy[t], or dy[t] * scales[t], over each group: [rows, N] -> [G, N]. The order of additions is fixed."""
    scales = None if scales is None else scales.contiguous()
    return backend.implementation(__name__, dy).column_sums(dy, groups, dtype, scales)


def bias_products(dy: Tensor, bias: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return the gradient of `scales` [rows]: each row of dy times its group's bias [G, N]; zero in the tail."""
    if dy.numel() == 0:
        return torch.zeros(dy.shape[0], dtype=dtype, device=dy.device)
    return backend.implementation(__name__, dy).bias_products(dy, bias.contiguous(), groups, dtype)


def route(a: Quantizer | None, b: Quantizer | None, device: torch.device) -> str:
    """Return the route for operands of these quantizers on `device`: "native", "emulated" or "reference". None means
    an unquantized operand. A pair gets the use that recipes have for it: two of 1x128 blocks mean `grouped_wgrad`."""
    if backend.choose(device) == "reference":
        return "reference"
    if a is None or b is None:
        return "native" if hopper_support.runs("plain rows", device) else "emulated"
    return "native" if hopper_support.pair(a, b, device) else "emulated"


def _dense(bias: Tensor | None, scales: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return both contiguous, as kernels read them; without a bias drop the scales."""
    if bias is None:
        return None, None
    return bias.contiguous(), None if scales is None else scales.contiguous()


def _check_out(out: Tensor) -> None:
    if not out.is_contiguous():
        raise UnsupportedShape(
            f"A grouped GEMM writes contiguous results, got {tuple(out.shape)} with strides {out.stride()}."
        )


def _check_plain(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.dtype != b.dtype or any(t.dtype not in FLOATS for t in (a, out)):
        raise UnsupportedDtype(
            "Unquantized groups are float32, bfloat16 or float16, both operands alike; got "
            f"{a.dtype} by {b.dtype} to {out.dtype}. Cast them first."
        )
    _check_out(out)


__all__ = [
    "bias_products", "column_sums_of", "fresh_wgrad", "grouped_wgrad", "plain_rows", "plain_wgrad", "route", "rows",
    "zero_tail",
]  # fmt: skip
