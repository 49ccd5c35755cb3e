"""Functional collectives over a process group, as operations; with a single process they return x."""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.communication import collectives
from octavo.communication.groups import Group, name_of, process_group, size_of
from octavo.errors import UnsupportedShape
from octavo.ops.inputs import values_of
from octavo.ops.operation import FusibleOperation
from octavo.quant import QTensor


class _Collective(FusibleOperation, nn.Module):
    """Base class of operations over a group. It keeps the group's name: a copy, a pickle and a graph have no more.

    Example:
        >>> octavo.ops.AllReduce()(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(self, group: Group = None) -> None:
        super().__init__()
        self.group_name = name_of(group)

    @property
    def group(self) -> Any:
        """The process group of this name as it is now; None for the default group."""
        return process_group(self.group_name) if self.group_name else None

    def op_makes_node(self) -> bool:
        return False

    def why_not_fusible(self, x: Any) -> str:
        return "collectives are never fused"

    def forward(self, input: Tensor | QTensor) -> Tensor | QTensor:
        """Run the collective. Every process of the group must call it.

        Args:
            input: x of this process. A QTensor is dequantized, except by AllGather.

        Returns:
            y; x itself in a single process, or if torch.distributed is not initialized.

        Raises:
            UnsupportedShape: ReduceScatter cannot divide x's rows by the number of processes; or AllGather got a x
                without dims.
            UnsupportedConfig: torch.distributed has no group of this name.
            CollectiveFailed: another process has ended, or calls another collective.
        """
        x = input if isinstance(input, QTensor) and self._keeps_codes(input) else values_of(input)
        size = size_of(self.group_name)
        return x if size == 1 else self._reduced(x, size)

    def _keeps_codes(self, x: QTensor) -> bool:
        return False

    def _reduced(self, x: Any, size: int) -> Tensor | QTensor:
        """Return y for this process's x; the group has this size."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"group={self.group_name!r}" if self.group_name else ""


class AllGather(_Collective):
    """Concatenate the rows of all processes. dx is the sum over processes of dy's rows for this process.

    A QTensor stays one: its codes and scales are sent as bytes, and its anchor carries the gradient. Where one scale
    belongs to all rows (tensorwise, NVFP4's second level), processes may have different ones: the bytes are sent then
    too, and y is a tensor of the values that they stand for.

    Args:
        group: the process group: a ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim); None for all
            processes.

    Example:
        >>> octavo.ops.AllGather()(torch.ones(2, 4)).shape
        torch.Size([2, 4])
        >>> octavo.ops.AllGather()(octavo.quant.MX().quantize(torch.ones(2, 64)))
        QTensor(2x64, mx, cpu)
    """

    def _keeps_codes(self, x: QTensor) -> bool:
        return True

    def _reduced(self, x: Any, size: int) -> Tensor | QTensor:
        where = type(self).__name__
        if not isinstance(x, QTensor):
            return collectives.all_gather(x, size, self.group_name, where)
        height = x.spec.block[0]
        if height is None or x.spec.two_level:
            return _gathered_values(x, size, self.group_name, where)
        if x.rows % height:
            raise UnsupportedShape(
                f"AllGather keeps codes whose rows fill their blocks of {height} rows, and this process has "
                f"{len(range(x.rows))}. Pad the rows to a multiple of {height}, or pass x.dequantize()."
            )
        return collectives.gather_codes(x, size, self.group_name, where)


class ReduceScatter(_Collective):
    """Sum x over processes and return to each process its part of the rows. dx is the gathered dy of all processes.

    Args:
        group: as in `AllGather`.
    """

    def _reduced(self, x: Any, size: int) -> Tensor | QTensor:
        return collectives.reduce_scatter(x, size, self.group_name, type(self).__name__)


class AllReduce(_Collective):
    """Sum x over processes and return the whole sum to each of them. dx is dy.

    Args:
        group: as in `AllGather`.
    """

    def _reduced(self, x: Any, size: int) -> Tensor | QTensor:
        return collectives.all_reduce(x, self.group_name, type(self).__name__)


class SumGradient(_Collective):
    """Return x, which is the same in all processes. dx is the sum of dy over processes: AllReduce the other way.

    It goes before operations whose parameters are split over processes, and around parameters that all processes have
    and each uses for its own part of the tokens.

    Args:
        group: as in `AllGather`.
    """

    def _reduced(self, x: Any, size: int) -> Tensor | QTensor:
        return collectives.copy(x, self.group_name, type(self).__name__)


def _gathered_values(x: QTensor, size: int, group: str, where: str) -> Tensor:
    """Return the values of all processes' codes, each by the scales of its own process."""
    collectives.check_rows(x.shape, where)
    sent = [t.contiguous().view(torch.uint8) for t in x.tensors()]
    parts = [collectives.gather(t, size, group, where).chunk(size) for t in sent]
    own = [t.dtype for t in x.tensors()]
    found = []
    for rank in range(size):
        tensors = [part[rank].view(dtype) for part, dtype in zip(parts, own, strict=True)]
        found.append(x.spec.assemble(tensors, x.shape, x.dtype).dequantize())
    values = torch.cat(found)
    if x.anchor is None:
        return values
    return collectives.joined(values, collectives.gather_anchor(x.anchor, size, group, where))
