"""DTensor parameters for layers that were built with `parallel_mode`."""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from octavo.communication.groups import name_of, ranks_in
from octavo.communication.tensor_parallel import size_of_mesh
from octavo.errors import UnsupportedConfig
from octavo.ops.linear import Linear


def distribute_parameters(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Put DTensors in the place of the parameters of layers that were built with `parallel_mode` over this mesh.

    Checkpoints then know which part of a weight each rank has: `torch.distributed.checkpoint` saves and loads them
    over any number of ranks, and a full state dict has the keys and shapes of the model in one process. Call it before
    the optimizer is made.

    Args:
        model: a module with parallel layers.
        mesh: a DeviceMesh of one dim, of the ranks of the layers' `tp_group`.

    Returns:
        The model.

    Raises:
        UnsupportedConfig: the mesh has several dims; a layer is split over other ranks, or has several blocks of output
            features, whose parts are not adjacent in the whole weight.
    """
    size_of_mesh(mesh, "distribute_parameters")
    group = name_of(mesh)
    for layer in model.modules():
        if not isinstance(layer, Linear) or layer.parallel is None or layer.keeps_dtensors:
            continue
        if ranks_in(layer.parallel.group) != ranks_in(group):
            raise UnsupportedConfig(
                f"{layer.op_describe()} is split over the ranks {ranks_in(layer.parallel.group)}, and the mesh has "
                f"{ranks_in(group)}. Pass the mesh that was its tp_group."
            )
        layer._check_holdable_as_shards("distribute_parameters", layer.parallel.mode)
        keep_dtensors(layer, layer.parallel.mode, mesh, partial(DTensor.from_local, run_check=False))
    return model


def keep_dtensors(layer: Linear, mode: str, mesh: DeviceMesh, make: Callable[..., DTensor]) -> None:
    """Put DTensors in the place of a layer's parameters; `make(tensor, mesh, placements)` makes one."""
    for key, parameter in list(layer.named_parameters(recurse=False)):
        # a row layer adds its bias once, to the sum over ranks
        placement: Placement = Shard(0) if mode == "column" else Shard(1) if key == "weight" else Replicate()
        whole = make(parameter.detach(), mesh, [placement])
        layer.register_parameter(key, nn.Parameter(whole, parameter.requires_grad))
    layer.keeps_dtensors = True
