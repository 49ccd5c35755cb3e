"""GEMMs over ragged groups of rows, each group with a matrix of its own.

    rows    y[g]  = a[g] · b[g]ᵀ + bias[g]     fprop and dgrad: as many rows as the group has
    depth   dw[g] = dy[g]ᵀ · x[g]              wgrad: contracted over the rows of the group; zeros for an empty one

They write where they are told to: rows of the tail are left as they were, whatever they hold. Stacked matrices b are
one QTensor, in which group g's begins `height` rows (fprop: w's row codes) or columns (dgrad: w's column codes) after
the one before, a multiple of 128.

On a GPU these are kernels for Hopper; elsewhere the reference, which reads the sizes of the groups on the host.
"""

from types import ModuleType

import torch
from torch import Tensor

from octavo import backend
from octavo.errors import UnsupportedConfig, UnsupportedHardware, UnsupportedShape, check_choice
from octavo.formats import E5M2
from octavo.quant.blocks import Block
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.qtensor import QTensor


def rows(
    a: GroupedTensor, b: QTensor, out: Tensor, bias: Tensor | None = None, *, height: int, along: str = "rows"
) -> Tensor:
    """Fill `out` [rows, N]: fprop with `along="rows"`, dgrad with `along="columns"`: where b's matrices are stacked."""
    check_choice(along, ("rows", "columns"), what="along")
    _check(a.q, b, (BLOCK, BLOCK), out)
    if height % BLOCK:
        raise UnsupportedConfig(f"Stacked matrices begin at multiples of {BLOCK}, got a height of {height}. Pad them.")
    if out.numel() and a.groups.padded:
        bias = None if bias is None else bias.contiguous()
        _twin(out).rows(a, b, out, bias, (height, 0) if along == "rows" else (0, height))
    return out


def depth(a: GroupedTensor, b: GroupedTensor, out: Tensor, *, accumulate: bool = False) -> Tensor:
    """Fill `out` [G, N, K], or add to it."""
    _check(a.q, b.q, (1, BLOCK), out)
    if a.groups.padded == 0:  # not one row, so not one step of a contraction
        return out if accumulate else out.zero_()
    if out.numel():
        _twin(out).depth(a, b, out, accumulate)
    return out


def plain_rows(a: Tensor, b: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """[rows, N] of unquantized a [rows, K] and b [G, N, K]; rows of the tail are undefined."""
    found: Tensor = backend.twin(__name__, a).plain_rows(a, b, bias, groups)
    return found


def plain_depth(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    """[G, N, K] of unquantized a [rows, N] and b [rows, K]."""
    found: Tensor = backend.twin(__name__, a).plain_depth(a, b, groups)
    return found


def zero_tail(out: Tensor, groups: Groups) -> None:
    """Zero the rows after the last group."""
    _check_out(out)
    if out.numel():
        backend.twin(__name__, out).zero_tail(out, groups)


def column_sums_of(dy: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """[rows, N] -> [G, N]: each group's sums, in one order whatever runs beside it."""
    found: Tensor = backend.twin(__name__, dy).column_sums(dy, groups, dtype)
    return found


def _twin(out: Tensor) -> ModuleType:
    if backend.choose(out.device) == "triton" and torch.cuda.get_device_capability(out.device)[0] != 9:
        raise UnsupportedHardware(
            f"Grouped FP8 GEMMs are written for Hopper (SM90), {torch.cuda.get_device_name(out.device)} is not. "
            "Call octavo.backend.use('reference') to run plain torch."
        )
    return backend.twin(__name__, out)


def _check(a: QTensor, b: QTensor, block: Block, out: Tensor) -> None:
    if a.spec.block != (1, BLOCK) or b.spec.block != block:
        raise UnsupportedConfig(
            f"This grouped GEMM multiplies 1x128 blocks by {block[0]}x{block[1]} ones in this version, got {a.spec} by "
            f"{b.spec}. Use fp8-block."
        )
    if a.spec.fmt == E5M2 and b.spec.fmt == E5M2:
        raise UnsupportedConfig("No chip multiplies E5M2 by E5M2. Keep one operand in E4M3.")
    _check_out(out)


def _check_out(out: Tensor) -> None:
    if not out.is_contiguous():
        raise UnsupportedShape(
            f"A grouped GEMM writes contiguous results, got {tuple(out.shape)} with strides {out.stride()}."
        )


__all__ = ["column_sums_of", "depth", "plain_depth", "plain_rows", "rows", "zero_tail"]
