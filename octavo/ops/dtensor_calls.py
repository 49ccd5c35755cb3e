"""A call of a Linear that a plan of torch has split. x, y and the parameters are DTensors, and torch sends what is
between layers.

    weight [N, K] Shard(0)   column   x Replicate              y Shard(-1)   dx Partial, the sum that torch owes
    weight [N, K] Shard(1)   row      x Shard(-1)              y Partial     dx Shard(-1)

The layer's node gets this rank's parts. The ranks agree on amaxes as for `parallel_mode`, so that x and w have the
codes of one process.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from octavo._torch.tensors import is_dtensor
from octavo.communication.groups import rank_of
from octavo.communication.tensor_parallel import Parallel
from octavo.errors import UnsupportedConfig, UnsupportedShape

PACKED = "gate_up"  # part of the name of a Linear with two projections in one weight, one after the other
WAY_OUT = (
    "Split the layer in the plan of parallelize_module, by torch's ColwiseParallel() and RowwiseParallel() or those of "
    "octavo.distributed, or call it on x.to_local() or x.full_tensor()."
)


class _AddOnce(torch.autograd.Function):
    """Add a bias that all ranks have to a part of a sum over ranks, on one of them."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, adds: bool) -> Tensor:
        ctx.dtype = bias.dtype
        return y + bias.to(y.dtype) if adds else y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return dy, dy.flatten(0, -2).sum(0).to(ctx.dtype), None  # dy is that of the sum, the same on all ranks


def adopt(layer: Any, weight: Any) -> None:
    """Take a DTensor as the weight of a layer, and its placement as the layer's `parallel_mode`. A weight that is not
    split over a mesh of one dim is left alone."""
    mesh = weight.device_mesh
    if mesh.ndim != 1 or not isinstance(weight.placements[0], Shard):
        return
    mode = "column" if weight.placements[0].dim % 2 == 0 else "row"
    at = 0 if mode == "column" else 1
    if weight.shape[at] % mesh.size():
        raise UnsupportedShape(
            f"A plan gives each rank an equal part of {layer.op_describe()}, and {weight.shape[at]} "
            f"{'in' if at else 'out'}_features do not divide by the {mesh.size()} ranks of the mesh. Pad them to a "
            f"multiple of {mesh.size()}."
        )
    layer._check_shards("a plan of torch", mode)
    layer.keeps_dtensors = True
    layer.set_tensor_parallel_group(mesh, mode)


def planned(layer: Any, weight: Any) -> None:
    """Take a DTensor that a plan puts in the place of a layer's weight."""
    if PACKED in layer._path.rpartition(".")[2] and isinstance(weight.placements[0], Shard):
        raise UnsupportedConfig(
            f"{layer.op_describe()} has gate and up in one weight by its name, and a plan of torch gives half of the "
            "ranks the gate alone. Return y as a DTensor, which torch divides as a whole: "
            "octavo.distributed.ColwiseParallel(use_local_output=False)."
        )
    adopt(layer, weight)


def parts(layer: Any, x: Any) -> tuple[Parallel, Tensor]:
    """Return how a layer is split, and this rank's part of a DTensor x; raise if its placement does not fit."""
    weight = layer.weight
    if not is_dtensor(type(weight)):
        raise UnsupportedConfig(
            f"{layer.op_describe()} has a plain weight, and x is a DTensor of {x.device_mesh}, placed {x.placements}. "
            f"{WAY_OUT}"
        )
    if not layer.keeps_dtensors:
        adopt(layer, weight)
    if not layer.keeps_dtensors or layer.parallel is None or x.device_mesh != weight.device_mesh:
        raise UnsupportedConfig(
            f"{layer.op_describe()} has a weight of {weight.device_mesh}, placed {weight.placements}, and x is a "
            f"DTensor of {x.device_mesh}, placed {x.placements}. Layers take weights that one dim of a mesh splits, "
            f"and x on the same mesh. {WAY_OUT}"
        )
    column = layer.parallel.mode == "column"
    wanted = Replicate() if column else Shard(x.ndim - 1)
    if tuple(x.placements) != (wanted,):
        x = x.redistribute(placements=[wanted])
    return layer.parallel, x.to_local(grad_placements=[Partial()] if column else None)


def returned(layer: Any, parallel: Parallel, y: Tensor) -> Any:
    """Return a DTensor of this rank's part of y."""
    mesh = layer.weight.device_mesh
    if parallel.mode == "column":
        return DTensor.from_local(y, mesh, [Shard(y.ndim - 1)], run_check=False)
    bias = layer._bias_after_sum()
    if bias is not None:
        y = _AddOnce.apply(y, bias, rank_of(parallel.group) == 0)  # type: ignore[no-untyped-call]
    return DTensor.from_local(y, mesh, [Partial()], run_check=False)
