"""`octavo.GroupedLinear`: one linear layer for each group of rows, such as the tokens of each expert."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo._torch.fakes import FakeTensor
from octavo._torch.tracing import is_inside_operator
from octavo.communication.groups import Group, name_of
from octavo.communication.rank_checks import number_layer
from octavo.communication.tensor_parallel import (
    SPLIT,
    check_blocks,
    groups_of_rank,
    local_sizes,
    mark_blocks,
    parallel_of,
)
from octavo.errors import (
    UnsupportedConfig,
    UnsupportedDtype,
    UnsupportedShape,
    check_choice,
    check_whole,
    is_whole,
)
from octavo.foreign_keywords import refused
from octavo.kernels import grouped_gemm
from octavo.ops.grouped_inputs import bias_of_rows, bias_scales, codes_of, splits_on
from octavo.ops.grouped_linear_layer import layer
from octavo.ops.grouped_memory import CallersMemory
from octavo.ops.grouped_parameters import convert_layout, draw, join, joined, register, stacked
from octavo.ops.inputs import autocast_input, check_features, check_input, check_weight
from octavo.ops.operands import NO_X_CODES, XCodes
from octavo.ops.operation import has_shape
from octavo.ops.published_codes import refuse_codes
from octavo.ops.quantized import outside, wanted
from octavo.ops.split_layer import SplitLayer
from octavo.quant.gradient_codes import GradientCodes
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import MAX_GROUPS
from octavo.quant.quantizer import Quantizer
from octavo.quant.scale_blocks import are_transposed
from octavo.recipes import LinearQuant, Recipe
from octavo.recipes.ambient import ambient
from octavo.runtime import call_cache
from octavo.runtime.call import Stage, takes_nodes
from octavo.runtime.call_cache import Lookup
from octavo.runtime.contract import DTYPE_NAMES
from octavo.weights.quantized_weight import QuantizedWeight
from octavo.weights.unsupported_wgrad import unsupported_in_graph


class GroupedLinear(SplitLayer):
    """One linear layer for each group of rows: y[g] = x[g] · W[g]ᵀ + b[g]. Experts of a mixture are the usual groups.

    The caller packs the rows of all groups in one tensor, one group after the other, and passes the number of rows of
    each group in a tensor on the device. The host never reads these sizes, so a CUDA graph follows sizes that change.
    Each group is quantized as if it were alone. Rows after the last group are the tail: the layer does not read them.

    Args:
        num_groups: the number of groups, 1 to 4096.
        in_features: the size of the last dim of x.
        out_features: the size of the last dim of y.
        bias: whether each group has a bias.
        recipe: how the layer quantizes: a name such as "fp8-block", a canonical string or a `Recipe`. With None the
            layer follows `octavo.autocast`, and runs unquantized outside of it.
        device: the device of the parameters.
        dtype: the dtype of the parameters: float32, bfloat16 or float16.
        single_grouped_weight: one parameter `weight` [groups, out, in]. With False there is one for each group:
            `weight0`, `weight1`, ... [out, in], for checkpoints and optimizers that expect one for each expert.
        single_grouped_bias: one parameter `bias` [groups, out]. With False: `bias0`, `bias1`, ... [out].
        scale_bias: multiply the bias of each row by a number, `scales` of forward, before it is added.
        return_bias: return `(y without the bias, bias)`, for a caller that adds the bias of each row's group elsewhere.
            The bias is the parameter, or a list of them with `single_grouped_bias=False`; None without one.
        delay_wgrad_compute: leave the weight gradient out of backward. `backward_dw()` computes it later.
        fuse_wgrad_accumulation: add the weight gradient to `weight.main_grad` in place, as in `octavo.Linear`.
        tail: rows of y and dx after the last group: "zero" writes zeros, "untouched" leaves any values there, which
            saves the write.
        keep_weight_codes: whether forward keeps the weights' column codes for backward, one byte for each weight. With
            False backward makes them again: from the weights, or where a scale covers a weight or 128 x 128 blocks by
            transposing cached row codes, so that a cache holds row codes alone. More time, less memory. None, the
            default, is as in `octavo.Linear`.
        save_original_input: keep x itself for backward, as in `octavo.Linear`.
        strict: raise if torch.compile cannot take the layer with these settings. With False the layer warns and runs
            outside of the graph.
        parallel_mode: how the weights are split over the ranks of `tp_group`: "column" gives each rank a part of the
            output features of every group, "row" a part of the input features and of x's. The sizes above are those of
            the whole layer. All ranks have the same rows and groups; y of a row layer and dx of a column layer are
            summed over ranks.
        tp_group: the ranks: a ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim). None is the default
            group.
        column_blocks: in a column layer, the number of equal blocks of output features that are split each by itself:
            2 before a gated activation.
        ep_group: the ranks over which the groups are split, equally many on each, rank 0 the first ones: a
            ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim). `num_groups` above is that of the whole
            layer; the result's, and `m_splits`, are of this rank. The layer sends nothing: what moves rows to their
            ranks does. None, the default, has all groups here.

    Raises:
        UnsupportedShape: `num_groups` is out of range, or the ranks do not divide the features.
        UnsupportedConfig: `tail` or the recipe is unknown, or a number of features
            is none from 0 up.

    Example:
        >>> layer = octavo.GroupedLinear(3, 64, 32, recipe="fp8-block")
        >>> layer.weight.shape
        torch.Size([3, 32, 64])
        >>> y = layer(torch.ones(10, 64), torch.tensor([4, 0, 5]))
        >>> y.shape, y[9:].count_nonzero().item()
        (torch.Size([10, 32]), 0)
    """

    LAYER: ClassVar[Any] = layer
    NAME: ClassVar[str] = "grouped-linear"
    TITLE: ClassVar[str] = "GroupedLinear"
    splits_rows = False
    ep_group: str | None = None  # the ranks that have the other groups
    return_bias = False

    @refused
    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | Recipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        single_grouped_weight: bool = True,
        single_grouped_bias: bool = True,
        scale_bias: bool = False,
        return_bias: bool = False,
        delay_wgrad_compute: bool = False,
        fuse_wgrad_accumulation: bool | str = False,
        tail: str = "zero",
        keep_weight_codes: bool | None = None,
        save_original_input: bool = False,
        strict: bool = True,
        parallel_mode: str | None = None,
        tp_group: Group = None,
        column_blocks: int = 1,
        ep_group: Group = None,
    ) -> None:
        super().__init__()
        check_whole(in_features, what="in_features", least=0)
        check_whole(out_features, what="out_features", least=0)
        self.parallel = parallel_of("GroupedLinear", parallel_mode, False, tp_group, False, column_blocks)
        in_features, out_features = local_sizes("GroupedLinear", self.parallel, in_features, out_features)
        check_choice(tail, ("zero", "untouched"), what="GroupedLinear.tail")
        if not is_whole(num_groups) or not 1 <= num_groups <= MAX_GROUPS:
            raise UnsupportedShape(f"A GroupedLinear has 1 to {MAX_GROUPS} groups, got {num_groups!r}.")
        self.ep_group = None if ep_group is None else name_of(ep_group)
        self._own_groups = range(num_groups) if self.ep_group is None else groups_of_rank(self.ep_group, num_groups)
        self._all_groups, num_groups = num_groups, len(self._own_groups)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.scales_per_operand = num_groups
        if return_bias and scale_bias:
            raise UnsupportedConfig(
                "GroupedLinear(return_bias=True, scale_bias=True) adds no bias that it could scale. Leave one of them "
                "out."
            )
        self.tail, self.scale_bias, self.return_bias = tail, scale_bias, return_bias
        self.keep_weight_codes = keep_weight_codes is None or keep_weight_codes
        self._codes_chosen = keep_weight_codes is not None
        self.save_original_input = save_original_input
        self._weight_names = register(
            self, "weight", torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype),
            single_grouped_weight,
        )  # fmt: skip
        self._bias_names: list[str] = []
        if bias:
            whole = torch.empty(num_groups, out_features, device=device, dtype=dtype)
            self._bias_names = register(self, "bias", whole, single_grouped_bias)
        elif single_grouped_bias:
            self.register_parameter("bias", None)
        self.reset_parameters()
        self._set_up(recipe, fuse_wgrad_accumulation, delay_wgrad_compute, strict)
        number_layer(self)

    def reset_parameters(self) -> None:
        """Initialise the parameters of each group as nn.Linear does, and derive the seed of stochastic rounding anew.
        A part of a weight is that of the whole weight: seed all ranks alike.

        Example:
            >>> layer = octavo.GroupedLinear(2, 16, 8)
            >>> layer.reset_parameters()
            >>> bool((layer.weight.abs() <= 16**-0.5).all())
            True
        """
        parallel = self._split_over_ranks()
        for names in (self._weight_names, self._bias_names):
            own = [getattr(self, name) for name in names]
            own = list(own[0]) if len(own) == 1 and names[0] in ("weight", "bias") else own
            draw(own, self._own_groups, self._all_groups, self.in_features, parallel)
        self._reset_seed()

    def _scales_of_all_ranks(self) -> tuple[int, int]:
        return (0, self.num_groups) if self.ep_group is None else (self._own_groups.start, self._all_groups)

    # -- parameters, one or many -----------------------------------------------------------------------------------

    def _names_of_weights(self) -> list[str]:
        return self._weight_names

    def _sizes(self) -> tuple[int, ...]:
        return self.num_groups, self.in_features, self.out_features

    def _whole_weight(self) -> Tensor:
        own = self._weight_parts()
        first: Any = own[0]
        if self._is_single:
            return first
        if isinstance(first, QuantizedWeight):
            return first.whole()
        whole = None if torch.compiler.is_compiling() else joined(own)
        return torch.stack(list(own)) if whole is None else whole

    @property
    def _is_single(self) -> bool:
        return self._weight_names[0] == "weight"

    def _stacked_bias(self) -> Tensor | None:
        if not self._bias_names:
            return None
        parts: list[Tensor] = [getattr(self, name) for name in self._bias_names]
        if type(parts[0]) is not nn.Parameter:
            check_weight("GroupedLinear", parts[0], "its bias")
        return parts[0] if self._bias_names[0] == "bias" else torch.stack(parts)

    def _caches_columns(self, quant: LinearQuant) -> bool:
        return self.keep_weight_codes or not are_transposed(quant.fprop.right, quant.dgrad.right)

    def _gemm_route(self, left: Quantizer | None, right: Quantizer | None, device: torch.device) -> str:
        return grouped_gemm.route(left, right, device)

    # -- as an operation of a Sequential ---------------------------------------------------------------------------

    op_keywords = ("is_first_microbatch", "out", "dgrad_out")
    op_memory = ("dgrad_out", "out")
    scales_dy_alone: bool = False  # dy has a history of amaxes only in a fused operation, which takes another dy
    op_needs_shape = True
    op_has_groups = True

    @property
    def num_extra_inputs(self) -> int:  # type: ignore[override]
        """Count the extra inputs: the sizes of the groups, and the scales of the bias if there are any."""
        return 2 if self.scale_bias and self._bias_names else 1

    def why_not_fusible(self, x: Any) -> str:
        if self.return_bias:
            return "return_bias=True hands its bias to the caller"
        if self.parallel is not None and self.op_ends_run() and (self._bias_names or self._agrees_on_x()):
            return SPLIT  # the bias of each row's group is added after the sum
        if x.dim() != 2:
            return "x has other than two dims, and a run of grouped layers takes rows"
        return self._why_alone_in_graph() if torch.compiler.is_compiling() else ""

    def op_call(self, x: Any, extra_inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        splits, *scales = extra_inputs
        return self(x, splits, scales=scales[0] if scales else None, **kwargs)

    def op_refuses_memory(self, kwargs: dict[str, Any]) -> str:
        return CallersMemory(kwargs.get("out"), kwargs.get("dgrad_out")).unsupported_reason(self)

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        if torch.compiler.is_compiling() or self._unplaced:
            self._materialize_for_call()
        weights = self._weight_parts()
        check_input("GroupedLinear", x, owner=self)
        check_features(x, weights[0], "GroupedLinear", dims=2)
        splits = splits_on(weights[0].device, extra_inputs[0], self.num_groups, x.shape[0])
        scales = bias_scales(extra_inputs[1] if len(extra_inputs) > 1 else None, x, self.num_extra_inputs == 2)
        buffers = CallersMemory(kwargs.get("out"), kwargs.get("dgrad_out"))
        if self.parallel is not None and has_shape(x):
            self._check_parallel(x, weights[0])
        return self._stage(x, weights, splits, scales, buffers, kwargs.get("is_first_microbatch"), as_nodes)

    def _call_lookup(self, needs_dx: bool, extra_inputs: tuple[Any, ...]) -> Lookup | None:
        sizes_alone = len(extra_inputs) == 1 and type(extra_inputs[0]) is Tensor
        if self.return_bias or not sizes_alone or not self._is_single or len(self._bias_names) > 1:
            return None
        weight, bias = self._own_parts(has_bias=len(self._bias_names) > 0)
        if type(weight) is not nn.Parameter or self._bias_names not in ([], ["bias"]):
            return None
        lookup = self._lookup(needs_dx, weight, bias, extra_inputs, self.tail, self.scales_dy_alone)
        return None if lookup is None else lookup._replace(buffers=(*lookup.buffers, None, None))

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(
        self,
        input: Tensor | GroupedTensor,
        m_splits: Tensor | list[int] | None = None,
        is_first_microbatch: bool | Tensor | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        scales: Tensor | None = None,
        dy_codes: GradientCodes | None = None,
    ) -> "Tensor | tuple[Tensor, Tensor | list[Tensor] | None]":
        """Multiply each group of rows by its own weight.

        `out` and `dgrad_out` let the caller provide memory. The layer writes y and dx there without a copy, and leaves
        the tail of the buffers as it is. The returned tensor shares the memory of `out` and is part of autograd's
        graph: for the next step pass the buffer again, not the returned tensor. `dgrad_out` holds the whole gradient
        only if x is used nowhere else.

        Args:
            input: x [..., in_features], whose leading dims are flattened to rows; or a `GroupedTensor` of rows. The
                layer multiplies codes of its recipe's fprop as they are. For dw it uses columns that come with them;
                it transposes row codes if one scale covers a group; it casts the values of other row codes in
                backward. Codes of another quantizer are dequantized first.
            m_splits: the number of rows of each group, int32 or int64 on the device of the layer. A list, or a tensor
                on another device, is copied there, except in a graph, where it raises. A GroupedTensor has its own
                sizes: leave them out, or pass the same.
            is_first_microbatch: True quantizes the weight into a cache, False uses the cache, None (the default) does
                neither. A tensor of one element leaves the choice to the device: zero means False. A call without it
                takes the value of `octavo.microbatch`.
            out: a buffer [rows, out_features] for y: contiguous, in the dtype of x, without requires_grad.
            dgrad_out: a buffer [rows, in_features] for dx, with the same properties.
            scales: a number for each row, which multiplies its bias. Required if the layer has `scale_bias=True` and a
                bias, and refused otherwise.
            dy_codes: where the operation after the layer may put the codes of y's gradient, which backward then uses
                instead of casting: see `octavo.quant.GradientCodes`. If that is left empty, backward casts dy.

        Returns:
            y [..., out_features], in the dtype of x or of torch.autocast where that is on. With `return_bias=True` it
            is a tuple of y without the bias, and the bias.

        Raises:
            UnsupportedShape: x, `m_splits`, `scales` or a buffer has the wrong shape.
            UnsupportedDtype: x, `m_splits` or the weight has the wrong dtype.
            UnsupportedDevice: x and the weight are on two devices.
            UnsupportedConfig: `scales` or `dgrad_out` does not fit this call, the cache of the weight is out of date,
                or a graph cannot hold `m_splits`, a buffer or `dy_codes`.

        Example:
            >>> layer = octavo.GroupedLinear(2, 16, 8, single_grouped_weight=False)
            >>> out = torch.empty(6, 8)
            >>> y = layer(torch.ones(6, 16), torch.tensor([2, 4]), out=out)
            >>> y.data_ptr() == out.data_ptr()
            True
        """
        buffers = CallersMemory(out, dgrad_out, dy_codes)
        if torch.compiler.is_compiling() and (why := unsupported_in_graph(self) or buffers.unsupported_reason(self)):
            if is_inside_operator():
                self._now("_refuse", why)
            torch._dynamo.graph_break(msg=why)  # under fullgraph=True this is the error
            return outside.call(self, why, input, m_splits, is_first_microbatch, out, dgrad_out, scales, dy_codes)
        settings, plain = None, type(input) is Tensor and type(m_splits) is Tensor and input.dim() == 2
        alone = all([t is None for t in (is_first_microbatch, out, dgrad_out, scales, dy_codes)])
        if plain and alone and not torch.compiler.is_compiling() and input.device.type in call_cache.DEVICES:
            input = autocast_input("GroupedLinear", input, self)
            settings, hit = self._looked_up(input, m_splits)  # type: ignore[arg-type]
            if hit is not None:
                return hit
        made = self._forward(input, m_splits, is_first_microbatch, buffers, scales, settings)
        return (made, self._bias_of_caller()) if self.return_bias else made

    def _bias_of_caller(self) -> "Tensor | list[Tensor] | None":
        """Return the bias for a caller that adds it."""
        own: list[Tensor] = [getattr(self, name) for name in self._bias_names]
        return own[0] if self._bias_names == ["bias"] else own or None

    def _forward(
        self, input: Any, m_splits: Any, is_first_microbatch: Any, buffers: CallersMemory, scales: Any,
        settings: tuple[Any, ...] | None,
    ) -> Tensor:  # fmt: skip
        """Return y of a call that the call cache does not have; `settings` are those by which it looked."""
        if torch.compiler.is_compiling() or self._unplaced:
            self._materialize_for_call()
        weights = self._weight_parts()  # read once: each read of a parametrized weight computes it
        codes, dy_codes = NO_X_CODES, buffers.dy_codes
        if isinstance(input, GroupedTensor):
            quant = (self._recipe or self._followed(ambient.recipe)).linear()
            input, m_splits, codes = codes_of(input, m_splits, self.num_groups, weights[0], quant)
        x = autocast_input("GroupedLinear", input, self)
        check_features(x, weights[0], "GroupedLinear", dims=2)
        rows, shape = x.flatten(0, -2), (*x.shape[:-1], self.out_features)
        splits = splits_on(weights[0].device, m_splits, self.num_groups, rows.shape[0])
        scales = bias_scales(scales, rows, self.num_extra_inputs == 2)
        parallel = None if self.parallel is None else self._split_over_ranks()
        if parallel is not None:
            buffers.check_split(self, parallel)
            check_blocks(self, input)
            self._check_parallel(rows, weights[0])
            rows = self.op_begin(rows)
        # fake and meta tensors have shapes only
        shapes_only = isinstance(rows, FakeTensor) or rows.is_meta
        as_nodes = shapes_only or (dy_codes is None and takes_nodes((self,)))
        if dy_codes is not None and not isinstance(dy_codes, GradientCodes):
            got = dy_codes.__name__ if isinstance(dy_codes, type) else type(dy_codes).__name__
            raise UnsupportedDtype(f"dy_codes is an octavo.quant.GradientCodes(), got {got}. Make one for this call.")
        if shapes_only:
            buffers = buffers._replace(dy_codes=None)
        own = None if parallel is not None and parallel.mode == "row" else scales  # a row layer adds its bias later
        stage = self._stage(rows, weights, splits, own, buffers, is_first_microbatch, as_nodes, codes, settings)
        y = self._run_node(stage, rows, as_nodes, shape)[0]
        if parallel is not None and parallel.mode == "row":
            y = self.op_finish(y if y.dim() == 2 else y.flatten(0, -2))
            if not self.return_bias and (bias := self._stacked_bias()) is not None:
                y = (y + bias_of_rows(bias, splits, scales, y)).to(y.dtype)
        y = y if y.dim() == len(shape) else y.view(shape)
        if parallel is not None and parallel.mode == "column":
            mark_blocks(y, parallel)
        return y

    def _check_parallel(self, rows: Any, weight: Tensor) -> None:
        """Raise if other ranks call the layer in another way."""
        if (parallel := self._split_over_ranks()) is not None:
            bias = getattr(self, self._bias_names[0]) if self._bias_names else None
            self._check_ranks(parallel, rows, weight, bias)

    def _stage(
        self, x: Tensor, weights: Sequence[Any], splits: Tensor, scales: Tensor | None, buffers: CallersMemory,
        is_first_microbatch: bool | Tensor | None, as_nodes: bool, codes: XCodes = NO_X_CODES,
        settings: tuple[Any, ...] | None = None,
    ) -> Stage:  # fmt: skip
        """Return the Stage of a call with the rows of x, or with an anchor and its codes."""
        recipe = self._recipe or self._followed(ambient.recipe)
        parallel = None if self.parallel is None else self._split_over_ranks()
        splits_x = parallel is not None and parallel.mode == "row"
        weights = self._operands(recipe, weights)
        weight, bias = stacked(weights), None if splits_x or self.return_bias else self._stacked_bias()
        grads = wanted(x.requires_grad, weights, bias, scales)
        if buffers.out is not None or buffers.dgrad_out is not None:
            buffers.check(self, x, grads.dx)
        side = self._weight_side(recipe, weights, grads, is_first_microbatch, as_nodes, len(codes.row) > 0)
        more: dict[str, Any] = {"tail": self.tail, "scales_dy_alone": self.scales_dy_alone}
        if scales is not None:
            more["scales_dtype"] = DTYPE_NAMES[scales.dtype]
        if buffers.dgrad_out is not None:
            more["dgrad_out"] = True
        key, all_reduced = self._config_key(
            recipe, x, weight, bias, grads, side, codes, parallel, as_nodes, splits, **more
        )
        plain = not (as_nodes or self._is_single or side.weight == "quantized")
        is_joined = plain and weight.data_ptr() == weights[0].data_ptr()
        unchanged = weights if is_joined and self.LAYER.config(key).kept_w in ("plain", "again") else ()
        weight = weight.detach() if side.bypasses_autograd else weight
        after = partial(self._wgrad.enqueue, self, key, codes.column or codes.row)
        return Stage(
            self.NAME, key, (weight, bias, splits, scales, None, *side.inputs, *codes, all_reduced),
            (*side.buffers, buffers.dgrad_out, buffers.dy_codes), any(grads), self.out_features,
            writes_in_backward=side.bypasses_autograd, unchanged=unchanged, out=buffers.out,
            after=after if side.deferred_wgrad == "buffers" else None, settings=settings,
        )  # fmt: skip

    # -- as a module -----------------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> "GroupedLinear":
        was_joined = self._is_single or joined(self._weight_parts()) is not None or self._weight_parts()[0].is_meta
        super()._apply(fn, recurse)
        if was_joined:
            self._join()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self._is_single:  # its parameters were copied one by one
            self._join()

    def _join(self) -> None:
        """Move the weights of all groups into one allocation, which the layer takes without a copy."""
        if not self._is_single and not self._codes.has_quantized_weight:
            join(self._weight_parts())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Load either layout, one parameter for all groups or one for each, from a checkpoint of either."""
        refuse_codes(self, ["weight", *(f"weight{i}" for i in range(self.num_groups))], state_dict, prefix)
        state, strict = dict(state_dict), rest[1]
        for kind, names in (("weight", self._weight_names), ("bias", self._bias_names)):
            if names:
                why = convert_layout(state, prefix + kind, self.num_groups, single=names[0] == kind)
                if why and strict:
                    rest[-1].append(why)  # load_state_dict raises it with its other errors
        super()._load_from_state_dict(state, prefix, *rest)
        self._join()  # assigned parameters keep the checkpoint's memory

    def extra_repr(self) -> str:
        sizes = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        layout = "" if self._is_single else ", a weight for each group"
        return (
            f"{sizes}, bias={bool(self._bias_names)}, {self._repr_of_recipe()}, tail={self.tail}{layout}"
            f"{self._repr_of_weight()}"
        )
