"""`SplitLinear`: the part of `octavo.Linear` that concerns a weight that is split over ranks."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from octavo.communication import collectives
from octavo.communication.amax_reduction import all_reduced_weight
from octavo.communication.groups import Group
from octavo.communication.rank_checks import check_ranks, number_layer
from octavo.communication.tensor_parallel import (
    Given,
    Parallel,
    check_blocks,
    check_rows,
    gathered,
    mark_blocks,
    parallel_of,
    summed_gradient,
)
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.formats import FLOATS
from octavo.ops.inputs import check_weight
from octavo.ops.published_codes import way_to_values
from octavo.ops.quantized import Quantized
from octavo.quant import QTensor
from octavo.quant.qtensor import Parts
from octavo.recipes import Recipe
from octavo.recipes.ambient import ambient


class SplitLinear(Quantized):
    """A linear layer of which a rank may have a part: collectives stand before and after its node."""

    keeps_dtensors = False  # whether the parameters are DTensors, of which kernels get this rank's part
    return_bias: bool
    column_blocks = 1  # of output features, each of which is split by itself if the layer is split by them

    def _one_call(
        self, x: Any, is_first_microbatch: bool | Tensor | None, fp8_output: bool, as_nodes: bool, given: Given
    ) -> Any:
        """Returns y of one call of the layer's node."""
        raise NotImplementedError

    def _own_part(self, name: str) -> Tensor | None:
        """Returns a parameter as kernels read it: this rank's part of a DTensor, whose gradient is a DTensor's."""
        found: Any = getattr(self, name)
        if not self.keeps_dtensors or found is None:
            return found  # type: ignore[no-any-return]
        return found.to_local()  # type: ignore[no-any-return]

    def _own_parts(self, has_bias: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns weight and bias as kernels read them. Plain parameters come straight from their table, in a fraction
        of the time; a compiler traces torch's way to them, and knows what to guard."""
        if torch.compiler.is_compiling() or self.keeps_dtensors or _are_covered(self):
            return self._own_part("weight"), self._own_part("bias") if has_bias else None
        own = self._parameters
        return own["weight"], own["bias"] if has_bias else None

    def _forward_in_parallel(
        self, parallel: Parallel, x: Any, is_first_microbatch: bool | Tensor | None, fp8_output: bool, as_nodes: bool
    ) -> Any:
        """Returns y of a call with collectives before and after the layer's node. All is checked before anything is
        sent."""
        where, size, group = self._name_for_collectives(), parallel.size(), parallel.group
        recipe = self._recipe or self._followed(ambient.recipe)
        weight, bias = self._own_part("weight"), self._own_part("bias")
        assert weight is not None
        check_features(x, weight)
        check_blocks(self, x)
        column = parallel.mode == "column"
        if parallel.sequence:
            check_rows(x, where)
        if not column and fp8_output:
            raise UnsupportedConfig(
                f"{where}: fp8_output=True returns codes of y, and y is summed over ranks. Leave it out."
            )
        if not column and parallel.sequence:
            collectives.check_divides(x.shape, size, where)
        check_ranks(self, parallel, recipe, x, weight, bias)
        columns: Parts = ()
        again: Any = nullcontext()
        if column and parallel.sequence:
            if type(x) is QTensor:
                x = x.dequantize()
            trains = torch.is_grad_enabled() and weight.requires_grad
            x, columns, again = gathered(self, parallel, recipe, x, trains, as_nodes)
        elif column:
            x = self.op_begin(x)
        with again:
            y = self._one_call(x, is_first_microbatch, fp8_output, as_nodes, Given(parallel, columns))
        if column:
            mark_blocks(y, parallel)
        else:
            y = self.op_finish(y)
        if not self.return_bias:
            return y
        if bias is not None and not column and parallel.sequence:
            bias = collectives.copy(bias, group, where)  # each rank adds it to its own rows
        return y, bias

    def _rows_to_gather(self, x: Tensor, codes: QTensor) -> QTensor:
        """Return the codes of this rank's rows of x, which are then gathered; `octavo.inspect` records both here."""
        return codes

    def op_begin(self, x: Any) -> Any:
        parallel = self._split_over_ranks()
        if parallel is None or parallel.mode == "row" or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        return summed_gradient(x, parallel.group, self._name_for_collectives())

    def op_finish(self, y: Tensor) -> Tensor:
        parallel = self._split_over_ranks()
        if parallel is None or parallel.mode == "column":
            return y
        where = self._name_for_collectives()
        bias = None if self.return_bias else self._own_part("bias")
        if not parallel.sequence:
            y = collectives.all_reduce(y, parallel.group, where)
        else:
            y = collectives.reduce_scatter(y, parallel.size(), parallel.group, where)
            if bias is not None:
                bias = collectives.copy(bias, parallel.group, where)  # each rank adds it to its own rows
        return y if bias is None else y + bias.to(y.dtype)

    def _all_reduced_weight_amaxes(self, recipe: Recipe, as_nodes: bool) -> Parts:
        parallel = self._split_over_ranks()
        if parallel is None:
            return ()
        weight = self._own_part("weight")
        assert weight is not None
        return all_reduced_weight(self, parallel.group, recipe, weight, as_nodes)

    def set_tensor_parallel_group(
        self, group: Group, parallel_mode: str | None = None, sequence_parallel: bool | None = None,
        column_blocks: int | None = None,
    ) -> None:  # fmt: skip
        """Makes a layer work in parallel, or over another group. Its weight and bias are taken as this rank's part.

        Args:
            group: the ranks: a ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim); None is the default
                group.
            parallel_mode: "column" or "row"; None keeps the layer's own.
            sequence_parallel: as in the constructor; None keeps the layer's own.
            column_blocks: as in the constructor, where the weight has this rank's part of each block; None keeps the
                layer's own.

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
        self.parallel = parallel_of("Linear", mode, sequence, group, blocks=blocks)
        self.column_blocks = blocks
        if old is not None and self.parallel is not None:
            self.parallel = self.parallel._replace(gather_again=old.gather_again)
        self._ranks_checked = False
        number_layer(self)

    def _check_holdable_as_shards(self, what: str, mode: str) -> None:
        """Raise if DTensors cannot take the place of the parameters of a layer that is split in this mode."""
        self._refuse_parametrized(what)
        if mode == "column" and self.column_blocks > 1:
            raise UnsupportedConfig(
                f"{self.op_describe()} has {self.column_blocks} blocks of output features, each of which is split by "
                f"itself, and {what} gives each rank one range of the whole weight, as a DTensor has it. Build the "
                "layer with parallel_mode='column' (LayerNormMLP with set_parallel_mode=True), or use a Linear for "
                "each block."
            )
        if self._codes.held:
            raise UnsupportedConfig(
                f"{what} splits weights, and {self.op_describe()} has a weight that is codes. Split it first, or "
                "octavo.revert(model)."
            )


def _are_covered(layer: nn.Module) -> bool:
    """Whether weight or bias is something else than the parameter in the layer's table: an attribute, a property, which
    parametrizations put into a class of their own and which may compute from the parameter, or what a class that looks
    attributes up itself makes of it."""
    own, attributes = layer._parameters, layer.__dict__
    kind: Any = type(layer)
    return (
        kind.__getattr__ is not nn.Module.__getattr__ or kind.__getattribute__ is not object.__getattribute__
        or "weight" not in own or "weight" in attributes or hasattr(kind, "weight")
        or "bias" not in own or "bias" in attributes or hasattr(kind, "bias")
    )  # fmt: skip


def check_features(x: Any, weight: Tensor, title: str = "Linear") -> None:
    """Raises if x (anything with a shape and a device) does not fit the weight. If x has `like`, () is unknown."""
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        check_weight(title, weight, "its weight")
    shape = x.shape
    if not shape and getattr(x, "like", None) is None:
        raise UnsupportedShape(
            f"This {title} takes inputs [..., {weight.shape[1]}], got (). Check the layer before it."
        )
    if shape and shape[-1] != weight.shape[1]:
        found = tuple([len(range(n)) for n in shape])  # numbers, even where the compiler uses symbols
        raise UnsupportedShape(
            f"This {title} takes inputs [..., {weight.shape[1]}], got {found}. "
            "Check the layer before it, or in_features."
        )
    if x.device != weight.device:
        raise UnsupportedDevice(f"x is on {x.device} and the weight on {weight.device}. Move them together.")
    if weight.dtype not in FLOATS:
        raise UnsupportedDtype(
            f"{title} takes its weight in float32, bfloat16 or float16, got {weight.dtype}. "
            f"{way_to_values(weight.dtype)}"
        )


def check_bias(bias: Tensor, weight: Tensor) -> None:
    """Raises if a Linear's bias is no plain tensor, or of a dtype or device that the kernels would not get."""
    if type(bias) is not nn.Parameter:
        check_weight("Linear", bias, "its bias")
    if bias.dtype not in FLOATS:
        raise UnsupportedDtype(
            f"Linear takes its bias in float32, bfloat16 or float16, got {bias.dtype}. {way_to_values(bias.dtype)}"
        )
    if bias.device != weight.device:
        raise UnsupportedDevice(f"The bias is on {bias.device} and the weight on {weight.device}. Move them together.")
