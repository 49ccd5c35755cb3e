"""Styles for `parallelize_module`: a Linear whose parameters are DTensors, and whose forward is `parallel_mode`'s."""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from octavo.communication.tensor_parallel import size_of_mesh
from octavo.distributed.parameters import keep_dtensors
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.ops.dtensor_calls import PACKED
from octavo.ops.linear import Linear


class _Style(ParallelStyle):
    """A way to split a Linear over the ranks of a mesh of one dim."""

    MODE: str
    input_layouts: Placement
    output_layouts: Placement
    src_data_rank: int | None = 0

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        row_codes_only: bool = False,
    ) -> None:
        super().__init__()
        # outside of a pair of column and row layers ranks have whole rows, and inside of it a part of the features
        names = ("input_layouts", "output_layouts") if self.MODE == "column" else ("output_layouts", "input_layouts")
        given = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        outside, inside = given[names[0]] or Replicate(), given[names[1]] or Shard(-1)
        if not isinstance(outside, Replicate) and outside != Shard(0):
            raise UnsupportedConfig(
                f"{type(self).__name__}.{names[0]} is Replicate(), or Shard(0) for parts of the rows, got "
                f"{outside}. Make the sequence the first dim: x.transpose(0, 1)."
            )
        if inside != Shard(-1):
            raise UnsupportedConfig(
                f"{type(self).__name__}.{names[1]} is Shard(-1), the features of this rank, got {inside}. A pair of "
                "ColwiseParallel and RowwiseParallel keeps them so; other layers stay out of the plan."
            )
        self.sequence_parallel = outside == Shard(0)
        self.input_layouts, self.output_layouts = (outside, inside) if self.MODE == "column" else (inside, outside)
        self.use_local_output = use_local_output
        self.row_codes_only = row_codes_only

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(self).__name__
        if not isinstance(module, Linear):
            raise UnsupportedConfig(
                f"octavo.distributed.{name} splits an octavo.Linear, got {type(module).__name__}. Convert the model "
                "first (octavo.convert), and use torch's own style for other modules."
            )
        size = size_of_mesh(device_mesh, name)
        dim = 0 if self.MODE == "column" else 1
        if module.weight.shape[dim] % size:
            raise UnsupportedShape(
                f"{name} gives each rank an equal part of {module.op_describe()}, and {module.weight.shape[dim]} "
                f"{'out' if dim == 0 else 'in'}_features do not divide by the {size} ranks of the mesh. Pad them to a "
                f"multiple of {size}."
            )
        module._check_shards(name, self.MODE)
        self._check_packed(module)
        distribute = partial(distribute_tensor, src_data_rank=self.src_data_rank)
        keep_dtensors(module, self.MODE, device_mesh, distribute)
        module.set_tensor_parallel_group(
            device_mesh, self.MODE, self.sequence_parallel, row_codes_only=self.row_codes_only
        )
        module.register_forward_pre_hook(self._enter)
        if not self.use_local_output:
            module.register_forward_hook(_Leave(device_mesh, self.output_layouts))
        return module

    def _check_packed(self, module: Linear) -> None:
        """Raise for a layer whose name says that a program divides its output into a gate and the rest."""
        name = module._path.rpartition(".")[2]
        if self.MODE == "column" and self.use_local_output and PACKED in name:
            raise UnsupportedConfig(
                f"{module.op_describe()} has gate and up in one weight by its name, and ColwiseParallel gives half of "
                "the ranks the gate alone. Return y as a DTensor, which torch divides as a whole: "
                "ColwiseParallel(use_local_output=False)."
            )

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = arguments[0]
        if not isinstance(x, DTensor):
            return None
        wanted = self.input_layouts if self.input_layouts != Shard(-1) else Shard(x.ndim - 1)
        if tuple(x.placements) != (wanted,):
            x = x.redistribute(placements=[wanted])
        return (x.to_local(), *arguments[1:])

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class _Leave:
    """A forward hook that returns y as a DTensor."""

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        self.mesh, self.placement = mesh, placement

    def __call__(self, module: nn.Module, arguments: Any, y: Any) -> Any:
        return DTensor.from_local(y, self.mesh, [self.placement], run_check=False)


class ColwiseParallel(_Style):
    """Split an `octavo.Linear` by its output features: `parallel_mode="column"`.

    Args:
        input_layouts: Replicate(), the default: x is the same on all ranks. Shard(0): each rank has a part of the rows
            (sequence parallelism), which are gathered as codes where the recipe allows it.
        output_layouts: Shard(-1), the features of this rank.
        use_local_output: True returns a plain tensor; False a DTensor.
        row_codes_only: as in `octavo.Linear`; with Shard(0).

    Raises:
        UnsupportedConfig: a layout is another one.

    Example:
        >>> from octavo.distributed import ColwiseParallel
        >>> ColwiseParallel()
        ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(dim=-1), use_local_output=True)
    """

    MODE = "column"


class RowwiseParallel(_Style):
    """Split an `octavo.Linear` by its input features: `parallel_mode="row"`.

    Args:
        input_layouts: Shard(-1), the features of this rank, as a column layer returns them.
        output_layouts: Replicate(), the default: y is summed over ranks. Shard(0): each rank gets a part of the rows of
            the sum (sequence parallelism).
        use_local_output: True returns a plain tensor; False a DTensor.
        row_codes_only: as in `octavo.Linear`; with Shard(0).

    Raises:
        UnsupportedConfig: a layout is another one.

    Example:
        >>> from octavo.distributed import RowwiseParallel
        >>> RowwiseParallel()
        RowwiseParallel(input_layouts=Shard(dim=-1), output_layouts=Replicate(), use_local_output=True)
    """

    MODE = "row"
