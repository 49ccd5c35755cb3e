"""The linear layer of many experts: rows of x come in ragged groups, and each group has a weight of its own.

    y[g] = x[g] · w[g]ᵀ + bias[g]        dx[g] = dy[g] · w[g]        dw[g] = dy[g]ᵀ · x[g]

The groups' sizes are on the device, in `splits`, and are never read back: shapes follow from x, whose rows after the
last group are a tail that nothing reads. Each group is quantized as if it were alone; so are the weights, as groups of
equal size. Backward keeps the column codes of x and of w; an operand of a GEMM in high precision is kept as it is. A
bias may be scaled, token by token: y[t] = x[t] · w[g]ᵀ + bias[g] * scales[t].
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo.communication.all_reduced_amaxes import all_reduced_amaxes, all_reduced_cast, number_of
from octavo.errors import UnsupportedShape
from octavo.kernels import grouped_gemm
from octavo.memory import overlap, refuse_dgrad_out, refuse_shared_memory
from octavo.ops.linear_config import LinearSettings
from octavo.ops.matmul import (
    Backward,
    Kept,
    MatmulLayer,
    SavedOperands,
    abstract_deferred_auxiliary,
    deferred_auxiliary,
    saved_operands,
    saved_scaling,
    weight_cast_args,
)
from octavo.quant.casts import in_order
from octavo.quant.gradient_codes import GradientCodes
from octavo.quant.grouped import (
    GroupedTensor,
    fill_groups,
    grouped_assemble,
    grouped_proto,
    groups_amax,
    quantize_groups,
    scale_strides,
    transposed,
)
from octavo.quant.groups import BLOCK, Groups, equal, split
from octavo.quant.groups import abstract as abstract_groups
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts, QProto, QTensor
from octavo.quant.quantizer import CastArgs, Quantizer, QuantizerPair
from octavo.quant.scale_blocks import is_square
from octavo.quant.tensorwise import Tensorwise
from octavo.recipes import LinearQuant, Recipe
from octavo.runtime.contract import DTYPES, ForwardResult, Tensors, WeightCast
from octavo.runtime.deferred_wgrad import abstract_dy_buffers
from octavo.runtime.gradient_targets import LazyTarget, Mail, Target, Writes
from octavo.scaling.cast_arguments import RunningAmaxes, cast_args, known_scale
from octavo.values import register

ALIGNED = 16  # columns of codes, for the GEMM's copies; missing ones are zeros
Operand = Tensor | GroupedTensor


class Operands(NamedTuple):
    """The operands of dw."""

    dy: Operand
    x: Operand
    groups: Groups  # where a plain one is packed
    shape: tuple[int, ...]  # of dw: [G, N, K]


@register("grouped-linear")
class Config(LinearSettings):
    """The settings of a call: with its tensors, they decide what it does."""

    x: str = "plain"  # or "codes" of fprop's quantizer, in groups; x itself is then a token
    x_has_columns: bool = False  # these codes come with the columns that dw needs
    scales_dtype: str = ""  # of the bias' scales; empty: the bias is added as it is
    dgrad_out: bool = False  # dx goes to a buffer of the caller's
    scales_dy_alone: bool = False  # by its own amax, not observed: a fused operation, and its history, has another dy
    tail: str = "zero"  # rows of y and dx after the last group are zeros; or "untouched": whatever is there

    @cached_property
    def kept_x(self) -> str:
        if "w" not in self.grads:
            return ""
        if self.x == "codes":
            return "column" if self.x_has_columns and self.quant.wgrad.left is not None else "row"
        if self.quant.wgrad.left is None:
            return "plain"
        return "" if self.x_columns == "backward" else "column"

    @cached_property
    def kept_w(self) -> str:
        """The form in which backward needs w; "row" where only row codes hold its values, "turned" where backward turns
        cached row codes around."""
        if "x" not in self.grads:
            return ""
        if self.quant.dgrad.left is not None:
            if self.makes_w_again:
                return "again"
            return "turned" if self.weight == "codes" and self.recompute_w_columns and turns(self.quant) else "column"
        return "row" if self.weight == "held" else "plain"

    @cached_property
    def casts_x(self) -> bool:
        return self.x == "plain" and super().casts_x

    @cached_property
    def x_pair(self) -> QuantizerPair:
        return (None, None) if self.x == "codes" else super().x_pair

    @cached_property
    def dy_pair(self) -> QuantizerPair:
        return (
            self.quant.dgrad.left if "x" in self.grads else None,
            self.quant.wgrad.left if "w" in self.grads else None,
        )

    @cached_property
    def group_tensors(self) -> int:
        return len(Groups._fields) - 1  # all but the number of rows


def turns(quant: LinearQuant) -> bool:
    """Whether the weight's column codes are its row codes transposed, byte for byte: one quantizer with square
    blocks, and no rotation along the contraction."""
    return _are_turned(quant.fprop.right, quant.dgrad.right)


def _are_turned(row: Quantizer | None, column: Quantizer | None) -> bool:
    return row is not None and row == column and is_square(row.block) and row.basis == ""


def unsupported_reason(recipe: Recipe) -> str:
    """The reason why the layer cannot run in a recipe; empty if it can."""
    quant = recipe.linear()
    if any(gemm.mode == "dequantized" for gemm in (quant.fprop, quant.dgrad, quant.wgrad)):
        return "a backward on dequantized codes has no grouped kernels (backward='quantized' has)"
    return ""


class Inputs(NamedTuple):
    """The tensors of a call."""

    x: Tensor  # [rows, K]; for codes, a token of that shape, which carries their gradient if they have one
    weight: Tensor  # [G, N, K]; for a quantized weight, the gradient anchor that receives its gradient
    bias: Tensor | None  # [G, N]
    splits: Tensor  # [G] int32 or int64
    scales: Tensor | None = None  # [rows], of the bias
    out: Tensor | None = None  # [rows, N], the caller's: y is written there, and its tail is left alone
    w_row: Parts = ()  # of a weight given as codes
    w_column: Parts = ()
    scaling: Parts = ()  # delayed: inverse scales [G] of x, w, dy; if one is measured also their amax counts
    running_amaxes: Parts = ()  # delayed, in training: running amaxes [G] of x and w
    x_codes: Parts = ()  # of x given as codes: those of its rows ...
    x_column_codes: Parts = ()  # ... and of its columns, if there are any
    all_reduced: Parts = ()  # all-reduced amaxes [G], as bits: row's and column's, of x and of w


class Buffers(NamedTuple):
    """Tensors that backward writes to besides its results, and where dy may come from."""

    main_grad: Target | LazyTarget | None = None
    amax: Tensor | None = None  # [G]: the amaxes of dy, folded by maximum
    seed: Tensor | None = None  # [2] int64: seed and step of stochastic rounding; the step advances
    mail: Mail | None = None
    dgrad_out: Tensor | None = None  # [rows, K], the caller's: dx is written there, and its tail is left alone
    dy_codes: GradientCodes | None = None  # dy may arrive there


class Intermediates(NamedTuple):
    """Column codes of x and w, and where the groups are."""

    x_codes: Any
    x_scale: Any
    x_global_scale: Any
    start: Any  # these five as of octavo.quant.groups.Groups
    block: Any
    owner: Any
    source: Any
    live: Any
    w_codes: Any
    w_scale: Any
    w_global_scale: Any
    width: Any  # [0, K], for its shape alone


class SavedTensors(NamedTuple):
    """x as dw needs it, w as dx needs it (column codes, or one plain tensor in their place), where the groups are, and
    the arguments of casts in backward."""

    x_codes: Tensor | None
    x_scale: Tensor | None
    x_global_scale: Tensor | None
    w_codes: Tensor | None
    w_scale: Tensor | None
    w_global_scale: Tensor | None
    width: Tensor  # [0, K], for its shape alone
    bias: Tensor | None
    scales: Tensor | None
    dy_inverse_scale: (
        Tensor | None
    )  # delayed: dy's inverse scales, and how many amaxes they have seen if they are measured
    dy_amax_count: Tensor | None
    x_inverse_scale: Tensor | None  # delayed inverse scales of x's and w's columns, if those are made in backward
    w_inverse_scale: Tensor | None
    w_amax: Tensor | None  # as bits, if ranks have agreed on it and w's columns are made in backward
    start: Tensor  # these five as of octavo.quant.groups.Groups
    block: Tensor
    owner: Tensor
    source: Tensor
    live: Tensor
    dy_buffer: Tensor | None = None  # for a deferred dw in a graph: dy itself, or its codes and the rest
    dy_buffer_1: Tensor | None = None
    dy_buffer_2: Tensor | None = None
    dy_buffer_3: Tensor | None = None


class Saved(SavedTensors, SavedOperands):
    """The tensors that backward needs."""

    __slots__ = ()

    def groups(self, rows: int) -> Groups:
        return Groups(self.start, self.block, self.owner, self.source, self.live, rows)


class GroupedLinearLayer(MatmulLayer):
    """Computes x[g] · w[g]ᵀ + bias[g]."""

    def out_place(self, config: Config) -> int:
        return Inputs._fields.index("out")

    def returned_elsewhere(self, config: Config) -> dict[int, int]:
        return {0: Buffers._fields.index("dgrad_out")} if config.dgrad_out else {}

    def decided_by_layout(self, config: Config, side: str) -> bool:
        """Whether the layout decides all launches. Those of backward also depend on whether the caller's buffers
        overlap others, or are adjacent."""
        return config.shipped and (side == "forward" or not (config.dgrad_out or config.main_grad))

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        groups = split(inputs.splits, inputs.x.shape[0])
        amaxes = RunningAmaxes(*inputs.running_amaxes)
        if config.x == "codes":
            codes: tuple[GroupedTensor | None, GroupedTensor | None]
            codes = given_rows(config.quant.fprop.left, inputs.x_codes, groups, inputs.x.shape[1], config.y_dtype), None
        else:
            codes = quantized_x(config, inputs, inputs.x, groups, amaxes.x)
        return forward_from(config, inputs, codes, groups, amaxes)

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        x: Any = inputs.x
        weight: Any = inputs.weight
        number, n, k = weight.shape
        y = TensorProto((x.shape[0], n), config.y_dtype, x.device)
        groups = abstract_groups(x.shape[0], number, x.device)
        padded = groups[2].shape[0] * BLOCK
        auxiliary: tuple[TensorProto, ...] = ()
        if config.dy_buffers:
            buffers = _abstract_dy_buffers(config, y, padded, number)
            auxiliary = (*auxiliary, *abstract_deferred_auxiliary(config, x, buffers))
        x_kept, w_kept = Kept(), Kept()
        if config.x_pair[1] is not None:
            x_kept = Kept.of(grouped_proto(config.x_pair[1], padded, number, _wide(k), "column", x.dtype, x.device))
        if config.w_pair[1] is not None:
            w_kept = Kept.of(_weight_proto(config.w_pair[1], "column", weight))
        width = TensorProto((0, k), x.dtype, x.device)
        return ForwardResult((y,), auxiliary, Intermediates._make((*x_kept, *groups, *w_kept, width)))

    def wants(self, config: Config) -> tuple[bool, ...]:
        grads, rest = config.grads, [False] * (len(Inputs._fields) - 5)
        return "x" in grads, config.returns_dw, "b" in grads, False, "s" in grads, *rest

    def deferred_operands(self, config: Config, tensors: Parts, x: Parts, weight: Tensor) -> Operands:
        buffers, rest = tensors[: config.dy_buffers], tensors[config.dy_buffers :]
        codes, where = rest[: -config.group_tensors] or x, rest[-config.group_tensors :]
        groups = Groups._make((*where, buffers[-1].shape[0]))
        dy: Operand = buffers[0] if len(buffers) == 1 else _dy_columns(config, buffers, groups)
        right = _x_operand(config, codes, groups, weight.shape[2], config.y_dtype)
        return Operands(dy, right, groups, tuple(weight.shape))

    def abstract_weight(self, config: Config, weight: TensorProto) -> tuple[QProto | None, QProto | None]:
        row, column = config.quant.fprop.right, config.quant.dgrad.right
        return (
            None if row is None else _weight_proto(row, "row", weight),
            None if column is None else _weight_proto(column, "column", weight),
        )

    def weight_codes(
        self, config: Config, row: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> GroupedTensor:
        number, n, k = shape
        spec = config.quant.fprop.right
        assert spec is not None
        q = grouped_assemble(spec, row, number, "row", _wide(k), dtype)
        return GroupedTensor(q, equal(number, n, q.device), "row")

    def weight_values(
        self, config: Config, row: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        number, n, k = shape
        return self.weight_codes(config, row, shape, dtype).dequantize(dtype).view(number, n, -1)[..., :k]

    def refresh(self, config: Config, cast: WeightCast) -> None:
        specs, (number, _, k) = (config.quant.fprop.right, config.quant.dgrad.right), cast.weight.shape
        matrix, groups = stacked(cast.weight)
        row, column = (
            GroupedTensor(grouped_assemble(spec, parts, number, side, _wide(k), matrix.dtype), groups, side)
            if spec is not None and parts
            else None
            for spec, parts, side in zip(specs, (cast.row, cast.column), ("row", "column"), strict=True)
        )
        cast = cast._replace(scaling=[t.view(number) for t in cast.scaling])
        if cast.all_reduced:
            running_amax = cast.amaxes[0].chunk(2)[1] if cast.amaxes else None
            arguments = all_reduced_cast(
                config.recipe, specs, cast.scaling, cast.all_reduced, running_amax, of_groups=True
            )
            arguments = arguments._replace(skip=cast.skip)
        else:
            arguments = weight_cast_args(config, cast, specs, partial(_amaxes, matrix, groups, None))
        fill_groups(aligned(matrix), (row, column), arguments)

    def save(self, config: Config, inputs: Inputs, made: ForwardResult) -> Saved:
        intermediates = Intermediates._make(made.intermediates)
        if config.kept_x == "column" and config.x == "codes":
            inputs = inputs._replace(x_codes=inputs.x_column_codes)
        return Saved(
            *saved_operands(config, inputs, intermediates),
            intermediates.width,
            inputs.bias if "s" in config.grads else None,
            inputs.scales if "b" in config.grads else None,
            *saved_scaling(config, inputs.scaling, inputs.all_reduced),
            intermediates.start,
            intermediates.block,
            intermediates.owner,
            intermediates.source,
            intermediates.live,
            *made.auxiliary[config.dy_buffer_auxiliary],
        )

    def backward(
        self, config: Config, saved: Any, buffers: Buffers, grads: Tensors, writes: Writes | None = None
    ) -> Tensors:
        if grads[0] is None:
            return (None,) * len(Inputs._fields)
        call = Backward(config, Saved._make(saved), buffers, writes)
        if buffers.dgrad_out is not None:
            refuse_dgrad_out(buffers.dgrad_out, grads)
        groups = call.kept.groups(grads[0].shape[0])
        codes = None if buffers.dy_codes is None else buffers.dy_codes.take(grads[0])
        if codes is None:
            dy = grads[0].contiguous()  # expanded and turned gradients too: every kernel reads rows
            row, column = quantized_dy(call, dy, groups)
        else:
            dy, row, column = given_dy(call, grads[0], codes, groups)
        dx = input_gradient(call, dy, row, groups) if "x" in config.grads else None
        db, ds = bias_gradients(call, dy, groups)
        return gradients(dx, finish(call, dy, column, groups), db, ds)  # buffers are written last

    def weight_gradient(
        self, config: Config, operands: Any, target: Target | LazyTarget | None, writes: Writes | None = None
    ) -> Tensor | None:
        dy, x, groups, shape = operands = Operands._make(operands)
        number, n, k = shape
        dtype, device = DTYPES[config.weight_dtype], groups.start.device
        if target is None:
            if isinstance(dy, Tensor) and isinstance(x, Tensor):
                return grouped_gemm.fresh_wgrad(dy, x, groups, dtype)
            return _fill_weight_gradient(
                dy, x, groups, torch.empty(shape, dtype=dtype, device=device), accumulate=False
            )
        out = target.open(number * n, k).view(number, n, k)
        if writes is None:
            _store(config, target, out, operands)
        else:
            writes.put_off(_store, config, target, out, operands)
        return torch.zeros(shape, dtype=dtype, device=device) if config.dummy_grad else None

    def abstract_gradients(self, config: Config, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        kept = Saved._make(saved)
        number, n, k = kept.start.shape[0] - 1, dy.shape[1], kept.width.shape[1]
        x, w, b, _, s, *rest = self.wants(config)
        return (
            TensorProto((dy.shape[0], k), dy.dtype, dy.device) if x and not config.dgrad_out else None,
            TensorProto((number, n, k), DTYPES[config.weight_dtype], dy.device) if w else None,
            TensorProto((number, n), DTYPES[config.bias_dtype], dy.device) if b else None,
            None,
            TensorProto((dy.shape[0],), DTYPES[config.scales_dtype], dy.device) if s else None,
            *[None] * len(rest),
        )

    def flops(self, config: Config, inputs: Inputs) -> int:
        """Counts every row, the tail's too: only the device knows how long the tail is."""
        return 2 * inputs.x.shape[0] * math.prod(inputs.weight.shape[1:])

    def gradient_flops(self, config: Config, saved: Any, dy: Any) -> int:
        gemms = ("x" in config.grads) + ("w" in config.grads and not config.deferred_wgrad)
        return int(gemms * 2 * math.prod(dy.shape) * Saved._make(saved).width.shape[1])


layer = GroupedLinearLayer(Config, Inputs, Intermediates, Saved, Buffers)


# -- forward ---------------------------------------------------------------------------------------------------------


def forward_from(
    config: Config,
    inputs: Inputs,
    x: tuple[GroupedTensor | None, GroupedTensor | None],
    groups: Groups,
    amaxes: RunningAmaxes,
) -> ForwardResult:
    """Run the rest of forward after x's cast. A fused producer casts x itself, and `inputs` then have none."""
    if inputs.out is not None:
        _check_out(config, inputs, inputs.out)
    w_row, w_column = _quantized_weight(config, inputs, amaxes.w)
    y = _output(config, inputs, x[0], w_row, groups)
    auxiliary: Parts = ()
    if config.dy_buffers:
        like = TensorProto(tuple(y.shape), y.dtype, y.device)
        buffers = _abstract_dy_buffers(config, like, groups.padded, groups.number)
        auxiliary = (*auxiliary, *deferred_auxiliary(config, inputs.x, buffers))
    x_kept = Kept.of(None if x[1] is None else x[1].q)
    width = torch.empty(0, inputs.weight.shape[2], dtype=config.y_dtype, device=y.device)
    return ForwardResult((y,), auxiliary, Intermediates._make((*x_kept, *groups.tensors(), *Kept.of(w_column), width)))


def quantized_x(
    config: Config, inputs: Inputs, x: Tensor, groups: Groups, running_amax: Tensor | None, source: Tensor | None = None
) -> tuple[GroupedTensor | None, GroupedTensor | None]:
    """Quantize x, or the rows of x that `source` names."""
    part, all_reduced = (
        inputs.scaling[config.x_scaling],
        all_reduced_amaxes("x", config.all_reduced, inputs.all_reduced),
    )
    return _quantize(config, x, config.x_pair, groups, part, running_amax, source=source, all_reduced=all_reduced)


def x_buffers(
    config: Config, scaling: Parts, like: TensorProto, groups: Groups, running_amax: Tensor | None
) -> tuple[tuple[GroupedTensor | None, GroupedTensor | None], CastArgs]:
    """Output buffers and cast arguments for a fused producer that writes x as codes."""
    return _empty_pair(like, config.x_pair, groups), _known_scale(scaling[config.x_scaling], running_amax, groups)


def _empty_pair(
    like: TensorProto, pair: QuantizerPair, groups: Groups
) -> tuple[GroupedTensor | None, GroupedTensor | None]:
    """GroupedTensors in the orientations of a pair of quantizers, to be filled."""
    row, column = (
        None if spec is None else GroupedTensor(
            grouped_proto(
                spec, groups.padded, groups.number, _wide(like.shape[1]), side, like.dtype, like.device
            ).empty(), groups, side,
        )
        for spec, side in zip(pair, ("row", "column"), strict=True)
    )  # fmt: skip
    return row, column


def _known_scale(part: Sequence[Tensor], running_amax: Tensor | None, groups: Groups) -> CastArgs:
    return known_scale([t.view(groups.number) for t in part], running_amax)._replace(groups=groups)


def _output(config: Config, inputs: Inputs, x: GroupedTensor | None, w: QTensor | None, groups: Groups) -> Tensor:
    """Compute y, from the codes of x and w where there are some: in the caller's memory, or with a tail as the config
    says."""
    weight, bias, scales, out = inputs.weight, inputs.bias, inputs.scales, inputs.out
    y = out
    if y is None:
        y = torch.empty(groups.rows, weight.shape[1], dtype=config.y_dtype, device=weight.device)
    if x is None or w is None:
        grouped_gemm.plain_rows(inputs.x.to(y.dtype), weight.to(y.dtype), y, groups, bias, scales)
    else:
        accumulation = config.quant.fprop.accumulation
        grouped_gemm.rows(x, w, y, bias, scales, height=_height(weight), accumulation=accumulation)
    if out is None:
        return _finished(config, y, groups)
    return y.data if y._is_view() else y.detach()  # slices share a version, and others may be written to


def _quantize(
    config: Config, x: Tensor, pair: QuantizerPair, groups: Groups, scaling: Sequence[Tensor],
    running_amax: Tensor | None,
    seed: Tensor | None = None, source: Tensor | None = None, all_reduced: Parts = (),
) -> tuple[GroupedTensor | None, GroupedTensor | None]:  # fmt: skip
    """Quantize x in the orientations of a pair of quantizers, by x's part of `scaling`, one inverse scale for each
    group, if that is delayed. `source` names the rows of x."""
    if pair[0] is None and pair[1] is None:
        return None, None
    part = [t.view(groups.number) for t in scaling]
    if all_reduced:
        arguments = all_reduced_cast(config.recipe, pair, part, all_reduced, running_amax, of_groups=True)
    else:
        arguments = cast_args(config.recipe, pair, part, partial(_amaxes, x, groups, source), running_amax, seed)
    return quantize_groups(aligned(x), *pair, groups, arguments._replace(source=source))


def _amaxes(x: Tensor, groups: Groups, source: Tensor | None, spec: Tensorwise, skip: Tensor) -> Tensor:
    """The amax of each group. It skips none: some groups may have seen amaxes, and others not."""
    amax = groups_amax(x, spec, None, groups, source=source)[0]
    assert amax is not None
    return amax


def aligned(x: Tensor) -> Tensor:
    """x with zeros in the columns that GEMMs read besides: what casts read."""
    return F.pad(x, (0, -x.shape[-1] % ALIGNED)) if x.shape[-1] % ALIGNED else x


def _wide(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED


def _height(weight: Tensor | TensorProto) -> int:
    """Rows from one expert's stacked weight to the next one's."""
    return -(-weight.shape[1] // BLOCK) * BLOCK


def _quantized_weight(
    config: Config, inputs: Inputs, running_amax: Tensor | None
) -> tuple[QTensor | None, QTensor | None]:
    """Row codes [G * height, K] and column codes [K, G * height], given or made."""
    weight, spec = inputs.weight, config.quant.fprop.right
    if config.weight != "plain":
        number, _, k = weight.shape
        if spec is None:
            return None, None
        return grouped_assemble(spec, inputs.w_row, number, "row", _wide(k), weight.dtype), None
    if config.w_pair[0] is None and config.w_pair[1] is None:
        return None, None
    matrix, groups = stacked(weight)
    part, all_reduced = (
        inputs.scaling[config.w_scaling],
        all_reduced_amaxes("w", config.all_reduced, inputs.all_reduced),
    )
    row, column = _quantize(config, matrix, config.w_pair, groups, part, running_amax, all_reduced=all_reduced)
    return (None if row is None else row.q), (None if column is None else column.q)


def stacked(weight: Tensor) -> tuple[Tensor, Groups]:
    """Weights [G, N, K] as rows in groups."""
    number, n, k = weight.shape
    return weight.detach().reshape(number * n, k), equal(number, n, weight.device)


def _check_out(config: Config, inputs: Inputs, out: Tensor) -> None:
    """Refuse an `out` that overlaps tensors that are still to be read."""
    x: Tensor | None = inputs.x
    if x is not None and overlap(out, x) and (config.kept_x == "plain" or config.quant.fprop.left is None):
        refuse_shared_memory("out", "x, which is multiplied as it is, now or for the weight's gradient")
    if any(overlap(out, t) for t in (*inputs.x_codes, *inputs.x_column_codes)):
        refuse_shared_memory("out", "the codes of x, which the layer multiplies as they are")
    for name in ("weight", "bias", "splits", "scales"):
        tensor = getattr(inputs, name)
        if tensor is not None and overlap(out, tensor):
            refuse_shared_memory("out", f"{name}, which the layer needs as it is")


def _finished(config: Config, out: Tensor, groups: Groups) -> Tensor:
    if config.tail == "zero":
        grouped_gemm.zero_tail(out, groups)
    return out


# -- a weight gradient that a graph leaves to backward_dw() (octavo.runtime.deferred_wgrad) ----------------------------


def _abstract_dy_buffers(config: Config, y: TensorProto, padded: int, number: int) -> tuple[TensorProto, ...]:
    """Buffers for dy as dw needs it."""
    spec = config.dy_pair[1]
    if spec is None:
        return (y,)
    q = grouped_proto(spec, padded, number, _wide(y.shape[1]), "column", y.dtype, y.device)
    return abstract_dy_buffers(q, y.shape[0], y)


def _dy_columns(config: Config, buffers: Sequence[Tensor], groups: Groups) -> GroupedTensor:
    """dy's column codes, in the buffers."""
    spec = config.dy_pair[1]
    assert spec is not None
    q = grouped_assemble(spec, buffers[:-1], groups.number, "column", buffers[0].shape[0], config.y_dtype)
    return GroupedTensor(q, groups, "column")


# -- cached weights --------------------------------------------------------------------------------------------------


def _weight_proto(spec: Quantizer, side: str, weight: Tensor | TensorProto) -> QProto:
    number, _, k = weight.shape
    return grouped_proto(spec, number * _height(weight), number, _wide(k), side, weight.dtype, weight.device)


# -- backward --------------------------------------------------------------------------------------------------------


def gradients(dx: Tensor | None, dw: Tensor | None, db: Tensor | None, ds: Tensor | None) -> Tensors:
    """One gradient for each input."""
    return dx, dw, db, None, ds, *[None] * (len(Inputs._fields) - 5)


def dy_buffers(
    call: Backward, like: TensorProto, groups: Groups
) -> tuple[tuple[GroupedTensor | None, GroupedTensor | None], CastArgs]:
    """Output buffers and cast arguments for a fused producer that writes dy as codes."""
    arguments = _known_scale(call.kept.dy_scaling, call.buffers.amax, groups)._replace(seed=call.seed())
    return _empty_pair(like, call.config.dy_pair, groups), arguments


def x_columns_again(call: Backward, x: Tensor, groups: Groups, source: Tensor) -> GroupedTensor:
    """Make the column codes of the rows of x that `source` names, as forward would have made them."""
    inverse_scale = call.kept.x_inverse_scale
    arguments = CastArgs(
        inverse_scale=None if inverse_scale is None else inverse_scale.view(groups.number), source=source
    )
    column = quantize_groups(aligned(x), None, call.config.quant.wgrad.right, groups, arguments)[1]
    assert column is not None
    return column


def x_column_buffer(call: Backward, like: TensorProto, groups: Groups) -> tuple[GroupedTensor | None, CastArgs]:
    """The output buffer and cast arguments for a fused backward that makes x's column codes again."""
    if "w" not in call.config.grads:
        return None, CastArgs()
    inverse_scale = call.kept.x_inverse_scale
    arguments = CastArgs(
        inverse_scale=None if inverse_scale is None else inverse_scale.view(groups.number), groups=groups
    )
    return _empty_pair(like, (None, call.config.quant.wgrad.right), groups)[1], arguments


def quantized_dy(
    call: Backward, dy: Tensor, groups: Groups, source: Tensor | None = None
) -> tuple[GroupedTensor | None, GroupedTensor | None]:
    """Quantize dy, or the rows of dy that `source` names, by row and by column: the latter into the buffers of a
    deferred dw if there are any."""
    config, kept, buffers, _ = call
    pair, seed = config.dy_pair, call.seed()
    scaling, running_amax = ((), None) if config.scales_dy_alone else (kept.dy_scaling, buffers.amax)
    if config.dy_buffers < 2:
        return _quantize(config, dy, pair, groups, scaling, running_amax, seed, source)
    assert source is None
    row, _ = _empty_pair(TensorProto.of(dy), (pair[0], None), groups)
    codes = row, _dy_columns(config, kept.dy_buffers, groups)
    part = [t.view(groups.number) for t in scaling]
    arguments = cast_args(config.recipe, pair, part, partial(_amaxes, dy, groups, None), running_amax, seed)
    fill_groups(aligned(dy), codes, arguments)
    return codes


def given_dy(
    call: Backward, dy: Tensor, codes: GroupedTensor, groups: Groups
) -> tuple[Tensor, GroupedTensor | None, GroupedTensor | None]:
    """dy that arrived as codes: its values, if a gradient needs them, and codes of its rows and columns. Codes of the
    right quantizer are used as they are, or transposed; others are made of the values."""
    config = call.config
    _check_given_dy(codes, dy, groups)
    wants_row, wants_column = config.dy_pair
    row = column = None
    if wants_row is not None and wants_row == codes.q.spec:
        row = given_rows(wants_row, tuple(codes.q.tensors()), groups, dy.shape[1], dy.dtype)
    if wants_column is not None and codes.columns is not None and codes.columns.spec == wants_column:
        column = GroupedTensor(_wider_columns(codes.columns), groups, "column")
    elif wants_column is not None and _are_turned(codes.q.spec, wants_column):
        rows = given_rows(wants_column, tuple(codes.q.tensors()), groups, dy.shape[1], dy.dtype)
        column = transposed(rows)
    missing = None if row is not None else wants_row, None if column is not None else wants_column
    in_values = ("x" in config.grads and wants_row is None) or ("w" in config.grads and wants_column is None)
    if in_values or missing != (None, None) or "b" in config.grads or "s" in config.grads:
        dy = GroupedTensor(codes.q, groups, "row").dequantize(dy.dtype)
    if missing != (None, None):
        made = _quantize(config, dy, missing, groups, (), None, call.seed())
        row, column = made[0] if row is None else row, made[1] if column is None else column
    return dy, row, column


def _check_given_dy(codes: GroupedTensor, dy: Tensor, groups: Groups) -> None:
    """Refuse codes of another shape; on a CPU also those of other sizes, which elsewhere the host would wait for."""
    if codes.shape != tuple(dy.shape) or codes.groups.number != groups.number or not codes.groups.is_ragged:
        raise UnsupportedShape(
            f"The gradient of y has {dy.shape[0]} rows of {dy.shape[1]} in {groups.number} groups, and the codes that "
            f"arrived are {codes!r}. Quantize the rows of dy with the sizes of x."
        )
    if dy.device.type == "cpu" and not torch.equal(codes.groups.start, groups.start):
        raise UnsupportedShape(
            f"The codes of dy are in groups of {codes.groups.sizes()} rows, and x is in groups of {groups.sizes()}."
        )


def bias_gradients(call: Backward, dy: Tensor, groups: Groups) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of the bias and of its scales."""
    config, kept = call.config, call.kept
    db = ds = None
    if "b" in config.grads:
        db = grouped_gemm.column_sums_of(dy, groups, DTYPES[config.bias_dtype], kept.scales)
    if "s" in config.grads:
        ds = grouped_gemm.bias_products(dy, kept.bias, groups, DTYPES[config.scales_dtype])
    return db, ds


def input_gradient(call: Backward, dy: Any, row: GroupedTensor | None, groups: Groups) -> Tensor:
    """Compute dx, in the caller's memory if there is some. If row codes are given, only dy's shape is used."""
    config, kept, out = call.config, call.kept, call.buffers.dgrad_out
    number, n, k = groups.number, dy.shape[1], kept.width.shape[1]
    dx = torch.empty(dy.shape[0], k, dtype=dy.dtype, device=dy.device) if out is None else out
    if row is None:
        weight = kept.w_codes
        if config.kept_w == "row":
            weight = layer.weight_values(config, kept.w, (number, n, k), dy.dtype)
        assert weight is not None
        grouped_gemm.plain_rows(dy, weight.to(dy.dtype).transpose(1, 2), dx, groups)
    else:
        w = _weight_columns(config, kept, number, n, k, dy.dtype)
        height, accumulation = -(-n // BLOCK) * BLOCK, config.quant.dgrad.accumulation
        grouped_gemm.rows(row, w, dx, height=height, along="columns", accumulation=accumulation)
    return _finished(config, dx, groups) if out is None else dx


def _weight_columns(config: Config, kept: Saved, number: int, height: int, k: int, dtype: torch.dtype) -> QTensor:
    """The column codes of weights of `height` rows: kept, or made as forward would have made them, from cached row
    codes or from the weights."""
    spec = config.quant.dgrad.right
    assert spec is not None
    if config.kept_w == "turned":
        assert config.quant.fprop.right is not None
        q = grouped_assemble(config.quant.fprop.right, kept.w, number, "row", _wide(k), dtype)
        rows = GroupedTensor(q, equal(number, height, q.device), "row")
        return transposed(rows).q
    if config.kept_w != "again":
        return _saved_columns(spec, kept.w, number, _wide(k), dtype)
    assert kept.w_codes is not None
    matrix, groups = stacked(kept.w_codes)
    inverse_scale = None if kept.w_inverse_scale is None else kept.w_inverse_scale.view(number)
    amax = None if kept.w_amax is None else number_of(kept.w_amax)
    _, column = quantize_groups(aligned(matrix), None, spec, groups, CastArgs((None, amax), inverse_scale))
    assert column is not None
    return column.q


def finish(
    call: Backward, dy: Any, column: GroupedTensor | None, groups: Groups, x_column: GroupedTensor | None = None
) -> Tensor | None:
    """Compute dw, then advance the random counter. If column codes are given, only dy's shape is used."""
    dw = _weight_gradient(call, dy, column, groups, x_column) if "w" in call.config.grads else None
    call.advance()
    return dw


def _weight_gradient(
    call: Backward, dy: Any, column: GroupedTensor | None, groups: Groups, x_column: GroupedTensor | None
) -> Tensor | None:
    """Compute dw. If it is deferred, leave its operands in the queue or in the buffers, and return None."""
    config, kept, buffers, writes = call
    if config.dy_buffers:
        if column is None and kept.dy_buffer is not None:  # codes are in their place already
            kept.dy_buffer.copy_(dy)
        return None
    shape = (groups.number, dy.shape[1], kept.width.shape[1])
    right = _x_operand(config, kept.x, groups, shape[2], dy.dtype) if x_column is None else x_column
    operands = Operands(dy if column is None else column, right, groups, shape)
    if config.deferred_wgrad:
        assert buffers.mail is not None
        call.write(buffers.mail.put, config, *operands)
        return None
    return layer.weight_gradient(config, operands, buffers.main_grad, writes)


def _x_operand(config: Config, parts: Sequence[Tensor], groups: Groups, k: int, dtype: torch.dtype) -> Operand:
    """x as dw needs it. Row codes that arrived without columns are transposed if that is what a cast would write;
    if not, their values are cast."""
    if config.kept_x == "plain":
        return parts[0].to(dtype)
    spec = config.quant.wgrad.right
    if config.kept_x == "row":
        rows = given_rows(config.quant.fprop.left, parts, groups, k, dtype)
        if config.quant.wgrad.left is None:
            return rows.dequantize(dtype)[:, :k]
        if _are_turned(rows.q.spec, spec):
            return transposed(rows)
        column = quantize_groups(rows.dequantize(dtype), None, spec, groups)[1]
        assert column is not None
        return column
    assert spec is not None
    q = _wider_columns(_saved_columns(spec, parts, groups.number, parts[0].shape[0], dtype))
    return GroupedTensor(q, groups, "column")


def given_rows(
    spec: Quantizer | None, parts: Sequence[Tensor], groups: Groups, k: int, dtype: torch.dtype
) -> GroupedTensor:
    """Row codes that arrived, with zeros in the columns that GEMMs read besides: the bytes of a cast of wider rows."""
    assert spec is not None
    q = grouped_assemble(spec, parts, groups.number, "row", k, dtype)
    q = in_order(q, scale_strides(spec, (q.scale.shape[0], q.scale.shape[1])))
    wide = spec._code_columns(_wide(k))
    if q.codes.shape[1] != wide:
        codes = F.pad(q.codes.view(torch.uint8), (0, wide - q.codes.shape[1])).view(spec.fmt.dtype)
        q = replace(q, codes=codes, shape=(q.rows, _wide(k)))
    elif k != _wide(k):
        q = replace(q, shape=(q.rows, _wide(k)))
    return GroupedTensor(q, groups, "row")


def _wider_columns(q: QTensor) -> QTensor:
    """Column codes [K, padded] with as many rows as GEMMs read."""
    more = _wide(q.rows) - q.rows
    if not more:
        return q
    codes = F.pad(q.codes.view(torch.uint8), (0, 0, 0, more)).view(q.codes.dtype)
    height = q.spec.block[0]
    missing = 0 if height is None else -(-_wide(q.rows) // height) - q.scale.shape[0]
    scale = F.pad(q.scale, (0, 0, 0, missing)) if missing else q.scale
    strides = scale_strides(q.spec, (scale.shape[0], scale.shape[1]))
    wider = QTensor(codes, scale, q.spec, (_wide(q.rows), q.shape[1]), q.dtype, q.global_scale)
    return in_order(wider, strides)


def _saved_columns(spec: Quantizer, parts: Sequence[Tensor], number: int, k: int, dtype: torch.dtype) -> QTensor:
    q = grouped_assemble(spec, parts, number, "column", k, dtype)
    return in_order(q, scale_strides(spec, (q.scale.shape[0], q.scale.shape[1])))


def _store(config: Config, target: Target | LazyTarget, out: Tensor, operands: Operands) -> None:
    """Compute dw into the buffer that a target opened."""
    dy, x, groups, _ = operands
    with preserve_version_counter(out):  # a graph in flight may have saved it
        _fill_weight_gradient(dy, x, groups, out, accumulate=config.main_grad == "add")
    target.close()


def _fill_weight_gradient(dy: Operand, x: Operand, groups: Groups, out: Tensor, *, accumulate: bool) -> Tensor:
    if isinstance(dy, GroupedTensor) and isinstance(x, GroupedTensor):
        return grouped_gemm.grouped_wgrad(dy, x, out, accumulate=accumulate)
    assert isinstance(dy, Tensor) and isinstance(x, Tensor)
    return grouped_gemm.plain_wgrad(dy, x, out, groups, accumulate=accumulate)
