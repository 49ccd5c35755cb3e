"""The GEMMs of a linear layer and the casts before them, for dense rows and for rows in groups alike
(`octavo.ops.operands`).

    y = x · wᵀ + bias        dx = dy · w        dw = dyᵀ · x        each GEMM as the recipe says

The casts in forward and backward, for x [M, K], w [N, K], dy [M, N] ("column" is the other orientation, contracted over
M or N):

    forward    x row and column, w row and column, each from one read       y  = gemm(x row, w row)
    backward   dy row and column, from one read                              dx = gemm(dy row, w column)
                                                                             dw = gemm(dy column, x column)

A column that no gradient needs is not made. Backward keeps x's column codes and w's, an eighth to a half of what bf16
would take; an operand of a GEMM in high precision is kept as it is, by reference, and "dequantized" backward GEMMs run
on the row codes of forward. Operands may also arrive as codes: x from a layer that made them, w from a cache.

Forward and backward are cut at the casts, so that a fused operation, whose kernel writes the codes of x or of dy, calls
the parts after them: `x_buffers` and `forward_from`; `dy_buffers`, `input_gradient` and `finish`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo.communication.all_reduced_amaxes import all_reduced_cast, kept_amax
from octavo.ops.linear_config import OperandCast
from octavo.ops.operands import (
    DENSE,
    DY_BUFFERS,
    W_PARTS,
    X_PARTS,
    BackwardCall,
    Dense,
    Intermediates,
    Operand,
    Operands,
    Pair,
)
from octavo.quant.casts import as_matrix
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts, QTensor
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.runtime.contract import DTYPES, ForwardResult
from octavo.runtime.deferred_wgrad import abstract_dy_buffers, unfilled_dy_buffers
from octavo.runtime.gradient_targets import LazyTarget, Target, Writes, advance
from octavo.scaling.delayed_scaling import RunningAmaxes, X, cast_args

NO_CODES: Pair = (None, None)
NO_PARTS = (None, None, None)
WeightTarget = Target | LazyTarget | None


# -- forward ---------------------------------------------------------------------------------------------------------


def quantized(
    config: Any, inputs: Any, cast: OperandCast, x: Tensor, rows: Dense, running_amax: Tensor | None,
    source: Tensor | None = None, amax: Tensor | None = None,
) -> Pair:  # fmt: skip
    """Quantize x or w, or the rows of x that `source` names: by the operand's part of `scaling` if that is delayed, by
    all-reduced amaxes, or by an amax that is known."""
    row, column = cast.pair
    if row is None and column is None:
        return NO_CODES
    part, all_reduced = inputs.scaling[cast.scaling], inputs.all_reduced[cast.all_reduced]
    if all_reduced:
        of_groups = rows.groups is not None
        arguments = all_reduced_cast(config.recipe, cast.pair, part, all_reduced, running_amax, of_groups)
    elif amax is not None:
        arguments = CastArgs(amax=(amax, amax))
    else:
        arguments = cast_args(config.recipe, cast.pair, part, partial(rows.amax, x, source), running_amax)
    return rows.quantize(x, row, column, arguments if source is None else arguments._replace(source=source))


def x_buffers(
    config: Any, scaling: Parts, like: TensorProto, rows: Dense, running_amax: Tensor | None
) -> tuple[Pair, CastArgs]:
    """Return output buffers and cast arguments for a fused producer that writes x as codes."""
    inverse_scale = scaling[X] if scaling else None  # the one in use, whether or not an amax was seen
    arguments = CastArgs(inverse_scale=inverse_scale, running_amax=running_amax, groups=rows.groups)
    return rows.empty_pair(like, config.x_pair), arguments


def forward_from(
    config: Any, inputs: Any, x: Pair, rows: Dense, amaxes: RunningAmaxes, lead: tuple[int, ...] | None = None,
    x_amax: Tensor | None = None,
) -> ForwardResult:  # fmt: skip
    """Run the rest of forward after x's cast. A fused producer, which casts x itself, passes x's leading dims, and if
    `config.keeps_x_amax` the amax that it measured; `inputs` then have no x."""
    weight, w_amax, w = inputs.weight, None, NO_CODES
    if config.weight != "plain":
        spec = config.quant.fprop.right
        shape = tuple(weight.shape)
        w = None if spec is None else rows.assemble(spec, inputs.w_row, "row", shape, weight.dtype), None
    elif config.casts_w:
        matrix, own = rows.of_weight(weight) if rows.lead else (weight, rows)
        w_amax = own_amax(matrix, config.quant.fprop.right) if config.keeps_w_amax else None
        w = quantized(config, inputs, config.w_cast, matrix, own, amaxes.w, amax=w_amax)
    y = rows.output(config, inputs, x[0], w[0], lead)
    auxiliary: Parts = ()
    if config.output_parts:  # y's codes, by its own scale; y is an anchor that carries their gradient
        auxiliary, y = tuple(config.quant.fprop.left.quantize(y).tensors()), y.new_zeros(1).expand(y.shape)
    if config.dy_buffers:
        protos = abstract_buffers_for_dy(config, rows, TensorProto(tuple(y.shape), y.dtype, y.device))
        # the caller may write to x before a deferred dw reads it
        copy = (inputs.x.clone(memory_format=torch.contiguous_format),) if config.kept_x == "plain" else ()
        auxiliary = (*auxiliary, *unfilled_dy_buffers(protos), *copy)
    made_x = x[config.made_x == "column"] if config.made_x else None
    made_w = w[config.made_w == "column"] if config.made_w else None
    return ForwardResult((y,), auxiliary, Intermediates._make((
        *(NO_PARTS if made_x is None else (made_x.codes, made_x.scale, made_x.global_scale)),
        *rows.places,
        *(NO_PARTS if made_w is None else (made_w.codes, made_w.scale, made_w.global_scale)),
        torch.empty(0, weight.shape[-1], dtype=config.y_dtype, device=y.device) if config.keeps_width else None,
        x_amax, w_amax,
    )))  # fmt: skip


def own_amax(x: Tensor, spec: Quantizer) -> Tensor:
    """Measure x as a cast by this quantizer would."""
    matrix = x if x.dim() == 2 and not (x.requires_grad and torch.is_grad_enabled()) else as_matrix(x)
    amax = spec._measured(matrix, spec, None)[0]
    assert amax is not None
    return amax


def abstract_buffers_for_dy(config: Any, rows: Dense, y: TensorProto) -> tuple[TensorProto, ...]:
    """Describe the buffers for dy of a dw that a graph leaves to `backward_dw()` (octavo.runtime.deferred_wgrad)."""
    spec = config.dy_pair[1]
    if spec is None:
        return (y,)
    return abstract_dy_buffers(rows.proto(spec, "column", y), math.prod(y.shape[:-1]), y)


def dy_columns(config: Any, rows: Dense, buffers: Sequence[Tensor], n: int) -> QTensor:
    """Return dy's column codes [N, M], in the buffers."""
    return rows.assemble(config.dy_pair[1], buffers[:-1], "column", (n, buffers[-1].shape[0]), config.y_dtype)


# -- backward --------------------------------------------------------------------------------------------------------


def dy_buffers(call: BackwardCall, like: TensorProto) -> tuple[Pair, CastArgs]:
    """Return output buffers and cast arguments for a fused producer that writes dy as codes."""
    config, kept, buffers, _, rows = call
    seed = call.seed() if config.is_stochastic else None
    arguments = CastArgs(inverse_scale=kept.dy_inverse_scale, seed=seed, running_amax=buffers.amax, groups=rows.groups)
    return rows.empty_pair(like, config.dy_pair), arguments


def x_column_buffer(call: BackwardCall, like: TensorProto) -> tuple[Pair, CastArgs]:
    """Return the output buffer and cast arguments for a fused backward that makes x's column codes again."""
    if not call.config.wants_dw:
        return NO_CODES, CastArgs()
    kept, groups = call.kept, call.rows.groups
    arguments = CastArgs(amax=(None, kept.x_amax), inverse_scale=kept.x_inverse_scale, groups=groups)
    return call.rows.empty_pair(like, (None, call.config.quant.wgrad.right)), arguments


def x_columns_again(call: BackwardCall, x: Tensor, source: Tensor | None = None) -> QTensor:
    """Make the column codes of x, or of the rows of x that `source` names, as forward would have made them."""
    arguments = CastArgs(inverse_scale=call.kept.x_inverse_scale, source=source)
    column = call.rows.quantize(x, None, call.config.quant.wgrad.right, arguments)[1]
    assert column is not None
    return column


def quantized_dy(call: BackwardCall, dy: Tensor, source: Tensor | None = None) -> Pair:
    """Quantize dy, or the rows of dy that `source` names, by row and by column: the latter into the buffers of a
    deferred dw if there are any."""
    config, kept, buffers, _, rows = call
    pair = row, column = config.dy_pair
    if row is None and column is None:
        return NO_CODES
    part, running_amax = ((), None) if config.scales_dy_alone else (kept.dy_scaling, buffers.amax)
    seed = call.seed() if config.is_stochastic else None
    arguments = cast_args(config.recipe, pair, part, partial(rows.amax, dy, source), running_amax, seed)
    if config.dy_buffers < 2:
        return rows.quantize(dy, row, column, arguments if source is None else arguments._replace(source=source))
    tensors = [t for t in kept[DY_BUFFERS] if t is not None]
    codes = rows.empty_pair(dy, (row, None))[0], dy_columns(config, rows, tensors, dy.shape[-1])
    rows.fill(dy, codes, arguments)
    return codes


def input_gradient(call: BackwardCall, dy: Any, row: QTensor | None) -> Tensor:
    """Compute dx. If row codes are given, only dy's shape is used."""
    config, kept, _, _, rows = call
    form, n, weight = config.kept_w, dy.shape[-1], kept.w_codes
    assert weight is not None
    right: Operand
    if form == "column":
        right = rows.restored(config.quant.dgrad.right, kept[W_PARTS], form, (weight.shape[0], n), dy.dtype)
    elif form == "again":
        right = _columns_again(call, weight)
    else:
        k = weight.shape[-1] if kept.width is None else kept.width.shape[1]
        shape = (*rows.lead, n, k)
        if form == "transposed":
            right = rows.transposed(rows.weight_codes(config.quant.fprop.right, kept[W_PARTS], shape, dy.dtype))
        else:
            plain = form == "plain"
            right = weight.to(dy.dtype) if plain else weight_values(config, rows, kept[W_PARTS], shape, dy.dtype)
            right = right.transpose(-1, -2)
    return rows.input_product(call, dy, row, right)


def _columns_again(call: BackwardCall, weight: Tensor) -> QTensor:
    """Make the weight's column codes that forward would have made."""
    kept, spec, rows = call.kept, call.config.quant.dgrad.right, call.rows
    matrix, rows = rows.of_weight(weight) if rows.lead else (weight, rows)
    amax = None if kept.w_amax is None else kept_amax(kept.w_amax, spec, rows.groups is not None)
    column = rows.quantize(matrix, None, spec, CastArgs(amax=(None, amax), inverse_scale=kept.w_inverse_scale))[1]
    assert column is not None
    return column


def weight_values(
    config: Any, kind: Dense | type[Dense], row: Sequence[Any], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return the values of a weight of this shape that row codes stand for."""
    values: Tensor = kind.weight_codes(config.quant.fprop.right, row, shape, dtype).dequantize(dtype)
    return values if values.shape == shape else values.view(*shape[:-1], -1)[..., : shape[-1]]


def finish(call: BackwardCall, dy: Any, column: Operand | None, x_column: Operand | None = None) -> Tensor | None:
    """Compute dw, or if it is deferred, or a later pass takes it, leave its operands in the queue or in the buffers and
    return None; then advance the random counter. If column codes are given, only dy's shape is used."""
    config, kept, buffers, writes, rows = call
    dw: Tensor | None = None
    if config.wants_dw and config.dy_buffers:
        if column is None and kept.dy_buffer is not None:  # codes are in their place already
            kept.dy_buffer.copy_(dy.view(kept.dy_buffer.shape))
    elif config.wants_dw:
        left, right, k = column, x_column, None if kept.width is None else kept.width.shape[1]
        if left is None:
            left = rows.wgrad_operand(dy)
        if right is None and config.kept_x == "again":
            right = x_columns_again(call, kept.x_codes)
        elif right is None:
            right = x_operand(config, rows, kept[X_PARTS], k, math.prod(dy.shape[:-1]), dy.dtype)
        operands = Operands(left, right, rows, (*rows.lead, dy.shape[-1], right.shape[0] if k is None else k))
        if buffers.queue is not None:
            call.write(buffers.queue.put, config, *operands)
        else:
            dw = weight_gradient(config, operands, buffers.main_grad, writes)
    if config.is_stochastic and buffers.seed is not None:
        # after all else: a backward that fails before draws the same numbers when it is repeated. (The cast of dy
        # raised its amax; a second cast raises it no further.)
        call.write(advance, buffers.seed)
    return dw


def x_operand(
    config: Any, rows: Dense, parts: Sequence[Any], k: int | None, tokens: int, dtype: torch.dtype
) -> Operand:
    """Return x, contracted over the tokens, as dw's second operand."""
    codes = parts[0]
    if config.kept_x == "plain":
        return rows.wgrad_operand(codes.to(dtype))
    if config.kept_x == "column":
        return rows.restored(config.quant.wgrad.right, parts, "column", (codes.shape[0], tokens), dtype)
    return rows.x_of_rows(config, parts, codes.shape[1] if k is None else k, dtype)


def weight_gradient(
    config: Any, operands: Operands, target: WeightTarget, writes: Writes | None = None
) -> Tensor | None:
    """Compute dw. Both operands are contracted over the tokens. With a target, write dw there, and return None or zeros
    in its place."""
    rows, shape = operands.rows, operands.shape
    if target is None:
        return rows.weight_product(config, operands, DTYPES[config.weight_dtype])
    out = target.open(math.prod(shape[:-1]), shape[-1]).view(shape)
    return _delivered(config, target, rows, out, rows.prepared(config, operands, out.dtype), writes)


def deliver(config: Any, dw: Tensor, target: Target | LazyTarget, writes: Writes | None) -> Tensor | None:
    """Add or copy a dw of a dense layer to the memory of a target. Return None or zeros in its place."""
    return _delivered(config, target, DENSE, target.open(*dw.shape), dw, writes)


def _delivered(
    config: Any, target: Target | LazyTarget, rows: Dense, out: Tensor, prepared: Any, writes: Writes | None
) -> Tensor | None:
    if writes is None:
        _store(config, target, rows, out, prepared)
    else:
        writes.defer(_store, config, target, rows, out, prepared)
    return torch.zeros(out.shape, dtype=DTYPES[config.weight_dtype], device=out.device) if config.dummy_grad else None


def _store(config: Any, target: Target | LazyTarget, rows: Dense, out: Tensor, prepared: Any) -> None:
    """Add or copy dw to the memory that a target opened."""
    with preserve_version_counter(out):  # a graph in flight may have saved it
        rows.store(config, out, prepared)
    target.close()
