"""Checks that a gradient from a user's function is like its input: in dtype, and in shape as far as it was known when
the run was planned.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from octavo.fusion.custom.saved_values import dtype_name, told
from octavo.quant.proto import TensorProto
from octavo.runtime.dry_run import Miscounted

MADE_UP = 128  # stands, when a run is planned, for a dim that the plan does not depend on


def like(t: TensorProto | None, known: str, y: TensorProto) -> tuple[str, tuple[int, ...], bool]:
    """Return what the gradient of an input is checked against: its dtype; its dims as far as they are `known` ("all",
    "last", those that are not made up, or "none"), -1 for the others; whether y has its shape."""
    if t is None:
        return "", (), False
    end = len(t.shape) - 1
    dims = [n if known == "all" or (known == "last" and (n != MADE_UP or i == end > 0)) else -1
            for i, n in enumerate(t.shape)]  # fmt: skip
    return dtype_name(t.dtype), tuple(dims), known != "all" and tuple(t.shape) == tuple(y.shape)


def check_gradient(where: str, name: str, g: Any, like: Any, given: Any, dy: Any) -> None:
    """Refuse a gradient that is not like its input: it would be broadcast, summed or cast silently.
    `given` is the input itself, where it was saved."""
    if not isinstance(g, Tensor):
        raise Miscounted(f"{where} returned {told(g)} as the gradient of {name}. Return a tensor.")
    if like is None:  # an input of one of Octavo's layers
        if given is None:
            return
        like = dtype_name(given.dtype), given.shape, False
    dtype, dims, as_y = like
    want: Sequence[Any] = dims if given is None else given.shape
    fits = dtype_name(g.dtype) == dtype and g.dim() == len(want)
    fits = fits and not any([_differs(n, m) and n >= 0 for n, m in zip(want, g.shape, strict=True)])
    if fits and as_y and given is None and dy is not None and dy.dim() == g.dim():
        # the number of rows is not known, but it is more than one where dy has more than one
        fits = not any([_differs(n, m) and m == 1 for n, m in zip(dy.shape, g.shape, strict=True)])
        want = want if fits else dy.shape
    if not fits:
        shape = ", ".join("?" if n == -1 else str(n) for n in want) + ("," if len(want) == 1 else "")
        raise Miscounted(
            f"{where} returned {told(g)} as the gradient of {name}, which is a {dtype} tensor of shape ({shape}). "
            "Return gradients in the dtype and shape of their inputs."
        )


def _differs(a: Any, b: Any) -> bool:
    """Whether two dims differ as numbers. A compiler's symbols are not compared."""
    return isinstance(a, int) and isinstance(b, int) and a != b
