"""`SplitGroupedLinear`: the part of `octavo.GroupedLinear` that concerns weights that are split over ranks."""

from typing import Any

import torch
from torch import Tensor

from octavo.communication import collectives
from octavo.communication.amax_reduction import all_reduced_weight
from octavo.communication.tensor_parallel import Parallel
from octavo.errors import UnsupportedConfig
from octavo.ops.quantized import Quantized
from octavo.quant.qtensor import Parts
from octavo.recipes import Recipe


class SplitGroupedLinear(Quantized):
    """A linear layer of groups of which a rank may have a part: collectives stand before and after its node."""

    def _stacked_bias(self) -> Tensor | None:
        """Returns the bias [G, N]."""
        raise NotImplementedError

    def op_begin(self, x: Any) -> Any:
        parallel = self._split_over_ranks()
        if parallel is None or parallel.mode == "row" or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        return collectives.copy(x, parallel.group, self._name_for_collectives())

    def op_finish(self, y: Tensor) -> Tensor:
        parallel = self._split_over_ranks()
        if parallel is None or parallel.mode == "column":
            return y
        return collectives.all_reduce(y, parallel.group, self._name_for_collectives())

    def _all_reduced_weight_amaxes(self, recipe: Recipe, as_nodes: bool) -> Parts:
        parallel = self._split_over_ranks()
        if parallel is None:
            return ()
        return all_reduced_weight(self, parallel.group, recipe, self._whole_weight(), as_nodes, of_groups=True)

    def _bias_of_rows(self, splits: Tensor, scales: Tensor | None, y: Tensor) -> Tensor:
        """Returns the bias of each row's group, zero in the tail; in float32, in which its gradient is summed."""
        bias = self._stacked_bias()
        assert bias is not None
        ends = splits.cumsum(0)
        group = torch.searchsorted(ends, torch.arange(y.shape[0], device=y.device, dtype=ends.dtype), right=True)
        rows = torch.cat([bias, bias.new_zeros(1, bias.shape[1])]).float()[group]
        return rows if scales is None else rows * scales[:, None].float()

    def _check_split(self, parallel: Parallel, out: Any, dgrad_out: Any, dy_codes: Any) -> None:
        """Raises for memory and codes of the caller's that a layer cannot use whose y or dx is summed over ranks."""
        given = (("dgrad_out", dgrad_out),) if parallel.mode == "column" else (("out", out), ("dy_codes", dy_codes))
        for name, value in given:
            if value is not None:
                raise UnsupportedConfig(
                    f"{self.op_describe()}: {name} is memory of one rank, and a {parallel.mode} layer sums over ranks "
                    "after it has written. Leave it out."
                )
