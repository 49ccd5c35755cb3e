"""Layers of one process that draw the random numbers of another rank."""

from unittest import mock

from octavo.ops import rounding_seed
from octavo.ops.quantized import Quantized


def draw_as_rank(module, rank):
    """Has the layers of a module round as those of this rank, where no layer is split."""
    with mock.patch.object(rounding_seed, "replica", return_value=rank):
        for layer in module.modules():
            if isinstance(layer, Quantized):
                layer._materialize_with_weight()
