"""What torch.distributed asks of a model: styles for `parallelize_module`, DTensor parameters, stages of pipelines.

    ColwiseParallel, RowwiseParallel    styles of a plan for torch.distributed.tensor.parallel.parallelize_module
    distribute_parameters               DTensors in the place of parts that a constructor made
    set_amax_group                      the ranks that agree on the scales of these layers
    gather_codes                        FSDP2 gathers weights as codes
    dw_builder                          of a stage of torch.distributed.pipelining, from backward_dw() of its layers
    sharded_state_dict                  a state dict that knows which experts each rank has

Parameters are DTensors at rest, for checkpoints and optimizers; kernels get this rank's part. Import it by itself:
`from octavo.distributed import ColwiseParallel`.
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
