"""The two orientations of an operand. A GEMM contracts row codes over the last dim of x, and column codes, which are
those of x.T, over all other dims, which are folded to rows."""

import math

from octavo.errors import UnsupportedShape

_VECTOR_COLUMN = -2  # a vector's column is [K, 1], which no axis of its own names


def is_column(dim: int, axis: int) -> bool:
    """Tell whether `axis` asks for the contraction over the leading dims."""
    if axis == -1 or axis == dim - 1:
        return False
    if (axis == 0 and dim >= 2) or (axis == -2 and dim == 2):
        return True
    raise UnsupportedShape(
        f"axis must be -1 (contract over the last dim) or 0 (over all the others), got {axis} for a tensor of "
        f"{dim} dims. Permute the tensor so that the contracted dim is last."
    )


def column_axis(dim: int) -> int:
    """Return the axis of the column orientation of a tensor of `dim` dims."""
    return 0 if dim >= 2 else _VECTOR_COLUMN


def oriented_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the shape of x, or of its transpose [K, M] with the leading dims folded."""
    if len(shape) < 2 and axis == _VECTOR_COLUMN:
        return (shape[0] if shape else 1), 1
    if not is_column(len(shape), axis):
        return shape
    return shape[-1], math.prod(shape[:-1])
