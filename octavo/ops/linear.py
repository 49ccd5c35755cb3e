"""`octavo.Linear`: an `nn.Linear` whose three GEMMs follow a recipe.

The parameters, their names, their initialisation and the state dict are `nn.Linear`'s; `octavo.ops.quantized` keeps
the state of the recipe. `forward` gathers both and calls `octavo.ops.linear_layer`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo._torch.dispatcher import is_any_autocast_enabled
from octavo._torch.tensors import is_sharded
from octavo._torch.tracing import is_inside_operator
from octavo.communication import collectives
from octavo.communication.all_reduced_amaxes import scales_whole
from octavo.communication.amax_reduction import agree
from octavo.communication.groups import Group, size_of
from octavo.communication.rank_checks import check_ranks, number_layer
from octavo.communication.tensor_parallel import (
    NOTHING,
    SPLIT,
    Given,
    check_rows,
    local_sizes,
    own_part,
    parallel_of,
)
from octavo.errors import UnsupportedConfig
from octavo.kernels.gemm import spec_route
from octavo.ops.inputs import arrived, check_input, check_weight
from octavo.ops.linear_config import call_key
from octavo.ops.linear_layer import Config, layer
from octavo.ops.operation import has_shape
from octavo.ops.published_codes import refuse_codes
from octavo.ops.quantized import outside, settings_of, wanted
from octavo.ops.split_linear import SplitLinear, check_bias, check_features
from octavo.quant import QTensor
from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import Quantizer
from octavo.recipes import Recipe
from octavo.recipes.ambient import ambient, process
from octavo.runtime.call import Stage, like, takes_nodes
from octavo.runtime.contract import DTYPE_NAMES
from octavo.values import Value
from octavo.weights.quantized_weight import QuantizedWeight, linked_anchor, parameter
from octavo.weights.unsupported_wgrad import unsupported_in_graph


class Linear(SplitLinear, nn.Linear):
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
            `grad_added_to_main_grad`.
        delay_wgrad_compute: leave the weight gradient out of backward. `backward_dw()` computes it later, which lets a
            pipeline schedule overlap it with communication.
        keep_weight_codes: keep the codes of the weight that dx needs from forward to backward. With False backward
            quantizes the weight again: less memory for one more read of the weight.
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
    return_bias = False
    keep_weight_codes = True  # for dgrad, from forward to backward; if False, backward makes them again

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
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        keep_weight_codes: bool = True,
        strict: bool = True,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        tp_group: Group = None,
        gather_again: bool = False,
        column_blocks: int = 1,
    ) -> None:
        parallel = parallel_of("Linear", parallel_mode, sequence_parallel, tp_group, gather_again, column_blocks)
        sizes = local_sizes("Linear", parallel, in_features, out_features)
        self.column_blocks = column_blocks
        self.parallel = parallel  # read by reset_parameters, which torch's constructor calls
        super().__init__(*sizes, bias, device, dtype)
        self.return_bias = return_bias
        self.keep_weight_codes = keep_weight_codes
        self._set_up(recipe, fuse_wgrad_accumulation, delay_wgrad_compute, strict)
        number_layer(self)

    def _names_of_weights(self) -> list[str]:
        return ["weight"]

    def _whole_weight(self) -> Tensor:
        return self.weight

    def _set_weights(self, whole: Tensor) -> None:
        old = self.weight
        self.weight = (
            parameter(whole, old) if isinstance(whole, QuantizedWeight) else nn.Parameter(whole, old.requires_grad)
        )

    def op_describe(self) -> str:
        sizes = f"Linear({self.in_features}, {self.out_features})"
        return f"{sizes} at {self._path!r}" if self._path else sizes

    def _gemm_route(self, left: Quantizer | None, right: Quantizer | None, device: torch.device) -> str:
        return spec_route(left, right, device)

    def reset_parameters(self) -> None:
        """Initialises weight and bias as `nn.Linear` does, and derives the seed of stochastic rounding anew. A part of
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
        self, input: Tensor | QTensor, is_first_microbatch: bool | Tensor | None = None, fp8_output: bool = False
    ) -> "Tensor | QTensor | tuple[Tensor | QTensor, Tensor | None]":
        """Computes y = x · Wᵀ + b.

        Args:
            input: x, a tensor [..., in_features] of float32, bfloat16 or float16; or a `QTensor` with codes that this
                layer's recipe takes, as another layer returns them with `fp8_output=True`.
            is_first_microbatch: True quantizes the weight into a cache, False uses the cache, None (the default) does
                neither. A tensor of one element leaves the choice to the device: zero means False. Use it if several
                microbatches share a weight. A call without it takes the value of `octavo.microbatch`.
            fp8_output: return y as codes for a layer with the same recipe.

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
        if torch.compiler.is_compiling() and (why := unsupported_in_graph(self)):
            if is_inside_operator():
                self._now("_refuse", why)  # the code below is not reached: the whole operator falls back to eager
            torch._dynamo.graph_break(msg=why)  # under fullgraph=True this is the error
            return outside.call(self, why, input, is_first_microbatch, fp8_output)  # type: ignore[no-any-return]
        x = input if type(input) is QTensor else _cast(input, self)
        as_nodes = takes_nodes([self])
        parallel = self._split_over_ranks()
        if parallel is not None:
            return self._forward_in_parallel(parallel, x, is_first_microbatch, fp8_output, as_nodes)  # type: ignore[no-any-return]
        out = self._one_call(x, is_first_microbatch, fp8_output, as_nodes, NOTHING)
        return (out, self._own_part("bias")) if self.return_bias else out

    def _one_call(
        self, x: Any, is_first_microbatch: bool | Tensor | None, fp8_output: bool, as_nodes: bool, given: Given
    ) -> Any:
        """Returns y of one call of the layer's node."""
        stage = self._stage(x, is_first_microbatch, fp8_output, as_nodes, given)
        tensors = self._run_node(stage, x.anchor if type(x) is QTensor else x, as_nodes)
        if stage.after is not None:
            stage.after(tensors[1:])
        y = tensors[0]
        if type(x) is QTensor and x.anchor is None and len(x.shape) != 2:
            y = y.view(*x.shape[:-1], y.shape[-1])
        return self._quantized_output(tensors, y) if fp8_output else y

    def _stage(
        self, x: Any, is_first_microbatch: bool | Tensor | None, fp8_output: bool, as_nodes: bool,
        given: Given = NOTHING,
    ) -> Stage:  # fmt: skip
        """Returns the Stage of a call with x: a tensor, codes, or an Edge inside a run. Reads the weight once, because
        each read of a parametrized weight computes it."""
        tracing = torch.compiler.is_compiling()
        if tracing:
            self._now("_settle_with_weight")
        elif self._unplaced:
            self._settle_with_weight()
        recipe = self._recipe or self._followed(ambient.recipe)
        parallel = given.parallel
        splits_x = parallel is not None and parallel.mode == "row"
        weight, bias = self._own_parts(has_bias=not self.return_bias and not splits_x)
        if weight is None:
            check_weight("Linear", weight, "its weight")
        assert weight is not None
        settings: tuple[Any, ...] | None = None
        if not as_nodes and given is NOTHING and not fp8_output and type(x) is Tensor:
            settings = self._settings(recipe, x, weight, bias, is_first_microbatch)
            stage = None if settings is None else self._like(settings, recipe, x, weight, bias)
            if stage is not None:
                return stage
        codes = _codes_for(recipe, x) if type(x) is QTensor else ()
        check_features(x, weight)
        if bias is not None:
            check_bias(bias, weight)
        if fp8_output and recipe.linear().fprop.left is None:
            raise UnsupportedConfig(
                f"fp8_output=True quantizes y as the next layer's fprop would, and {recipe} quantizes nothing there. "
                "Leave fp8_output out, or choose a recipe with a quantized fprop."
            )
        grads = wanted(x.requires_grad, (weight,), bias)
        side = self._weight_side(recipe, (weight,), grads, is_first_microbatch, as_nodes, len(codes) > 0)
        all_reduced: Parts = ()
        more: tuple[tuple[str, Any], ...] = ()
        if parallel is not None:
            values = None if codes else x
            letters, all_reduced = agree(self, parallel, recipe, values, weight, settings_of(side), grads, as_nodes)
            more = ("x_has_columns", len(given.columns) > 0), ("all_reduced", letters)
        key = (_key if tracing else _known_key)(
            self.NAME, recipe, x.dtype, weight.dtype, None if bias is None else bias.dtype, grads, len(codes) > 0,
            bool(fp8_output), not self.keep_weight_codes, more, *side[:6],
        )  # fmt: skip
        width = weight.shape[0]
        weight = linked_anchor((weight,)) if side.weight == "held" else weight
        return Stage(
            self.NAME, key,
            (weight.detach() if side.elsewhere else weight, bias, codes, *side.inputs, given.columns, all_reduced),
            side.buffers, grads != "", width, anchored=side.elsewhere,
            after=self._after(key, given.columns or codes) if side.has_extras else None,
            settings=settings if side.weight == "plain" else None,
        )  # fmt: skip

    def _settings(
        self, recipe: Recipe, x: Tensor, weight: Tensor, bias: Tensor | None, first: bool | Tensor | None
    ) -> tuple[Any, ...] | None:
        """Returns all that decides the Stage of a call of plain tensors, but for their layout; None for a call with
        codes of the weight, with scales that are measured, or with a gradient of the weight that does not go through
        autograd."""
        codes = self._codes
        if first is not None or ambient.first is not None or codes.ambient or codes.held or self._scaling.uncalibrated:
            return None
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute or process.dry:
            return None
        return (
            self.NAME, recipe, self.training, torch.is_grad_enabled(), self.keep_weight_codes, bias is None,
            x.shape, x.requires_grad, weight.shape, weight.requires_grad,
        )  # fmt: skip

    def _like(
        self, settings: tuple[Any, ...], recipe: Recipe, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Stage | None:
        """Returns the Stage of a call that differs from an earlier one in the contents of its tensors alone: it needs
        no check that the earlier one has passed. None if there was none."""
        scaling = self._scaling
        observe = recipe.stateful and self.training and torch.is_grad_enabled()
        inverse_scales = scaling.inputs(self) if recipe.stateful else ()
        running_amaxes = scaling.running_amaxes(self) if observe else ()
        tensors = (
            [x, weight, *inverse_scales, *running_amaxes]
            if bias is None
            else [x, weight, bias, *inverse_scales, *running_amaxes]
        )
        known = like(settings, tensors)
        if known is None:
            return None
        grads = known.config.grads
        if observe:
            scaling.watch(self, weight)
        if "w" in grads:
            self._codes.trained = True
        return Stage(
            self.NAME, known.key, (weight, bias, (), (), (), inverse_scales, running_amaxes, (), ()),
            self._written(grads, observe, "", "", False), grads != "", weight.shape[0], like=(known, tensors),
        )  # fmt: skip

    def _quantized_output(self, tensors: Sequence[Tensor], anchor: Tensor) -> QTensor:
        quant = (self._recipe or self._followed(ambient.recipe)).linear()
        spec = quant.fprop.left
        assert spec is not None
        q = spec.assemble(tuple(tensors[1 : 1 + quant.parts]), tuple(anchor.shape), anchor.dtype)
        return QTensor(q.codes, q.scale, spec, q.shape, q.dtype, q.global_scale, anchor=anchor)

    # -- as an operation of a Sequential ---------------------------------------------------------------------------

    op_keywords = ("is_first_microbatch", "fp8_output")

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return isinstance(config, Config)

    def why_not_fusible(self, x: Any) -> str:
        if (parallel := self._split_over_ranks()) is not None:
            if parallel.mode == "column" and parallel.sequence:
                return SPLIT
            recipe = self._recipe or self._followed(ambient.recipe)
            if parallel.mode == "row" and scales_whole(recipe.linear().fprop.left):
                if not recipe.stateful or "x" in self._scaling.uncalibrated:
                    return SPLIT  # the ranks agree on x's amax before it is cast
        if self.return_bias:
            return "return_bias=True hands its bias to the caller"
        if torch.compiler.is_compiling():
            if self.delay_wgrad_compute:
                return "its dW is deferred, and in a graph that takes a node of its own"
            if unsupported_in_graph(self):
                return "it does not compile"
        return ""

    def op_call(self, x: Any, extras: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(x, QTensor):
            recipe = self._recipe or self._followed(ambient.recipe)
            if x.spec != recipe.linear().fprop.left:
                x = x.dequantize()  # codes of another quantizer: this layer quantizes their values again
        return self(x, **kwargs)

    def op_stage(self, x: Any, extras: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        if kwargs.get("fp8_output"):
            raise UnsupportedConfig(
                "fp8_output=True is for a Linear that is called by itself: in a Sequential, operations that run "
                "together pass codes to each other. Leave it out."
            )
        check_input("Linear", x, owner=self)
        parallel = self._split_over_ranks()
        if parallel is None:
            return self._stage(x, kwargs.get("is_first_microbatch"), False, as_nodes)
        if parallel.mode == "row" and parallel.sequence and has_shape(x):
            check_rows(x, self._name_for_collectives())
            collectives.check_divides(x.shape, parallel.size(), self._name_for_collectives())
        if has_shape(x):
            weight = self._own_part("weight")
            assert weight is not None
            check_features(x, weight)
            recipe = self._recipe or self._followed(ambient.recipe)
            check_ranks(self, parallel, recipe, x, weight, self._own_part("bias"))
        return self._stage(x, kwargs.get("is_first_microbatch"), False, as_nodes, Given(parallel))

    # -- state dicts -----------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._codes.held:
            destination[prefix + "weight"] = self._codes.values(self)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        refuse_codes(self, ["weight"], state_dict, prefix)
        key = prefix + "weight"
        loaded = state_dict.get(key)
        if not self._codes.held or loaded is None or loaded.shape != self.weight.shape:
            super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]
            return
        self._codes.load(self, [loaded], assign=rest[0].get("assign_to_params_buffers", False))
        # nn.Linear's own loading then finds the weight already loaded
        super()._load_from_state_dict({**state_dict, key: self.weight.detach()}, prefix, *rest)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        recipe = "from octavo.autocast" if self._recipe is None else self._recipe.key
        told = f"{super().extra_repr()}, recipe={recipe}" + (", weight that is codes" if self._codes.held else "")
        return told if self.parallel is None else f"{told}, {self.parallel.shown()}"


def _key(
    name: str, recipe: Recipe, dtype: torch.dtype, weight_dtype: torch.dtype, bias_dtype: torch.dtype | None,
    grads: str, has_codes: bool, fp8_output: bool, recompute: bool, more: tuple[tuple[str, Any], ...],
    weight: str, observe: bool, measured: str, main_grad: str, dummy_grad: bool, deferred_wgrad: str,
) -> str:  # fmt: skip
    """Returns the string of a call's config. The arguments are positional, because the cache below is faster with
    these."""
    return call_key(
        name, recipe, dtype=DTYPE_NAMES[dtype], weight_dtype=DTYPE_NAMES[weight_dtype],
        bias_dtype="" if bias_dtype is None else DTYPE_NAMES[bias_dtype], grads=grads,
        x="codes" if has_codes else "plain", quantize_output=fp8_output, recompute_w_columns=recompute, weight=weight,
        observe=observe, measured=measured, main_grad=main_grad, dummy_grad=dummy_grad, deferred_wgrad=deferred_wgrad,
        **dict(more),
    )  # fmt: skip


_known_key = lru_cache(maxsize=4096)(_key)  # for calls that no compiler traces


def _cast(x: Any, layer: nn.Module) -> Tensor:
    """Returns x, cast to the dtype of torch.autocast where that is enabled."""
    x = x if type(x) is Tensor else arrived(x)
    check_input("Linear", x, owner=layer)
    if torch.compiler.is_compiling() or is_any_autocast_enabled():
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
    cast: Tensor = x
    return cast


def _codes_for(recipe: Recipe, x: QTensor) -> Parts:
    """Returns the tensors of a quantized x; raises if this layer's fprop takes other codes."""
    spec = recipe.linear().fprop.left
    if x.spec != spec:
        raise UnsupportedConfig(
            f"This layer's fprop takes codes of {spec} ({recipe}), and the input was quantized by {x.spec}. "
            "Use one recipe for both layers, or pass x.dequantize()."
        )
    return tuple(x.tensors())
