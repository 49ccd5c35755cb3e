"""Dispatch and combine: how tokens get to the processes and rows of their experts, and how results get back.

`octavo.MoE` calls a dispatcher's `dispatch` with the routed tokens, runs its experts on the rows, and calls `combine`
with the rows that the second layer wrote. Without a dispatcher the experts read the tokens where they are, and none of
this is copied.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.moe.permutation import check_capacity, permute, unpermute
from octavo.moe.routing import counts
from octavo.quant.gradient_codes import GradientCodes
from octavo.quant.grouped import GroupedTensor


class Dispatched(NamedTuple):
    """The rows of one call, as a dispatcher's `dispatch` returns them.

    Shapes must not depend on values on the device: a dispatcher has a fixed number of rows, and `sizes` say how many of
    them are in use.

    Attributes:
        rows: the rows of the experts [rows, hidden], those of the first expert first. Rows after the last expert may
            hold anything. Gradients flow through them. Or their codes, an `octavo.GroupedTensor`.
        sizes: the number of rows of each expert of this process, int32 or int64, on the device.
        state: what `combine` needs to know of this call. `octavo.MoE` does not look at it.
        dropped: how many assignments got no row, as an int64 tensor without dims on the device; None if no assignment
            can be dropped. `MoE.overflow` and `octavo.step` report it.
        out: a buffer [rows, hidden] in the dtype of x, which the experts' second layer writes; None lets the layer
            allocate it.
        dgrad_out: such a buffer for the gradient of the rows, which the first layer writes in backward; or None. It is
            not used if the rows require no gradient.
        dy_codes: where `combine`'s backward puts the gradient of the experts' rows as codes, or None.

    Example:
        >>> index, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
        >>> sent = octavo.moe.LocalDispatch(capacity=4).dispatch(torch.randn(2, 16), index, weights, 2)
        >>> sent.rows.shape, sent.sizes, sent.dropped
        (torch.Size([4, 16]), tensor([1, 1]), tensor(0))
    """

    rows: Tensor | GroupedTensor
    sizes: Tensor
    state: object = None
    dropped: Tensor | None = None
    out: Tensor | None = None
    dgrad_out: Tensor | None = None
    dy_codes: GradientCodes | None = None


class Dispatch(Protocol):
    """The two functions of a dispatcher. Any object that has them is one.

    Both must be differentiable, and must not read values on the host. Between them `octavo.MoE` calls its experts with
    `rows` and `sizes`. If `out` was handed over, `combine` gets a tensor in that memory, and no copy is made.

    A dispatcher with a true attribute `takes_payload` gets two more keywords in `dispatch`: `payload`, whose `x` and
    `dy` are the quantizers of the experts if codes may travel, and, beside a shared MLP, `meanwhile`, a function that
    computes its output.

    Example:
        >>> class Sorted:
        ...     def dispatch(self, x, index, weights, num_experts):
        ...         rows, permutation = octavo.moe.permute(x, index, num_experts)
        ...         return octavo.moe.Dispatched(rows, permutation.sizes, (permutation, weights))
        ...
        ...     def combine(self, rows, dispatched):
        ...         return octavo.moe.unpermute(rows, *dispatched.state)
        >>> moe = octavo.MoE(64, 96, 8, 2, dispatcher=Sorted(), recipe="fp8-block")
        >>> moe(torch.randn(10, 64)).shape
        torch.Size([10, 64])
        >>> x, index, weights = torch.tensor([[1.0], [2.0]]), torch.tensor([[1], [0]]), torch.tensor([[0.5], [3.0]])
        >>> sent = Sorted().dispatch(x, index, weights, 2)
        >>> sent.rows.flatten(), Sorted().combine(10 * sent.rows, sent).flatten()
        (tensor([2., 1.]), tensor([ 5., 60.]))
    """

    def dispatch(self, x: Tensor, index: Tensor, weights: Tensor, num_experts: int) -> Dispatched:
        """Copy tokens to the rows of their experts.

        Args:
            x: the tokens [T, hidden].
            index: the experts of each token [T, K], int64; -1 for an assignment without one.
            weights: the weight of each assignment [T, K], float32, with a gradient.
            num_experts: the number of experts of all processes.

        Returns:
            The rows, and what goes with them.
        """

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum the rows of each token, multiplied by the weights.

        Args:
            rows: the experts' outputs [rows, hidden], in `dispatched.out` if that is given.
            dispatched: the result of `dispatch` of this call.

        Returns:
            y [T, hidden], in the dtype of the rows.
        """


class LocalDispatch(Dispatch):
    """A dispatcher within one process, with a fixed number of rows if you like.

    Use it to save memory if the load is known to be lower than the most possible, and as a model for a dispatcher of
    your own. `octavo.MoE` without a dispatcher is faster: it copies no rows.

    Args:
        capacity: the number of rows. Assignments beyond are dropped, from the last expert on, and counted. None, the
            default, has a row for every assignment.

    Raises:
        UnsupportedConfig: `capacity` is no number from 0 up.

    Example:
        >>> moe = octavo.MoE(64, 96, 8, 2, dispatcher=octavo.moe.LocalDispatch(capacity=16))
        >>> y = moe(torch.randn(10, 64))
        >>> moe.overflow()
        4
    """

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None:
            check_capacity(capacity)
        self.capacity = capacity

    def __repr__(self) -> str:
        return f"LocalDispatch(capacity={self.capacity})"

    def dispatch(self, x: Tensor, index: Tensor, weights: Tensor, num_experts: int) -> Dispatched:
        rows, permutation = permute(x, index, num_experts, capacity=self.capacity, tail="untouched")
        dropped = None
        if self.capacity is not None:
            dropped = counts(index, num_experts).sum() - permutation.sizes.sum()
        return Dispatched(rows, permutation.sizes, (permutation, weights), dropped)

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        state: Any = dispatched.state
        permutation, weights = state
        return unpermute(rows, permutation, weights, tail="untouched")


# -- checks of a dispatcher --------------------------------------------------------------------------------------------


def check_dispatcher(dispatcher: Any) -> None:
    """Raise if an object lacks a function of the contract, or is a class and not an object."""
    missing = [name for name in ("dispatch", "combine") if not callable(getattr(dispatcher, name, None))]
    if isinstance(dispatcher, type):
        raise UnsupportedConfig(
            f"dispatcher is an object, got the class {dispatcher.__name__}. Pass {dispatcher.__name__}(...)."
        )
    if missing:
        raise UnsupportedConfig(
            f"dispatcher is an object with the methods dispatch and combine of octavo.moe.Dispatch, and this "
            f"{type(dispatcher).__name__} has no {' and no '.join(missing)}. Write what is missing."
        )


def check_dispatched(dispatcher: Any, sent: Any, experts: int) -> None:
    """Raise if `dispatch` returned something else than a Dispatched, sizes of another number of experts than this
    process has, or counted dropped assignments on the host."""
    title = f"{type(dispatcher).__name__}.dispatch"
    if not isinstance(sent, Dispatched):
        raise UnsupportedDtype(
            f"{title} returns an octavo.moe.Dispatched, got {type(sent).__name__}. Return Dispatched(rows, sizes, "
            "state)."
        )
    if isinstance(sent.sizes, Tensor) and sent.sizes.shape != (experts,):
        raise UnsupportedShape(
            f"{title} returns sizes, the number of rows of each of the {experts} experts of this process, as "
            f"({experts},), got {tuple(sent.sizes.shape)}. Give 0 for an expert without rows, or build octavo.MoE with "
            "another num_local_experts."
        )
    dropped = sent.dropped
    if dropped is None:
        return
    if not isinstance(dropped, Tensor) or dropped.dtype not in (torch.int32, torch.int64) or dropped.numel() != 1:
        got = f"{dropped.dtype} {tuple(dropped.shape)}" if isinstance(dropped, Tensor) else type(dropped).__name__
        raise UnsupportedDtype(
            f"{title} returns the number of dropped assignments as an int64 tensor without dims, got {got}. Count on "
            "the device the assignments with an expert and without a row, such as (index >= 0).sum() - sizes.sum(), or "
            "leave dropped out."
        )


def check_combined(dispatcher: Any, y: Any, x: Tensor, rows: Tensor) -> None:
    """Raise if `combine` returned something else than a row for each token of x, in the dtype of the experts' rows."""
    if not isinstance(y, Tensor) or y.shape != x.shape:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise UnsupportedShape(
            f"{type(dispatcher).__name__}.combine returns y with a row for each token, {tuple(x.shape)}, got {got}. "
            "Sum the rows of each token, as octavo.moe.unpermute does."
        )
    if y.dtype != rows.dtype:
        raise UnsupportedDtype(
            f"{type(dispatcher).__name__}.combine returns y in the dtype of its rows, {rows.dtype}, got {y.dtype}. "
            "Return y.to(rows.dtype)."
        )
