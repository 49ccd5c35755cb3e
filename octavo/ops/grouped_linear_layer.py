"""The linear layer of many experts: rows of x come in ragged groups, and each group has a weight of its own.

    y[g] = x[g] · w[g]ᵀ + bias[g]        dx[g] = dy[g] · w[g]        dw[g] = dy[g]ᵀ · x[g]

The groups' sizes are on the device, in `splits`, and are never read back: shapes follow from x, whose rows after the
last group are a tail that nothing reads. Each group is quantized as if it were alone; so are the weights, as groups of
equal size. Backward keeps the column codes of x and of w; an operand of a GEMM in high precision is kept as it is. A
bias may be scaled, token by token: y[t] = x[t] · w[g]ᵀ + bias[g] * scales[t].
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import UnsupportedShape
from octavo.kernels import grouped_gemm
from octavo.memory import overlap, refuse_dgrad_out, refuse_shared_memory
from octavo.ops.linear_config import LinearSettings
from octavo.ops.linear_layer import LinearLayer
from octavo.ops.operands import BackwardCall, Dense, Intermediates, Operand, Operands, Pair, Saved
from octavo.quant.casts import in_order
from octavo.quant.gradient_codes import GradientCodes
from octavo.quant.grouped import (
    GroupedTensor,
    empty_groups,
    fill_groups,
    grouped_assemble,
    grouped_proto,
    groups_amax,
    quantize_groups,
    transposed,
)
from octavo.quant.groups import BLOCK, Groups, equal, split
from octavo.quant.groups import abstract as abstract_groups
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import ORIENTATIONS, Parts, QProto, QTensor
from octavo.quant.quantizer import CastArgs, Quantizer, QuantizerPair
from octavo.quant.scale_blocks import are_transposed
from octavo.quant.tensorwise import Tensorwise
from octavo.runtime.contract import DTYPES, ForwardResult, Tensors
from octavo.runtime.gradient_targets import LazyTarget, OperandQueue, Target, Writes
from octavo.values import register

ALIGNED = 16  # columns of codes, for the GEMM's copies; missing ones are zeros


@register("grouped-linear")
class Config(LinearSettings):
    """The settings of a call: with its tensors, they decide what it does."""

    scales_dtype: str = ""  # of the bias' scales; empty: the bias is added as it is
    dgrad_out: bool = False  # dx goes to a buffer of the caller's
    # dy is scaled by its own amax, which is not remembered: the history belongs to a fused operation with another dy
    scales_dy_alone: bool = False
    tail: str = "zero"  # rows of y and dx after the last group are zeros; or "untouched": whatever is there

    group_tensors = len(Groups._fields) - 1  # all but the number of rows

    @cached_property
    def wgrad_mode(self) -> str:
        """The recipe's wgrad mode, except that of x given as row codes of four bits the values are used: a second cast
        to four bits would add as much to dw's error as the first. One to eight bits adds little, and dw stays fast."""
        gemm = self.quant.wgrad
        is_cast_again = self.x == "codes" and not self.x_has_columns and gemm.mode == "quantized"
        if is_cast_again and gemm.right is not None and gemm.right.fmt.bits == 4:
            return "quantized" if are_transposed(self.quant.fprop.left, gemm.right) else "dequantized"
        return gemm.mode


class Inputs(NamedTuple):
    """The tensors of a call."""

    x: Tensor  # [rows, K]; for codes, an anchor of that shape, which carries their gradient if they have one
    weight: Tensor  # [G, N, K]; for a quantized weight, the gradient anchor that receives its gradient
    bias: Tensor | None  # [G, N]
    splits: Tensor  # [G] int32 or int64
    scales: Tensor | None = None  # [rows], of the bias
    out: Tensor | None = None  # [rows, N], the caller's: y is written there, and its tail is left alone
    w_row: Parts = ()  # of a weight given as codes
    w_column: Parts = ()
    scaling: Parts = ()  # delayed: inverse scales [G] of x, w, dy; if one is uncalibrated also their amax counts
    running_amaxes: Parts = ()  # delayed, in training: running amaxes [G] of x and w
    x_codes: Parts = ()  # of x given as codes: those of its rows ...
    x_column: Parts = ()  # ... and of its columns, if there are any
    all_reduced: Parts = ()  # all-reduced amaxes [G], as bits: row's and column's, of x and of w


class Buffers(NamedTuple):
    """Tensors that backward writes to besides its results, and where dy may come from."""

    main_grad: Target | LazyTarget | None = None
    amax: Tensor | None = None  # [G]: the amaxes of dy, folded by maximum
    seed: Tensor | None = None  # [2] int64: seed and step of stochastic rounding; the step advances
    queue: OperandQueue | None = None
    dgrad_out: Tensor | None = None  # [rows, K], the caller's: dx is written there, and its tail is left alone
    dy_codes: GradientCodes | None = None  # dy may arrive there


class Ragged(Dense):
    """Rows in groups, each quantized as if it were alone, and multiplied by a weight of its own."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.places = groups[:5]
        self.lead = (groups.start.shape[0] - 1,)

    # -- casts

    def quantize(  # type: ignore[override]  # a method here, a function there
        self, x: Tensor, row: Quantizer | None, column: Quantizer | None, arguments: CastArgs
    ) -> Pair:
        x = aligned(x) if x.shape[-1] % ALIGNED else x
        first, second = quantize_groups(x, row, column, self.groups, arguments)
        return None if first is None else first.q, None if second is None else second.q

    def fill(self, x: Tensor, pair: Pair, arguments: CastArgs) -> None:
        row, column = (
            None if q is None else GroupedTensor(q, self.groups, side)
            for q, side in zip(pair, ORIENTATIONS, strict=True)
        )
        fill_groups(aligned(x), (row, column), arguments)

    def empty_pair(self, like: Tensor | TensorProto, pair: QuantizerPair) -> Pair:
        return empty_groups(self.groups, pair, _wide(like.shape[1]), like.dtype, like.device)

    def amax(self, x: Tensor, source: Tensor | None, spec: Tensorwise, skip: Tensor) -> Tensor:
        """Measure each group. It skips none: some groups may have seen amaxes, and others not."""
        amax = groups_amax(x, spec, None, self.groups, source=source)[0]
        assert amax is not None
        return amax

    def amaxes(self, x: Tensor, row: Quantizer | None, column: Quantizer | None, none: Tensor) -> list[Tensor]:
        return [none if amax is None else amax for amax in groups_amax(aligned(x), row, column, self.groups)]

    # -- codes

    def proto(self, spec: Quantizer, side: str, like: Any) -> QProto:
        groups = self.groups
        k = _wide(like.shape[1])
        return grouped_proto(spec, groups.padded, groups.number, k, side, like.dtype, like.device)

    def assemble(
        self, spec: Quantizer, parts: Sequence[Any], side: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> QTensor:
        return grouped_assemble(spec, parts, self.lead[0], side, _wide(shape[-1]), dtype)

    def restored(
        self, spec: Quantizer, parts: Sequence[Any], side: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> QTensor:
        q = grouped_assemble(spec, parts, self.lead[0], side, shape[-1], dtype)
        q = in_order(q, spec._scale_strides(*q.scale.shape, is_grouped=True))
        return _wider_columns(q) if q.codes.shape[0] % ALIGNED and side == "column" else q

    def given_x(self, config: Any, inputs: Any) -> QTensor:
        return given_rows(config.quant.fprop.left, inputs.x_codes, self.groups, inputs.x.shape[1], config.y_dtype).q

    # -- weights

    @staticmethod
    def of_weight(weight: Tensor) -> "tuple[Tensor, Ragged]":
        number, n, k = weight.shape
        return weight.detach().reshape(number * n, k), Ragged(equal(number, n, weight.device))

    @staticmethod
    def weight_proto(spec: Quantizer, side: str, weight: Any) -> QProto:
        number, n, k = weight.shape
        return grouped_proto(spec, number * _height(n), number, _wide(k), side, weight.dtype, weight.device)

    @staticmethod
    def weight_codes(spec: Quantizer, row: Sequence[Any], shape: tuple[int, ...], dtype: torch.dtype) -> GroupedTensor:
        number, n, k = shape
        q = grouped_assemble(spec, row, number, "row", _wide(k), dtype)
        return GroupedTensor(q, equal(number, n, q.device), "row")

    @staticmethod
    def transposed(codes: GroupedTensor) -> QTensor:
        return transposed(codes).q

    # -- products

    def readable(self, dy: Tensor) -> Tensor:
        return dy.contiguous()  # expanded and transposed gradients too: every kernel reads rows

    def output(
        self, config: Any, inputs: Any, x: QTensor | None, w: QTensor | None, lead: tuple[int, ...] | None
    ) -> Tensor:
        """Compute y in the caller's memory, or with a tail as the config says."""
        weight, bias, scales, out = inputs.weight, inputs.bias, inputs.scales, inputs.out
        y: Tensor
        if out is None:
            y = torch.empty(self.groups.rows, weight.shape[1], dtype=config.y_dtype, device=weight.device)
        else:
            _check_out(config, inputs, out)
            y = out
        if x is None or w is None:
            grouped_gemm.plain_rows(inputs.x.to(y.dtype), weight.to(y.dtype), y, self.groups, bias, scales)
        else:
            accumulation, height = config.quant.fprop.accumulation, _height(weight.shape[1])
            grouped_gemm.rows(
                GroupedTensor(x, self.groups, "row"), w, y, bias, scales, height=height, accumulation=accumulation
            )
        if out is not None:
            return y.data if y._is_view() else y.detach()  # slices share a version, and others may be written to
        if config.tail == "zero":
            grouped_gemm.zero_tail(y, self.groups)
        return y

    def input_product(self, call: BackwardCall, dy: Any, row: QTensor | None, weight: Operand) -> Tensor:
        """Compute dx, in the caller's memory if there is some."""
        config, kept, out = call.config, call.kept, call.buffers.dgrad_out
        dx: Tensor = out
        if out is None:
            dx = torch.empty(dy.shape[0], kept.width.shape[1], dtype=dy.dtype, device=dy.device)
        if isinstance(weight, Tensor):
            grouped_gemm.plain_rows(dy, weight, dx, self.groups)
        else:
            assert row is not None
            height, accumulation = _height(dy.shape[1]), config.quant.dgrad.accumulation
            codes = GroupedTensor(row, self.groups, "row")
            grouped_gemm.rows(codes, weight, dx, height=height, along="columns", accumulation=accumulation)
        if out is None and config.tail == "zero":
            grouped_gemm.zero_tail(dx, self.groups)
        return dx

    def bias_gradients(self, call: BackwardCall, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        config, kept = call.config, call.kept
        db = ds = None
        if config.wants_db:
            db = grouped_gemm.column_sums_of(dy, self.groups, DTYPES[config.bias_dtype], kept.scales)
        if config.wants_ds:
            ds = grouped_gemm.bias_products(dy, kept.bias, self.groups, DTYPES[config.scales_dtype])
        return db, ds

    def wgrad_operand(self, x: Tensor) -> Tensor:
        return x

    def x_of_rows(self, config: Any, parts: Sequence[Any], k: int, dtype: torch.dtype) -> Operand:
        """Transpose row codes that arrived without columns, if that is what a cast would write; if not, take their
        values, and cast them where the GEMM multiplies codes."""
        spec, rows = config.quant.wgrad.right, given_rows(config.quant.fprop.left, parts, self.groups, k, dtype)
        if config.wgrad_mode != "quantized":
            return rows.dequantize(dtype)[:, :k]
        if are_transposed(rows.q.spec, spec):
            return self.transposed(rows)
        column = self.quantize(rows.dequantize(dtype), None, spec, CastArgs())[1]
        assert column is not None
        return column

    def weight_product(self, config: Any, operands: Operands, dtype: torch.dtype) -> Tensor:
        dy, x, _, shape = operands
        if isinstance(dy, Tensor) and isinstance(x, Tensor):
            return grouped_gemm.fresh_wgrad(dy, x, self.groups, dtype)
        out = torch.empty(shape, dtype=dtype, device=self.groups.start.device)
        return self._fill_weight_gradient(operands, out, accumulate=False)

    def prepared(self, config: Any, operands: Operands, dtype: torch.dtype) -> Operands:
        return operands  # the GEMM itself adds to the buffer

    def store(self, config: Any, out: Tensor, operands: Operands) -> None:
        self._fill_weight_gradient(operands, out, accumulate=config.main_grad == "add")

    def _fill_weight_gradient(self, operands: Operands, out: Tensor, *, accumulate: bool) -> Tensor:
        dy, x = operands.dy, operands.x
        if isinstance(dy, QTensor) and isinstance(x, QTensor):
            codes = GroupedTensor(dy, self.groups, "column"), GroupedTensor(x, self.groups, "column")
            return grouped_gemm.grouped_wgrad(*codes, out, accumulate=accumulate)
        assert isinstance(dy, Tensor) and isinstance(x, Tensor)
        return grouped_gemm.plain_wgrad(dy, x, out, self.groups, accumulate=accumulate)


class GroupedLinearLayer(LinearLayer):
    """Compute x[g] · w[g]ᵀ + bias[g]."""

    kind = Ragged

    def rows_of(self, inputs: Inputs, rows: int) -> Ragged:
        return Ragged(split(inputs.splits, rows))

    def out_place(self, config: Config) -> int:
        return Inputs._fields.index("out")

    def gradients_in_buffers(self, config: Config) -> dict[int, int]:
        return {0: Buffers._fields.index("dgrad_out")} if config.dgrad_out else {}

    def decided_by_layout(self, config: Config, side: str) -> bool:
        """Return whether the layout decides all launches. Those of backward also depend on whether the caller's buffers
        overlap others, or are adjacent."""
        return config.shipped and (side == "forward" or not (config.dgrad_out or config.main_grad))

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:  # type: ignore[override]
        rows = inputs.x.shape[0]
        groups = abstract_groups(rows, inputs.weight.shape[0], inputs.x.device)
        return super().abstract(config, inputs, Ragged(Groups._make((*groups, rows))))  # type: ignore[arg-type]

    def backward(  # type: ignore[override]
        self, config: Config, saved: Any, buffers: Buffers, grads: Tensors, writes: Writes | None = None
    ) -> Tensors:
        dy, codes = grads[0], None
        if dy is None:
            return self.gradients(None, None, None)
        if buffers.dgrad_out is not None:
            refuse_dgrad_out(buffers.dgrad_out, grads)
        call = self.backward_call(config, saved, buffers, writes, dy.shape[0])
        given = None if buffers.dy_codes is None else buffers.dy_codes.take(dy)
        if given is None:
            dy = call.rows.readable(dy)
        else:
            dy, codes = given_dy(call, dy, given)
        return super().backward(config, saved, buffers, (dy,), writes, call.rows, codes)


layer = GroupedLinearLayer(Config, Inputs, Intermediates, Saved, Buffers)


def aligned(x: Tensor) -> Tensor:
    """Pad x with zeros to the columns that GEMMs read: what casts read."""
    return F.pad(x, (0, -x.shape[-1] % ALIGNED)) if x.shape[-1] % ALIGNED else x


def _wide(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED


def _height(rows: int) -> int:
    """Count the rows from one expert's stacked weight of that many rows to the next one's."""
    return -(-rows // BLOCK) * BLOCK


def _check_out(config: Config, inputs: Inputs, out: Tensor) -> None:
    """Refuse an `out` that overlaps tensors that are still to be read."""
    x: Tensor | None = inputs.x
    if x is not None and overlap(out, x) and (config.kept_x in ("plain", "again") or config.quant.fprop.left is None):
        refuse_shared_memory("out", "x, which is multiplied as it is, now or for the weight's gradient")
    if any(overlap(out, t) for t in (*inputs.x_codes, *inputs.x_column)):
        refuse_shared_memory("out", "the codes of x, which the layer multiplies as they are")
    for name in ("weight", "bias", "splits", "scales"):
        tensor = getattr(inputs, name)
        if tensor is not None and overlap(out, tensor):
            refuse_shared_memory("out", f"{name}, which the layer needs as it is")


def given_dy(call: BackwardCall, dy: Tensor, codes: GroupedTensor) -> tuple[Tensor, Pair]:
    """Return dy that arrived as codes: its values, if a gradient needs them, and codes of its rows and columns. Codes
    of the right quantizer are used as they are, or transposed; others are made of the values."""
    config, groups = call.config, call.rows.groups
    _check_given_dy(codes, dy, groups)
    wants_row, wants_column = config.dy_pair
    row = column = None
    if wants_row is not None and wants_row == codes.q.spec:
        row = given_rows(wants_row, tuple(codes.q.tensors()), groups, dy.shape[1], dy.dtype).q
    if wants_column is not None and codes.columns is not None and codes.columns.spec == wants_column:
        column = _wider_columns(codes.columns)
    elif wants_column is not None and are_transposed(codes.q.spec, wants_column):
        rows = given_rows(wants_column, tuple(codes.q.tensors()), groups, dy.shape[1], dy.dtype)
        column = transposed(rows).q
    missing = None if row is not None else wants_row, None if column is not None else wants_column
    in_values = (config.wants_dx and wants_row is None) or (config.wants_dw and wants_column is None)
    if in_values or missing != (None, None) or config.wants_db or config.wants_ds:
        dy = GroupedTensor(codes.q, groups, "row").dequantize(dy.dtype)
    if missing != (None, None):
        made = call.rows.quantize(dy, *missing, CastArgs(seed=call.seed()))
        row, column = made[0] if row is None else row, made[1] if column is None else column
    return dy, (row, column)


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


def given_rows(
    spec: Quantizer | None, parts: Sequence[Tensor], groups: Groups, k: int, dtype: torch.dtype
) -> GroupedTensor:
    """Return row codes that arrived, padded with zeros to the columns that GEMMs read: the bytes of a cast of wider
    rows."""
    assert spec is not None
    q = grouped_assemble(spec, parts, groups.number, "row", k, dtype)
    q = in_order(q, spec._scale_strides(*q.scale.shape, is_grouped=True))
    wide = spec._code_columns(_wide(k))
    if q.codes.shape[1] != wide:
        codes = F.pad(q.codes.view(torch.uint8), (0, wide - q.codes.shape[1])).view(spec.fmt.dtype)
        q = replace(q, codes=codes, shape=(q.rows, _wide(k)))
    elif k != _wide(k):
        q = replace(q, shape=(q.rows, _wide(k)))
    return GroupedTensor(q, groups, "row")


def _wider_columns(q: QTensor) -> QTensor:
    """Pad column codes [K, padded] with zeros to as many rows as GEMMs read."""
    more = _wide(q.rows) - q.rows
    if not more:
        return q
    codes = F.pad(q.codes.view(torch.uint8), (0, 0, 0, more)).view(q.codes.dtype)
    height = q.spec.block[0]
    missing = 0 if height is None else -(-_wide(q.rows) // height) - q.scale.shape[0]
    scale = F.pad(q.scale, (0, 0, 0, missing)) if missing else q.scale
    strides = q.spec._scale_strides(*scale.shape, is_grouped=True)
    wider = QTensor(codes, scale, q.spec, (_wide(q.rows), q.shape[1]), q.dtype, q.global_scale)
    return in_order(wider, strides)
