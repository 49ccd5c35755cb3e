"""`octavo.Linear`: an `nn.Linear` whose three GEMMs follow a recipe.

The parameters, their names, their initialisation and the state dict are `nn.Linear`'s; `octavo.ops.quantized` keeps
the state of the recipe. `forward` gathers both and calls `octavo.ops.linear_layer`.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo._torch.tensors import is_dtensor, is_sharded
from octavo._torch.tracing import is_inside_operator
from octavo.communication import collectives
from octavo.communication.gathered_rows import gathered, rows_of_all
from octavo.communication.groups import Group, size_of
from octavo.communication.rank_checks import number_layer
from octavo.communication.scattered_sum import DyCast
from octavo.communication.shared_rows import SharedRows
from octavo.communication.tensor_parallel import (
    SPLIT,
    Parallel,
    check_blocks,
    check_rows,
    local_sizes,
    mark_blocks,
    own_part,
    parallel_of,
)
from octavo.errors import UnsupportedConfig
from octavo.foreign_keywords import refused
from octavo.kernels.gemm import spec_route
from octavo.ops.dy_codes import cast_of_dy
from octavo.ops.inputs import autocast_input, check_features, check_input, check_weight
from octavo.ops.linear_layer import layer
from octavo.ops.operands import NO_X_CODES, XCodes
from octavo.ops.operation import has_shape
from octavo.ops.quantized import outside, wanted
from octavo.ops.split_layer import SplitLayer
from octavo.quant import QTensor
from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import Quantizer
from octavo.recipes import Recipe
from octavo.recipes.ambient import ambient
from octavo.runtime import call_cache
from octavo.runtime.call import Stage, takes_nodes
from octavo.runtime.call_cache import Lookup
from octavo.weights.gradient_anchor import linked_anchor
from octavo.weights.unsupported_wgrad import unsupported_in_graph

Flag = bool | Tensor | None  # is_first_microbatch


class Linear(SplitLayer, nn.Linear):
    """A linear layer, y = x · Wᵀ + b, whose three matrix products run in the precision of a recipe.

    It is an `nn.Linear`: the constructor, the parameter names, the initialisation and the state dict are the same.
    `octavo.convert` turns the `nn.Linear` layers of a model into this class. y has the dtype of x.

    Args:
        in_features: the size of the last dim of x. It need not be a multiple of anything.
        out_features: the size of the last dim of y.
        bias: whether the layer has a bias.
        device: the device of the parameters.
        dtype: the dtype of the parameters: float32, bfloat16 or float16.
        recipe: how the layer quantizes: a name such as "fp8-current", a canonical string or a `Recipe`. With None the
            layer follows `octavo.autocast`, and runs unquantized outside of it.
        return_bias: return `(y without the bias, bias)`, for a caller that adds the bias elsewhere.
        fuse_wgrad_accumulation: add the weight gradient to `weight.main_grad` in place, for trainers that accumulate
            gradients there. `weight.grad` then stays None, or receives zeros if the weight has an attribute
            `grad_added_to_main_grad`. With "overwrite_first" a call with `is_first_microbatch=True` has its gradient
            replace what is there, so that nobody has to zero it.
        delay_wgrad_compute: leave the weight gradient out of backward. `backward_dw()` computes it later, which lets a
            pipeline schedule overlap it with communication.
        keep_weight_codes: keep the codes of the weight that dx needs from forward to backward. With False backward
            quantizes the weight again: less memory for one more read of the weight. None, the default, is True, and
            False once `fully_shard` has the weight: the codes would be those of the whole weight.
        save_original_input: keep x itself for backward, which casts it once more, instead of x's codes. The results
            have the same bits. Choose it where another operation keeps x anyway, as attention keeps its output: one
            more read of x, and no codes of it. Codes are kept all the same where a second cast would have another scale
            (the first step of fp8-delayed, amaxes that ranks agreed on) and for a dw that a graph defers.
        strict: raise if torch.compile cannot take the layer with these settings. With False the layer warns and runs
            outside of the graph.
        parallel_mode: how the weight is split over the ranks of `tp_group`: "column" gives each rank a part of the
            output features, "row" a part of the input features and of x's. The sizes above are those of the whole
            layer; `weight` is this rank's part. None does not split it.
        sequence_parallel: outside of a column layer and a row layer after it, each rank has a part of the rows of x
            and y, their first dim. A column layer gathers x, as codes where the recipe allows it; a row layer scatters
            y. With False x and y are the same on all ranks there.
        tp_group: the ranks: a ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim). None is the default
            group.
        gather_again: in a column layer with `sequence_parallel`, keep this rank's part of x for backward, and gather
            that of all ranks there: less memory, more traffic. Only in eager mode; a graph keeps all.
        column_blocks: in a column layer, the number of equal blocks of output features that are split each by itself:
            2 before a gated activation, 3 for a projection to q, k and v of equal sizes. A layer without
            `parallel_mode` keeps it for `set_tensor_parallel_group`.
        row_codes_only: with `sequence_parallel`, gather x of a column layer and dy of a row layer as row codes alone,
            half of the bytes, also in recipes that multiply other codes in dw. Those are then cast from the values of
            the row codes: y stays as it is, and dw differs a little.

    Raises:
        UnsupportedConfig: the recipe is unknown, the recipe does not take weights of this dtype, or the settings of
            tensor parallelism do not fit each other.
        UnsupportedShape: the ranks do not divide the features.

    Example:
        >>> layer = octavo.Linear(64, 32, recipe="fp8-current")
        >>> y = layer(torch.ones(8, 64))
        >>> y.shape, y.dtype
        (torch.Size([8, 32]), torch.float32)
        >>> y.sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([32, 64])
    """

    LAYER: ClassVar[Any] = layer
    NAME: ClassVar[str] = "linear"
    TITLE: ClassVar[str] = "Linear"
    return_bias = False
    bias_by_block = False  # whether a block around the layer returns its bias

    @refused
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool | str = False,
        delay_wgrad_compute: bool = False,
        keep_weight_codes: bool | None = None,
        save_original_input: bool = False,
        strict: bool = True,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        tp_group: Group = None,
        gather_again: bool = False,
        column_blocks: int = 1,
        row_codes_only: bool = False,
    ) -> None:
        settings = sequence_parallel, tp_group, gather_again, column_blocks, row_codes_only
        parallel = parallel_of("Linear", parallel_mode, *settings)
        sizes = local_sizes("Linear", parallel, in_features, out_features)
        self.column_blocks = column_blocks
        self.parallel = parallel  # read by reset_parameters, which torch's constructor calls
        super().__init__(*sizes, bias, device, dtype)
        self.return_bias = return_bias
        self.keep_weight_codes = keep_weight_codes is None or keep_weight_codes
        self._codes_chosen = keep_weight_codes is not None
        self.save_original_input = save_original_input
        self._set_up(recipe, fuse_wgrad_accumulation, delay_wgrad_compute, strict)
        number_layer(self)

    def _names_of_weights(self) -> list[str]:
        return ["weight"]

    def _sizes(self) -> tuple[int, ...]:
        return self.in_features, self.out_features

    def _gemm_route(self, left: Quantizer | None, right: Quantizer | None, device: torch.device) -> str:
        return spec_route(left, right, device)

    def reset_parameters(self) -> None:
        """Initialise weight and bias as `nn.Linear` does, and derive the seed of stochastic rounding anew. A part of
        a weight is that of the whole weight: seed all ranks alike."""
        parallel = self.parallel
        size = 1 if parallel is None else size_of(parallel.group)
        if parallel is None or size == 1 or self.weight.is_meta or is_sharded(self.weight):
            super().reset_parameters()
        else:
            column = parallel.mode == "column"
            sizes = self.in_features * (1 if column else size), self.out_features * (size if column else 1)
            weight = self.weight
            whole = nn.Linear(*sizes, self.bias is not None, weight.device, weight.dtype)
            with torch.no_grad():
                weight.copy_(own_part(whole.weight, parallel, 0 if column else 1))
                if self.bias is not None:
                    self.bias.copy_(own_part(whole.bias, parallel, 0) if column else whole.bias)
        self._reset_seed()

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(  # type: ignore[override]
        self,
        input: Tensor | QTensor,
        is_first_microbatch: bool | Tensor | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> "Tensor | QTensor | tuple[Tensor | QTensor, Tensor | None]":
        """Compute y = x · Wᵀ + b.

        Args:
            input: x, a tensor [..., in_features] of float32, bfloat16 or float16; or a `QTensor` with codes that this
                layer's recipe takes, as another layer returns them with `fp8_output=True`.
            is_first_microbatch: True quantizes the weight into a cache, False uses the cache, None (the default) does
                neither. A tensor of one element leaves the choice to the device: zero means False. Use it if several
                microbatches share a weight. A call without it takes the value of `octavo.microbatch`.
            fp8_output: return y as codes for a layer with the same recipe.
            fp8_grad: False. dx leaves as codes inside of an `octavo.Sequential` alone, where an operation takes them.

        Returns:
            y [..., out_features] in the dtype of x, or of torch.autocast where that is on; a `QTensor` with
            `fp8_output=True`. With `return_bias=True` it is a tuple of y without the bias, and the bias.

        Raises:
            UnsupportedShape: the last dim of x is not `in_features`.
            UnsupportedDtype: x or the weight has another dtype.
            UnsupportedDevice: x and the weight are on two devices.
            UnsupportedConfig: the recipe has no codes for `fp8_output`, takes other codes than x has, or the cache of
                the weight is out of date.

        Example:
            >>> layer = octavo.Linear(64, 32, recipe="fp8-block")
            >>> layer(torch.ones(2, 8, 64), is_first_microbatch=True).shape
            torch.Size([2, 8, 32])
            >>> layer(torch.ones(8, 64), fp8_output=True)
            QTensor(8x32, block-1d, cpu)
        """
        if fp8_grad is True:  # torch.fx passes a symbol
            raise UnsupportedConfig(
                "fp8_grad=True: autograd passes gradients in the dtype of x. In an octavo.Sequential of this layer and "
                "the one before, dx leaves as codes where a fusion takes them. Leave fp8_grad out."
            )
        compiling = torch.compiler.is_compiling()
        if compiling and (why := unsupported_in_graph(self)):
            if is_inside_operator():
                self._now("_refuse", why)  # the code below is not reached: the whole operator falls back to eager
            torch._dynamo.graph_break(msg=why)  # under fullgraph=True this is the error
            return outside.call(self, why, input, is_first_microbatch, fp8_output)
        if type(input) is not Tensor and is_dtensor(type(input)):
            return self._forward_of_dtensor(input, is_first_microbatch, fp8_output)
        if self.keeps_dtensors and not is_dtensor(type(self.weight)):
            return self._forward_of_parts(input, is_first_microbatch, fp8_output)
        x = input if type(input) is QTensor else autocast_input("Linear", input, self)
        settings, plain = None, is_first_microbatch is None and not fp8_output and type(x) is Tensor
        if not compiling and plain and x.device.type in call_cache.DEVICES:
            settings, y = self._looked_up(x)
            if y is not None:
                return y
        as_nodes = takes_nodes((self,))
        parallel = None if self.parallel is None else self._split_over_ranks()
        if parallel is not None:
            return self._forward_in_parallel(parallel, x, input, is_first_microbatch, fp8_output, as_nodes)
        stage = self._stage(x, is_first_microbatch, fp8_output, as_nodes, settings=settings)
        y = self._run_stage(stage, x, fp8_output, as_nodes)
        return (y, self._own_part("bias")) if self.return_bias else y  # type: ignore[return-value]

    def _call_lookup(self, needs_dx: bool, extra_inputs: tuple[Any, ...]) -> Lookup | None:
        if self.return_bias and not self.bias_by_block:
            return None
        return self._lookup(needs_dx, *self._own_parts(has_bias=not self.return_bias))

    def _run_stage(self, stage: Stage, x: Any, fp8_output: bool, as_nodes: bool) -> Any:
        """Return y of one call of the layer's node."""
        tensors = self._run_node(stage, x.anchor if type(x) is QTensor else x, as_nodes)
        y = tensors[0]
        if type(x) is QTensor and x.anchor is None and len(x.shape) != 2:
            y = y.view(*x.shape[:-1], y.shape[-1])
        return self._quantized_output(tensors, y) if fp8_output else y

    def _stage(
        self, x: Any, is_first_microbatch: Flag, fp8_output: bool, as_nodes: bool, parallel: Parallel | None = None,
        columns: Parts = (), settings: tuple[Any, ...] | None = None,
    ) -> Stage:  # fmt: skip
        """Return the Stage of a call with x: a tensor, codes, or an Edge inside a run. Read the weight once, because
        each read of a parametrized weight computes it. `columns` are codes of x by column besides those in x."""
        if torch.compiler.is_compiling() or self._unplaced:
            self._materialize_for_call()
        recipe = self._recipe or self._followed(ambient.recipe)
        splits_x = parallel is not None and parallel.mode == "row"
        weight, bias = self._own_parts(has_bias=not self.return_bias and not splits_x)
        if weight is None:
            check_weight("Linear", weight, "its weight")
        assert weight is not None
        if self._codes.has_quantized_weight:
            (weight,) = self._operands(recipe, (weight,))
        codes = XCodes(_codes_for(recipe, x), columns) if type(x) is QTensor else NO_X_CODES
        check_features(x, weight, "Linear", bias)
        if fp8_output and recipe.linear().fprop.left is None:
            raise UnsupportedConfig(
                f"fp8_output=True quantizes y as the next layer's fprop would, and {recipe} quantizes nothing there. "
                "Leave fp8_output out, or choose a recipe with a quantized fprop."
            )
        grads = wanted(x.requires_grad, (weight,), bias)
        side = self._weight_side(recipe, (weight,), grads, is_first_microbatch, as_nodes, len(codes.row) > 0)
        more: dict[str, Any] = {"quantize_output": True} if fp8_output else {}
        key, all_reduced = self._config_key(recipe, x, weight, bias, grads, side, codes, parallel, as_nodes, **more)
        width = weight.shape[0]
        weight = linked_anchor((weight,)) if side.weight == "quantized" else weight
        weight = weight.detach() if side.bypasses_autograd else weight
        after = partial(self._wgrad.enqueue, self, key, codes.column or codes.row)
        return Stage(
            self.NAME, key,
            (weight, bias, codes.row, *side.inputs, codes.column, all_reduced),
            side.buffers, any(grads), width, writes_in_backward=side.bypasses_autograd,
            after=after if side.deferred_wgrad == "buffers" else None, settings=settings,
        )  # fmt: skip

    def _quantized_output(self, tensors: Sequence[Tensor], anchor: Tensor) -> QTensor:
        quant = (self._recipe or self._followed(ambient.recipe)).linear()
        spec = quant.fprop.left
        assert spec is not None
        q = spec.assemble(tuple(tensors[1 : 1 + quant.parts]), tuple(anchor.shape), anchor.dtype)
        return QTensor(q.codes, q.scale, spec, q.shape, q.dtype, q.global_scale, anchor=anchor)

    # -- over ranks ----------------------------------------------------------------------------------------------------

    def _forward_in_parallel(
        self, parallel: Parallel, x: Any, source: Any, is_first_microbatch: Flag, fp8_output: bool, as_nodes: bool
    ) -> Any:
        """Return y of a call with collectives before and after the layer's node. All is checked before anything is
        sent. `source` is x as the program passed it, which siblings of this layer read too."""
        where, size = self._name_for_collectives(), parallel.size()
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
        self._check_ranks(parallel, x, weight, bias)
        rows, known = SharedRows(x), self.weight if self.keeps_dtensors else weight
        if column and parallel.sequence:
            if type(x) is QTensor:
                x = x.dequantize()
            trains = torch.is_grad_enabled() and weight.requires_grad
            recipe = self._recipe or self._followed(ambient.recipe)
            rows = gathered(self, known, parallel, recipe, x, source, trains, as_nodes)
        elif column:
            rows = rows_of_all(self, known, parallel, x, source)
        with rows.again or nullcontext():
            stage = self._stage(rows.x, is_first_microbatch, fp8_output, as_nodes, parallel, rows.columns)
            y = self._run_stage(stage, rows.x, fp8_output, as_nodes)
        if column:
            mark_blocks(y, parallel)
        else:
            scatters = parallel.sequence and stage.needs and (not as_nodes or torch.compiler.is_compiling())
            y = self.op_finish(y, self._dy_cast(stage, parallel) if scatters else None)
        return (y, self._bias_of_caller()) if self.return_bias else y

    def _dy_cast(self, stage: Stage, parallel: Parallel) -> DyCast | None:
        """Return the cast of a rank's rows of dy before they are gathered; None if values are."""
        return cast_of_dy(stage, parallel.row_codes_only)

    def _bias_of_caller(self) -> Tensor | None:
        """Return the bias for a caller that adds it."""
        bias, parallel = self._own_part("bias"), self._split_over_ranks()
        if bias is not None and parallel is not None and parallel.mode == "row" and parallel.sequence:
            # each rank adds it to its own rows
            return collectives.copy(bias, parallel.group, self._name_for_collectives())
        return bias

    def _bias_after_sum(self) -> Tensor | None:
        return None if self.return_bias else self._own_part("bias")

    def _note_rows(self, x: Tensor, codes: QTensor) -> None:
        """Note this rank's rows of x and their codes, which are gathered; `octavo.inspect` records both here."""

    def _forward_of_dtensor(self, x: Any, is_first_microbatch: Flag, fp8_output: bool) -> Any:
        """Return y, a DTensor, of a call in a plan of torch."""
        from octavo.ops import dtensor_calls  # imports DTensors, which only such a program has imported

        if fp8_output or self.return_bias:
            raise UnsupportedConfig(
                f"{self.op_describe()} with fp8_output=True or return_bias=True takes no DTensor, whose y torch sends. "
                "Leave it out, or use octavo.distributed.ColwiseParallel and RowwiseParallel in the plan."
            )
        parallel, own = dtensor_calls.parts(self, x)
        return dtensor_calls.returned(self, parallel, self._forward_of_parts(own, is_first_microbatch, False))

    def _forward_of_parts(self, x: Any, is_first_microbatch: Flag, fp8_output: bool) -> Any:
        """Return y of this rank's parts of x and of the weight, where somebody else sends what is between layers."""
        x = x if type(x) is QTensor else autocast_input("Linear", x, self)
        weight, bias = self._own_part("weight"), self._own_part("bias")
        assert weight is not None
        check_features(x, weight)
        split = self._split_over_ranks()
        if split is not None:
            self._check_ranks(split, x, weight, bias)
        as_nodes = takes_nodes((self,))
        stage = self._stage(x, is_first_microbatch, fp8_output, as_nodes, self.parallel)
        return self._run_stage(stage, x, fp8_output, as_nodes)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. A weight that a plan of torch has split makes the layer a column or a row layer."""
        old: Any = self._parameters.get(name)
        if name == "weight" and old is not None and is_dtensor(type(param)) and not is_dtensor(type(old)):
            if not self.keeps_dtensors:
                from octavo.ops import dtensor_calls

                dtensor_calls.planned(self, param)
        super().register_parameter(name, param)

    # -- as an operation of a Sequential ---------------------------------------------------------------------------

    op_keywords = ("is_first_microbatch", "fp8_output")

    def why_not_fusible(self, x: Any) -> str:
        if self.parallel is not None and (parallel := self._split_over_ranks()) is not None:
            if parallel.mode == "column" and parallel.sequence:
                return SPLIT
            if parallel.mode == "row" and self._agrees_on_x():
                return SPLIT
        if self.return_bias and not self.bias_by_block:
            return "return_bias=True hands its bias to the caller"
        return self._why_alone_in_graph() if torch.compiler.is_compiling() else ""

    def op_call(self, x: Any, extra_inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(x, QTensor):
            recipe = self._recipe or self._followed(ambient.recipe)
            if x.spec != recipe.linear().fprop.left:
                x = x.dequantize()  # codes of another quantizer: this layer quantizes their values again
        made = self(x, **kwargs)
        return made[0] if self.return_bias and self.bias_by_block else made

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        if kwargs.get("fp8_output"):
            raise UnsupportedConfig(
                "fp8_output=True is for a Linear that is called by itself: in a Sequential, operations that run "
                "together pass codes to each other. Leave it out."
            )
        check_input("Linear", x, owner=self)
        parallel = None if self.parallel is None else self._split_over_ranks()
        if parallel is None:
            return self._stage(x, kwargs.get("is_first_microbatch"), False, as_nodes)
        if parallel.mode == "row" and parallel.sequence and has_shape(x):
            check_rows(x, self._name_for_collectives())
            collectives.check_divides(x.shape, parallel.size(), self._name_for_collectives())
        if has_shape(x):
            weight = self._own_part("weight")
            assert weight is not None
            check_features(x, weight)
            self._check_ranks(parallel, x, weight, self._own_part("bias"))
        return self._stage(x, kwargs.get("is_first_microbatch"), False, as_nodes, parallel)

    # -- as a module -----------------------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, {self._repr_of_recipe()}{self._repr_of_weight()}"
        return text if self.parallel is None else f"{text}, {self.parallel.describe()}"


def _codes_for(recipe: Recipe, x: QTensor) -> Parts:
    """Return the tensors of a quantized x; raise if this layer's fprop takes other codes."""
    spec = recipe.linear().fprop.left
    if x.spec != spec:
        raise UnsupportedConfig(
            f"This layer's fprop takes codes of {spec} ({recipe}), and the input was quantized by {x.spec}. "
            "Use one recipe for both layers, or pass x.dequantize()."
        )
    return tuple(x.tensors())
