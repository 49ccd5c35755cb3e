"""`SplitLayer`: a layer with a weight of which a rank may have a part. Collectives stand before and after its node."""

from typing import Any

import torch
from torch import Tensor

from octavo.communication import collectives, shared_rows
from octavo.communication.all_reduced_amaxes import scales_whole
from octavo.communication.amax_reduction import all_reduced_weight
from octavo.communication.groups import Group
from octavo.communication.rank_checks import check_ranks, number_layer
from octavo.communication.scattered_sum import DyCast, scattered_sum
from octavo.communication.tensor_parallel import Parallel, parallel_of, summed_gradient
from octavo.errors import UnsupportedConfig
from octavo.ops.quantized import Quantized
from octavo.quant.qtensor import Parts
from octavo.recipes import Recipe
from octavo.recipes.ambient import ambient


class SplitLayer(Quantized):
    """The part of Linear and GroupedLinear that concerns ranks."""

    splits_rows = True  # whether each rank may have a part of the rows outside of a pair of layers
    column_blocks = 1  # of output features, each of which is split by itself if the layer is split by them

    def op_starts_run(self) -> bool:
        parallel = self._split_over_ranks()
        return parallel is not None and parallel.mode == "column"

    def op_ends_run(self) -> bool:
        parallel = self._split_over_ranks()
        return parallel is not None and parallel.mode == "row"

    def op_column_blocks(self, blocks: int) -> int:
        parallel = self._split_over_ranks()
        if parallel is None or parallel.mode == "column":
            return 0 if parallel is None else parallel.blocks
        if blocks > 1:
            raise UnsupportedConfig(
                f"{self.op_describe()} with parallel_mode='row' takes adjacent features of one block, and each rank "
                f"has a part of {blocks} blocks: column_blocks={blocks} of the layer before it, which is for halves "
                "that a gated activation pairs. Leave column_blocks out there."
            )
        return 0

    def _bias_after_sum(self) -> Tensor | None:
        """Return the bias that is added to the sum over ranks of a row layer's y, where `op_finish` adds it."""
        return None

    def op_begin(self, x: Any) -> Any:
        parallel = self._split_over_ranks()
        if parallel is None or parallel.mode == "row" or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        return summed_gradient(x, parallel.group, self._name_for_collectives())

    def op_finish(self, y: Tensor, cast: DyCast | None = None) -> Tensor:
        """Return y summed over ranks, and its bias added. `cast` quantizes dy before it is gathered."""
        parallel = self._split_over_ranks()
        if parallel is None or parallel.mode == "column":
            return y
        shared_rows.forget()
        where, bias = self._name_for_collectives(), self._bias_after_sum()
        if not parallel.sequence:
            y = collectives.all_reduce(y, parallel.group, where)
        else:
            ranks = parallel.size(), parallel.group, where
            y = collectives.reduce_scatter(y, *ranks) if cast is None else scattered_sum(y, cast, *ranks)
            if bias is not None:
                bias = collectives.copy(bias, parallel.group, where)  # each rank adds it to its own rows
        return y if bias is None else y + bias.to(y.dtype)

    def _agrees_on_x(self) -> bool:
        """Return whether the ranks of a row layer agree on amaxes of x before x is cast."""
        recipe = self._recipe or self._followed(ambient.recipe)
        whole = scales_whole(recipe.linear().fprop.left)
        return whole and (not recipe.stateful or self._scaling.uncalibrated.x)

    def _check_ranks(self, parallel: Parallel, x: Any, weight: Tensor, bias: Tensor | None) -> None:
        """Raise if other ranks call the layer in another way."""
        check_ranks(self, parallel, self._recipe or self._followed(ambient.recipe), x, weight, bias)

    def _all_reduced_weight_amaxes(self, recipe: Recipe, as_nodes: bool) -> Parts:
        parallel = self._split_over_ranks()
        if parallel is None:
            return ()
        weight = self._own_part("weight") if self.keeps_dtensors else self._whole_weight()
        assert weight is not None
        return all_reduced_weight(self, parallel.group, recipe, weight, as_nodes, of_groups=weight.dim() == 3)

    def set_tensor_parallel_group(
        self, group: Group, parallel_mode: str | None = None, sequence_parallel: bool | None = None,
        column_blocks: int | None = None, row_codes_only: bool | None = None,
    ) -> None:  # fmt: skip
        """Make a layer work in parallel, or over another group. Its weight and bias are taken as this rank's part.

        Args:
            group: the ranks: a ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim); None is the default
                group.
            parallel_mode: "column" or "row"; None keeps the layer's own.
            sequence_parallel: as in the constructor; None keeps the layer's own.
            column_blocks: as in the constructor, where the weight has this rank's part of each block; None keeps the
                layer's own.
            row_codes_only: as in the constructor of Linear; None keeps the layer's own.

        Raises:
            UnsupportedConfig: the layer has no parallel_mode and none is given, or torch knows no such group.

        Example:
            >>> layer = octavo.Linear(64, 32, parallel_mode="column")
            >>> layer.set_tensor_parallel_group(None, sequence_parallel=True)
            >>> layer
            Linear(in_features=64, out_features=32, bias=True, recipe=from octavo.autocast, parallel_mode='column', \
sequence_parallel=True)
        """
        old = self.parallel
        mode = old.mode if parallel_mode is None and old is not None else parallel_mode
        if mode is None:
            raise UnsupportedConfig(
                f"{self.op_describe()} has no parallel_mode, so that a group has nothing to do. Pass "
                "parallel_mode='column' or 'row' too."
            )
        sequence = sequence_parallel if sequence_parallel is not None else old is not None and old.sequence
        blocks = self.column_blocks if column_blocks is None else column_blocks
        if sequence and not self.splits_rows:
            raise UnsupportedConfig(
                f"{self.op_describe()} takes the rows of all ranks on each of them. Leave sequence_parallel out."
            )
        rows_only = row_codes_only if row_codes_only is not None else old is not None and old.row_codes_only
        self.parallel = parallel_of(self.TITLE, mode, sequence, group, blocks=blocks, row_codes_only=rows_only)
        self.column_blocks = blocks
        if old is not None and self.parallel is not None:
            self.parallel = self.parallel._replace(gather_again=old.gather_again)
        self._ranks_checked = False
        number_layer(self)

    def _check_shards(self, what: str, mode: str) -> None:
        """Raise if DTensors cannot take the place of the parameters of a layer that is split in this mode."""
        self._refuse_parametrized(what)
        if mode == "column" and self.column_blocks > 1:
            raise UnsupportedConfig(
                f"{self.op_describe()} has {self.column_blocks} blocks of output features, each of which is split by "
                f"itself, and {what} gives each rank one range of the whole weight, as a DTensor has it. Build the "
                "layer with parallel_mode='column' (LayerNormMLP with set_parallel_mode=True), or use a Linear for "
                "each block."
            )
        if self._codes.has_quantized_weight:
            raise UnsupportedConfig(
                f"{what} splits weights, and {self.op_describe()} has a weight that is codes. Split it first, or "
                "octavo.revert(model)."
            )
