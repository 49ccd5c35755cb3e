"""Collectives as operations: functional ones, over a process group, and the identity where there is one process."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor_autograd,
)

from octavo.fuser.operation import FusibleOperation
from octavo.modules.activation import values_of
from octavo.quant.qtensor import Join


class _Collective(FusibleOperation, nn.Module):
    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group

    def op_makes_node(self) -> bool:
        return False

    def op_alone(self, x: Any) -> str:
        return "it speaks with other processes"

    def forward(self, input: Any) -> Any:
        x = values_of(input)
        return x if self._is_alone() else self._reduced(x.contiguous(), self._ranks())

    def _is_alone(self) -> bool:
        return not dist.is_available() or not dist.is_initialized() or dist.get_world_size(self.group) == 1

    def _ranks(self) -> Any:
        return dist.group.WORLD if self.group is None else self.group

    def _reduced(self, x: Tensor, group: Any) -> Tensor:
        raise NotImplementedError


class AllGather(_Collective):
    """The rows of all processes, one after the other; gradients of a process's rows are summed over processes."""

    def _reduced(self, x: Tensor, group: Any) -> Tensor:
        found: Tensor = all_gather_tensor_autograd(x, 0, group)
        return found


class ReduceScatter(_Collective):
    """The sum over processes, of which each keeps its part of the rows; gradients are gathered."""

    def _reduced(self, x: Tensor, group: Any) -> Tensor:
        found: Tensor = reduce_scatter_tensor_autograd(x, "sum", 0, group)
        return found


class AllReduce(_Collective):
    """The sum over processes, in each of them; dx is dy."""

    def _reduced(self, x: Tensor, group: Any) -> Tensor:
        total: Tensor = all_reduce(x.detach(), "sum", group)
        return Join.apply(total, x)  # type: ignore[no-untyped-call,no-any-return]
