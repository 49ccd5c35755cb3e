"""DTensors of parameters: of layers that were built with `parallel_mode`, and of experts in a state dict."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from octavo.communication.groups import name_of, process_group, ranks_in, size_of
from octavo.communication.tensor_parallel import size_of_mesh
from octavo.errors import UnsupportedConfig
from octavo.ops.grouped_linear import GroupedLinear
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
        layer._check_shards("distribute_parameters", layer.parallel.mode)
        keep_dtensors(layer, layer.parallel.mode, mesh, partial(DTensor.from_local, run_check=False))
    return model


def keep_dtensors(layer: Linear, mode: str, mesh: DeviceMesh, make: Callable[..., DTensor]) -> None:
    """Put DTensors in the place of a layer's parameters; `make(tensor, mesh, placements)` makes one."""
    layer.keeps_dtensors = True
    for key, parameter in list(layer.named_parameters(recurse=False)):
        # a row layer adds its bias once, to the sum over ranks
        placement: Placement = Shard(0) if mode == "column" else Shard(1) if key == "weight" else Replicate()
        whole = make(parameter.detach(), mesh, [placement])
        layer.register_parameter(key, nn.Parameter(whole, parameter.requires_grad))


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model, with a DTensor for each parameter of experts that are split over ranks.

    `torch.distributed.checkpoint` saves it, and loads into it in place: it then knows which experts each rank has, so
    that a checkpoint of four ranks loads on two, on one, and into `state_dict()` of a model without ranks. Each DTensor
    shares the memory of its parameter.

    Args:
        model: a module with an `octavo.MoE(..., ep_group=...)`, a `GroupedLinear(..., ep_group=...)`, or experts that
            `octavo.moe.ExpertwiseParallel` split.

    Returns:
        The state dict; other entries are those of `model.state_dict()`.

    Raises:
        UnsupportedConfig: a parameter of split experts is a DTensor already, such as one of FSDP2.
    """
    state: dict[str, Any] = model.state_dict()
    for path, layer in model.named_modules():
        if not isinstance(layer, GroupedLinear) or layer.ep_group is None or size_of(layer.ep_group) == 1:
            continue
        for key, parameter in _stored(layer, path):
            if isinstance(parameter, DTensor):
                raise UnsupportedConfig(
                    f"{key} is a DTensor of {parameter.device_mesh}, and its experts are split over ranks besides. "
                    "Save get_model_state_dict of each rank's own experts, or gather them first: fully_shard's "
                    "module.unshard()."
                )
            mesh = DeviceMesh.from_group(process_group(layer.ep_group), parameter.device.type)
            state[key] = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
    return state


def _stored(layer: GroupedLinear, path: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of experts with their keys in a state dict."""
    if (elsewhere := getattr(layer, "_stored_elsewhere", None)) is not None:
        yield from elsewhere(path)
        return
    for key, parameter in layer.named_parameters(path, recurse=False):
        if key.rpartition(".")[2] not in ("weight", "bias"):
            raise UnsupportedConfig(
                f"{key} is one of many parameters, whose names begin at 0 on each rank. Build the layer with "
                "single_grouped_weight=True and single_grouped_bias=True."
            )
        yield key, parameter
