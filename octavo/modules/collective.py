"""Functional collectives over a process group, as operations; with a single process they return x.

They call torch's operators by name and wait for each result at once: torch renamed the Python functions around these
operators between 2.11 and 2.13, and the results of those functions must be waited for before their memory is read.
"""

import copy
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
from torch import Tensor, nn

from octavo._torch.collectives import all_gather_into_tensor, all_reduce, reduce_scatter_tensor, wait_tensor
from octavo.errors import UnsupportedShape
from octavo.fuser.operation import FusibleOperation
from octavo.modules.activation import numbers, values_of
from octavo.quant import QTensor
from octavo.quant.qtensor import Join

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Collective(FusibleOperation, nn.Module):
    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        super().__init__()
        self.group = group

    def op_makes_node(self) -> bool:
        return False

    def why_not_fusible(self, x: Any) -> str:
        return "collectives are never fused"

    def forward(self, input: Tensor | QTensor) -> Tensor:
        """Runs the collective. Every process of the group must call it.

        Args:
            input: x of this process. A QTensor is dequantized.

        Returns:
            y; x itself in a single process, or if torch.distributed is not initialized.

        Raises:
            UnsupportedShape: ReduceScatter cannot divide x's rows by the number of processes.

        Example:
            >>> octavo.ops.AllReduce()(torch.ones(2))
            tensor([1., 1.])
        """
        x: Tensor = values_of(input)
        if not dist.is_available() or not dist.is_initialized():
            return x
        size = dist.get_world_size(self.group)
        if size == 1:
            return x
        group: Any = dist.group.WORLD if self.group is None else self.group
        return self._reduced(x.contiguous(), size, group.group_name)

    def _reduced(self, x: Tensor, size: int, group: str) -> Tensor:
        """Returns y for this process's x; the group has this size and name."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies the module but shares its process group, a connection to other processes that cannot be copied."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        if self.group is not None:
            memo[id(self.group)] = self.group
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class AllGather(_Collective):
    """Concatenates the rows of all processes. dx is the sum over processes of dy's rows for this process.

    Args:
        group: the process group; None for all processes.

    Example:
        >>> octavo.ops.AllGather()(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def _reduced(self, x: Tensor, size: int, group: str) -> Tensor:
        return _waited(all_gather_into_tensor(x, size, group))


class ReduceScatter(_Collective):
    """Sums x over processes and returns to each process its part of the rows. dx is the gathered dy of all processes.

    Args:
        group: the process group; None for all processes.

    Example:
        >>> octavo.ops.ReduceScatter()(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def _reduced(self, x: Tensor, size: int, group: str) -> Tensor:
        if x.dim() == 0 or x.shape[0] % size:
            raise UnsupportedShape(
                f"ReduceScatter leaves each process an equal part of x's rows, its first dim, and x of "
                f"{numbers(x)} does not divide by the {size} processes of the group. Pad the rows to a multiple "
                f"of {size} and drop the padding after, or use AllReduce."
            )
        return _waited(reduce_scatter_tensor(x, "sum", size, group))


class AllReduce(_Collective):
    """Sums x over processes and returns the whole sum to each of them. dx is dy.

    Args:
        group: the process group; None for all processes.

    Example:
        >>> octavo.ops.AllReduce()(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def _reduced(self, x: Tensor, size: int, group: str) -> Tensor:
        total = _waited(all_reduce(x.detach(), "sum", group))
        return Join.apply(total, x)  # type: ignore[no-untyped-call,no-any-return]


def _waited(sent: Tensor) -> Tensor:
    found: Tensor = wait_tensor(sent)
    return found
