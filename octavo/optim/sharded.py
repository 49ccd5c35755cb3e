"""Parameters of FSDP2 and tensor parallelism in an optimizer: each rank updates its own part, and states are DTensors,
so that torch's distributed checkpoints save them as they save those of torch's optimizers."""

from typing import Any

import torch
from torch import Tensor

from octavo._torch.tensors import is_sharded, local_part
from octavo.errors import UnsupportedConfig
from octavo.weights.quantized_weight import QuantizedWeight


def part(t: Any) -> Any:
    """Return this rank's part of a DTensor, as memory that kernels can write to; anything else as it is."""
    local = t.to_local() if t is not None and is_sharded(t) else t
    return getattr(local, "shard", local)  # the values of a weight that FSDP2 gathers as codes


def note_write(parameter: Any) -> None:
    """Tell torch, and a weight that FSDP2 gathers as codes, of a kernel that has written to a parameter."""
    torch.autograd.graph.increment_version(parameter)
    source = getattr(local_part(parameter), "source", None)
    if source is not None:
        source.note_write()


def like(parameter: Any, t: Tensor) -> Tensor:
    """Return a tensor of this rank's part as one that is sharded as the parameter is."""
    if not is_sharded(parameter):
        return t
    from torch.distributed.tensor import DTensor  # a second to import, for those who have one

    return DTensor.from_local(
        t, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def gradient(parameter: Any, states: str) -> Tensor:
    """Return this rank's part of a sharded parameter's gradient; refuse parts that the optimizer cannot update."""
    if states == "8bit":
        raise UnsupportedConfig(
            f"states='8bit' has a scale for each 128 elements, and a parameter of {tuple(parameter.shape)} is a "
            "DTensor, whose parts begin anywhere. Use states='bfloat16' for parameters that are sharded."
        )
    if isinstance(part(parameter), QuantizedWeight):
        raise UnsupportedConfig(
            f"A parameter of {tuple(parameter.shape)} is sharded codes, whose scales reach over ranks. Shard the "
            "weight before octavo.quantize_weights."
        )
    grad = parameter.grad
    if is_sharded(grad) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return part(grad)
