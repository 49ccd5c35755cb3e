"""Tensor parallelism in torch's way: `parallelize_module` with styles for Octavo's layers, and DTensor parameters.

    ColwiseParallel, RowwiseParallel    styles of a plan for torch.distributed.tensor.parallel.parallelize_module
    distribute_parameters               DTensors in the place of parts that a constructor made

Parameters are DTensors at rest, for checkpoints and optimizers; kernels get this rank's part. Import it by itself:
`from octavo.distributed import ColwiseParallel`.
"""

from octavo.distributed.parameters import distribute_parameters
from octavo.distributed.styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "RowwiseParallel", "distribute_parameters"]


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
