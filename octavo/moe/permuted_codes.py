"""Rows of a `QTensor` moved by a permutation, as one value: codes and scales go together."""

from collections.abc import Callable

from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.quant import QTensor
from octavo.quant.casts import in_order


def moved_rows(q: QTensor, move: Callable[[Tensor], Tensor]) -> QTensor:
    """Return the codes whose rows `move` copies. Scales of rows move with them; one of the whole tensor stays."""
    if q.requires_grad:
        raise UnsupportedConfig(
            "permute moves codes without a gradient, and these carry one. Permute the values, and quantize the rows; "
            "or pass q.spec.quantize(x.detach())."
        )
    height = q.spec.block[0]
    if len(q.shape) != 2 or height not in (1, None):
        what = f"a QTensor {q.shape}" if len(q.shape) != 2 else f"{q.spec}, whose blocks have {height} rows"
        raise UnsupportedShape(
            f"permute moves rows of a QTensor matrix with scales for each row, or one for all; got {what}. Pass "
            "q.dequantize()."
        )
    codes = move(q.codes)
    scale = q.scale if height is None else move(q.scale)
    rows = QTensor(codes, scale, q.spec, (codes.shape[0], q.shape[1]), q.dtype, q.global_scale)
    return in_order(rows, q.spec._scale_strides(*scale.shape))
