"""What torch.distributed asks of a model: styles for `parallelize_module`, DTensor parameters, stages of pipelines.

    styles          ColwiseParallel and RowwiseParallel, of a plan for parallelize_module
    parameters      distribute_parameters: DTensors of what a constructor made; sharded_state_dict: of experts
    gather_codes    prepares weights that FSDP2 then gathers as codes (`octavo.communication.sharded_weights`)
    amax_groups     set_amax_group: the ranks that reduce the amaxes of these layers
    pipelines       dw_builder: the dw of a stage of torch.distributed.pipelining, from backward_dw() of its layers

Parameters are DTensors at rest, for checkpoints and optimizers; kernels get this rank's part. Import it by itself:
`from octavo.distributed import ColwiseParallel`. Collectives are in `octavo.communication`.

This room may import rooms up to `fusion`.
"""

from octavo.distributed.amax_groups import set_amax_group
from octavo.distributed.gather_codes import gather_codes
from octavo.distributed.parameters import distribute_parameters, sharded_state_dict
from octavo.distributed.pipelines import dw_builder
from octavo.distributed.styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "RowwiseParallel",
    "distribute_parameters",
    "dw_builder",
    "gather_codes",
    "set_amax_group",
    "sharded_state_dict",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
