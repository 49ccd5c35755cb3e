"""The linear layer: y = x · wᵀ + bias, dx = dy · w, dw = dyᵀ · x, each GEMM as the recipe says.

The casts in forward and backward, for x [M, K], w [N, K], dy [M, N] ("column" is the other orientation, contracted over
M or N):

    forward    x row and column, w row and column, each from one read       y  = gemm(x row, w row)
    backward   dy row and column, from one read                              dx = gemm(dy row, w column)
                                                                             dw = gemm(dy column, x column)

A column that no gradient needs is not made. Backward keeps x's column codes and w's, an eighth to a half of what bf16
would take; an operand of a GEMM in high precision is kept as it is, by reference, and "dequantized" backward GEMMs run
on the row codes of forward. Operands may also arrive as codes: x from a layer that made them, w from a cache.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo._torch.operators import unsafe_view
from octavo.communication.all_reduced_amaxes import all_reduced_amaxes, all_reduced_cast, kept_amax
from octavo.kernels.column_sums import column_sums
from octavo.kernels.gemm import product
from octavo.ops.linear_config import Config as Config
from octavo.ops.linear_config import of_orientation
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
from octavo.quant.casts import as_matrix, empty_pair, fill_pair, in_order, quantize_pair
from octavo.quant.orientation import column_axis
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts, QProto, QTensor
from octavo.quant.quantizer import CastArgs, Quantizer, QuantizerPair
from octavo.quant.tensorwise import Tensorwise
from octavo.runtime.contract import DTYPES, ForwardResult, Tensors, WeightCast
from octavo.runtime.deferred_wgrad import abstract_dy_buffers
from octavo.runtime.gradient_targets import LazyTarget, Mail, Target, Writes
from octavo.scaling.cast_arguments import RunningAmaxes, cast_args, known_scale

Operand = Tensor | QTensor
Operands = tuple[Operand, Operand]  # of dw: dy, x


class Inputs(NamedTuple):
    x: Tensor | None  # [..., K]; for a quantized input, the token that carries its gradient, if it has one
    weight: Tensor  # [N, K]; for a quantized weight, the gradient anchor that receives its gradient
    bias: Tensor | None = None  # [N]
    x_codes: Parts = ()  # of a quantized input [M, K]
    w_row: Parts = ()  # of a weight given as codes: w's [N, K] ...
    w_column: Parts = ()  # ... and wᵀ's [K, N]
    scaling: Parts = ()  # delayed: inverse scales of x, w, dy; if one is measured also their amax counts
    running_amaxes: Parts = ()  # delayed, in training: running amaxes of x and w, one element each
    x_column: Parts = ()  # of a quantized input in the other orientation [K, M]
    all_reduced: Parts = ()  # all-reduced amaxes, bits of one element each: row's and column's, of x and of w


class Buffers(NamedTuple):
    """Tensors that backward writes to besides its results."""

    main_grad: Target | LazyTarget | None = None
    amax: Tensor | None = None  # [1]: the amax of dy, folded by maximum
    seed: Tensor | None = None  # [2] int64: seed and step of stochastic rounding; the step advances
    mail: Mail | None = None


class Intermediates(NamedTuple):
    """Codes of x and w that forward makes and backward needs."""

    x_codes: Any = None
    x_scale: Any = None
    x_global_scale: Any = None
    w_codes: Any = None
    w_scale: Any = None
    w_global_scale: Any = None
    width: Any = None  # [0, K], for its shape alone
    x_amax: Any = None  # [1, 1] float32: what forward measured, if backward makes column codes of x or w
    w_amax: Any = None


class SavedTensors(NamedTuple):
    """x as dw needs it, w as dx needs it (a QTensor's tensors, or one plain tensor in the place of its codes), and the
    arguments of casts in backward."""

    x_codes: Tensor | None = None
    x_scale: Tensor | None = None
    x_global_scale: Tensor | None = None
    w_codes: Tensor | None = None
    w_scale: Tensor | None = None
    w_global_scale: Tensor | None = None
    width: Tensor | None = None  # [0, K], for its shape alone
    dy_inverse_scale: Tensor | None = (
        None  # delayed: dy's inverse scale, and how many amaxes it has seen if it is measured
    )
    dy_amax_count: Tensor | None = None
    x_inverse_scale: Tensor | None = (
        None  # delayed inverse scales of x's and w's columns, if those are made in backward
    )
    w_inverse_scale: Tensor | None = None
    x_amax: Tensor | None = None  # their amaxes, if one was measured; as bits, if ranks agreed on one
    w_amax: Tensor | None = None
    dy_buffer: Tensor | None = None  # for a deferred dw in a graph: dy itself, or its codes and the rest
    dy_buffer_1: Tensor | None = None
    dy_buffer_2: Tensor | None = None
    dy_buffer_3: Tensor | None = None


class Saved(SavedTensors, SavedOperands):
    """The tensors that backward needs."""

    __slots__ = ()


class LinearLayer(MatmulLayer):
    """Computes x · wᵀ + bias."""

    def decided_by_layout(self, config: Config, side: str) -> bool:
        return config.shipped

    def flat_places(self, config: Config) -> tuple[int, ...]:
        # one scale of a whole tensor is [1, 1] for any sizes: it leaves a node as it is, without a view each way
        made = {"x_scale": (config.made_x, config.x_pair), "w_scale": (config.made_w, config.w_pair)}
        whole = [name for name, one in made.items() if (spec := of_orientation(*one)) and spec.block == (None, None)]
        return tuple([Intermediates._fields.index(name) for name in self.scales if name not in whole])

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        amaxes = RunningAmaxes(*inputs.running_amaxes)
        x_amax = _own_amax(inputs.x, config.quant.fprop.left) if config.keeps_x_amax else None
        x = _quantized_x(config, inputs, amaxes.x, x_amax)
        return forward_from(config, inputs, x, amaxes, x_amax=x_amax)

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        weight: Any = inputs.weight
        x: Any = inputs.x if inputs.x is not None else inputs.x_codes[0]
        y = TensorProto((*x.shape[:-1], weight.shape[0]), config.y_dtype, weight.device)
        output, auxiliary = _abstract_quantized_output(config, y) if config.quantize_output else (y, ())
        if config.dy_buffers:
            auxiliary = (*auxiliary, *abstract_deferred_auxiliary(config, x, _abstract_dy_buffers(config, y)))
        x_kept = _abstract_codes(config.made_x, config.x_pair, x)
        w_kept = _abstract_codes(config.made_w, config.w_pair, weight)
        width = TensorProto((0, weight.shape[1]), weight.dtype, weight.device) if config.keeps_width else None
        x_amax, w_amax = (
            TensorProto((1, 1), torch.float32, weight.device) if keeps else None
            for keeps in (config.keeps_x_amax, config.keeps_w_amax)
        )
        return ForwardResult((output,), auxiliary, Intermediates(*x_kept, *w_kept, width, x_amax, w_amax))

    def wants(self, config: Config) -> tuple[bool, ...]:
        return "x" in config.grads, config.returns_dw, "b" in config.grads, *[False] * (len(Inputs._fields) - 3)

    def abstract_gradients(self, config: Config, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        x, w, b, *rest = self.wants(config)
        n, k = dy.shape[-1], _width(config, Saved._make(saved))
        return (
            TensorProto((*dy.shape[:-1], k), dy.dtype, dy.device) if x else None,
            TensorProto((n, k), DTYPES[config.weight_dtype], dy.device) if w else None,
            TensorProto((n,), DTYPES[config.bias_dtype], dy.device) if b else None,
            *[None] * len(rest),
        )

    def flops(self, config: Config, inputs: Inputs) -> int:
        lead = (inputs.x if inputs.x is not None else inputs.x_codes[0]).shape[:-1]
        return 2 * math.prod(lead) * inputs.weight.shape[0] * inputs.weight.shape[1]

    def gradient_flops(self, config: Config, saved: Any, dy: Any) -> int:
        gemms = ("x" in config.grads) + ("w" in config.grads and not config.deferred_wgrad)
        return int(gemms * 2 * math.prod(dy.shape) * _width(config, Saved._make(saved)))

    def deferred_operands(self, config: Config, tensors: Parts, x: Parts, weight: Tensor) -> Operands:
        buffers, codes = tensors[: config.dy_buffers], tensors[config.dy_buffers :] or x
        dy: Operand = flat(buffers[0]).T if len(buffers) == 1 else _dy_columns(config, buffers, weight.shape[0])
        tokens = dy.columns if isinstance(dy, QTensor) else dy.shape[1]
        kept = Saved(*Kept(*codes), width=weight.detach()[:0])
        return dy, _x_operand(config, kept, tokens, config.y_dtype)

    def abstract_weight(self, config: Config, weight: TensorProto) -> tuple[QProto | None, QProto | None]:
        row, column = config.quant.fprop.right, config.quant.dgrad.right
        return (None if row is None else row.proto(weight)), (None if column is None else column.proto(weight, 0))

    def weight_codes(
        self, config: Config, row: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> QTensor:
        spec = config.quant.fprop.right
        assert spec is not None
        return spec.assemble(row, shape, dtype)

    def weight_values(
        self, config: Config, row: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        return self.weight_codes(config, row, shape, dtype).dequantize(dtype)

    def refresh(self, config: Config, cast: WeightCast) -> None:
        weight, (n, k) = cast.weight, cast.weight.shape
        row, column = config.quant.fprop.right, config.quant.dgrad.right
        codes = (
            None if row is None or not cast.row else row.assemble(cast.row, (n, k), weight.dtype),
            None if column is None or not cast.column else column.assemble(cast.column, (k, n), weight.dtype),
        )
        if cast.all_reduced:
            running_amax = cast.amaxes[0].chunk(2)[1] if cast.amaxes else None
            found = all_reduced_cast(config.recipe, (row, column), cast.scaling, cast.all_reduced, running_amax)
            fill_pair(as_matrix(weight), codes, found._replace(skip=cast.skip))
            return
        fill_pair(as_matrix(weight), codes, weight_cast_args(config, cast, (row, column), partial(_amax, weight)))

    def save(self, config: Config, inputs: Inputs, made: ForwardResult) -> Saved:
        intermediates = Intermediates._make(made.intermediates)
        given = inputs._replace(x_codes=inputs.x_column) if config.x_has_columns else inputs
        scaling = saved_scaling(config, inputs.scaling, inputs.all_reduced)
        return Saved(
            *saved_operands(config, given, intermediates),
            intermediates.width,
            *scaling[:-1],
            intermediates.x_amax,
            intermediates.w_amax if scaling[-1] is None else scaling[-1],  # that of all ranks
            *made.auxiliary[config.dy_buffer_auxiliary],
        )

    def backward(
        self, config: Config, saved: Any, buffers: Buffers, grads: Tensors, writes: Writes | None = None
    ) -> Tensors:
        dy = grads[0]
        if dy is None:
            return (None,) * len(Inputs._fields)
        call = Backward(config, Saved._make(saved), buffers, writes)
        row, column = quantized_dy(call, dy)
        dx = input_gradient(call, dy, row) if "x" in config.grads else None
        db = column_sums(flat(dy), DTYPES[config.bias_dtype]) if "b" in config.grads else None
        return gradients(dx, finish(call, dy, column), db)

    def weight_gradient(
        self, config: Config, operands: Operands, target: Target | LazyTarget | None, writes: Writes | None = None
    ) -> Tensor | None:
        """Compute dw. Both operands are contracted over the tokens."""
        dy, x = operands
        accumulation = config.quant.wgrad.accumulation
        if target is None:
            return product(dy, x, DTYPES[config.weight_dtype], None, accumulation)
        n, k = (q.rows if isinstance(q, QTensor) else q.shape[0] for q in operands)
        out = target.open(n, k)
        dw = product(dy, x, out.dtype, None, accumulation)
        if writes is None:
            _store(config, target, out, dw)
        else:
            writes.put_off(_store, config, target, out, dw)
        return torch.zeros(n, k, dtype=DTYPES[config.weight_dtype], device=out.device) if config.dummy_grad else None


layer = LinearLayer(Config, Inputs, Intermediates, Saved, Buffers)


# -- forward ---------------------------------------------------------------------------------------------------------


def forward_from(
    config: Config, inputs: Inputs, x: tuple[QTensor | None, QTensor | None], amaxes: RunningAmaxes,
    lead: tuple[int, ...] | None = None, x_amax: Tensor | None = None,
) -> ForwardResult:  # fmt: skip
    """Run the rest of forward after x's cast. A fused producer, which casts x itself, passes x's leading dims, and if
    `config.keeps_x_amax` the amax that it measured."""
    w_amax = _own_amax(inputs.weight, config.quant.fprop.right) if config.keeps_w_amax else None
    w = _quantized_w(config, inputs, amaxes.w, w_amax)
    y = _output(config, inputs, x[0], w[0], lead)
    auxiliary: Parts = ()
    if config.quantize_output:
        y, auxiliary = _quantized_output(config, y, auxiliary)
    if config.dy_buffers:
        like = TensorProto(tuple(y.shape), y.dtype, y.device)
        auxiliary = (*auxiliary, *deferred_auxiliary(config, inputs.x, _abstract_dy_buffers(config, like)))
    width = inputs.weight.new_empty(0, inputs.weight.shape[1]) if config.keeps_width else None
    x_kept = Kept.of(x[config.made_x == "column"] if config.made_x else None)
    w_kept = Kept.of(w[config.made_w == "column"] if config.made_w else None)
    return ForwardResult((y,), auxiliary, Intermediates(*x_kept, *w_kept, width, x_amax, w_amax))


def _output(
    config: Config, inputs: Inputs, x: QTensor | None, w: QTensor | None, lead: tuple[int, ...] | None
) -> Tensor:
    """Compute y, from the codes of x and w where there are some."""
    y = product(
        _matrix(inputs.x, config.y_dtype) if x is None else x,
        inputs.weight.to(config.y_dtype) if w is None else w,
        config.y_dtype,
        inputs.bias,
        config.quant.fprop.accumulation,
    )
    if lead is None and inputs.x is not None and inputs.x.dim() != 2:
        lead = tuple(inputs.x.shape[:-1])
    if lead is None or len(lead) == 1:
        return y
    shaped: Tensor = unsafe_view(y, (*lead, y.shape[-1]))  # no view: the matrix has no other holder
    return shaped


def x_buffers(
    config: Config, scaling: Parts, like: TensorProto, running_amax: Tensor | None
) -> tuple[tuple[QTensor | None, QTensor | None], CastArgs]:
    """Output buffers and cast arguments for a fused producer that writes x as codes."""
    return empty_pair(like, *config.x_pair, one_scale=True), known_scale(scaling[config.x_scaling], running_amax)


def _matrix(x: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert x is not None
    return flat(x).to(dtype)


def flat(x: Tensor) -> Tensor:
    """[..., K] as [M, K]."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _quantized_x(
    config: Config, inputs: Inputs, running_amax: Tensor | None, amax: Tensor | None
) -> tuple[QTensor | None, QTensor | None]:
    if config.x == "codes":
        spec = config.quant.fprop.left
        assert spec is not None
        shape = (inputs.x_codes[0].shape[0], inputs.weight.shape[1])
        return spec.assemble(inputs.x_codes, shape, config.y_dtype), None
    assert inputs.x is not None
    all_reduced = all_reduced_amaxes("x", config.all_reduced, inputs.all_reduced)
    part = inputs.scaling[config.x_scaling]
    return _quantize(config, inputs.x, config.x_pair, part, running_amax, all_reduced=all_reduced, amax=amax)


def _quantized_w(
    config: Config, inputs: Inputs, running_amax: Tensor | None, amax: Tensor | None
) -> tuple[QTensor | None, QTensor | None]:
    if config.weight == "plain":
        all_reduced, part = (
            all_reduced_amaxes("w", config.all_reduced, inputs.all_reduced),
            inputs.scaling[config.w_scaling],
        )
        return _quantize(config, inputs.weight, config.w_pair, part, running_amax, all_reduced=all_reduced, amax=amax)
    spec = config.quant.fprop.right
    n, k = inputs.weight.shape
    return (None if spec is None else spec.assemble(inputs.w_row, (n, k), inputs.weight.dtype)), None


def _quantize(
    config: Config,
    x: Tensor,
    pair: QuantizerPair,
    scaling: Sequence[Tensor],
    running_amax: Tensor | None,
    seed: Tensor | None = None,
    all_reduced: Parts = (),
    amax: Tensor | None = None,
) -> tuple[QTensor | None, QTensor | None]:
    """Quantize x in the orientations of a pair of quantizers, by x's part of `scaling` if that is delayed, or by an
    amax of x that is known."""
    if pair[0] is None and pair[1] is None:
        return None, None
    if all_reduced:
        arguments = all_reduced_cast(config.recipe, pair, scaling, all_reduced, running_amax)
    elif amax is not None:
        arguments = CastArgs(amax=(amax, amax))
    else:
        arguments = cast_args(config.recipe, pair, scaling, partial(_amax, x), running_amax, seed)
    return quantize_pair(x, *pair, arguments, one_scale=True)


def _amax(x: Tensor, spec: Tensorwise, skip: Tensor) -> Tensor:
    return spec.amax(x, skip=skip).view(1)


def _own_amax(x: Tensor | None, spec: Quantizer | None) -> Tensor:
    """x's amax, measured as a cast by this quantizer would."""
    assert x is not None and spec is not None
    matrix = x if x.dim() == 2 and not (x.requires_grad and torch.is_grad_enabled()) else as_matrix(x)
    amax = spec._measured(matrix, spec, None, None, None, None)[0]
    assert amax is not None
    return amax


def _quantized_output(config: Config, y: Tensor, auxiliary: Parts) -> tuple[Tensor, Parts]:
    """Return a token that carries the gradient, and the extras with y's codes in front. The scale is y's own."""
    spec = config.quant.fprop.left
    assert spec is not None
    return y.new_zeros(1).expand(y.shape), (*spec.quantize(y).tensors(), *auxiliary)


def _abstract_quantized_output(config: Config, y: TensorProto) -> tuple[TensorProto, tuple[TensorProto, ...]]:
    spec = config.quant.fprop.left
    assert spec is not None
    anchor = TensorProto(y.shape, y.dtype, y.device, (0,) * len(y.shape))
    return anchor, tuple(p for p in Kept.of(spec.proto(y)) if p is not None)


def _abstract_codes(orientation: str, pair: QuantizerPair, x: TensorProto) -> Kept:
    spec = of_orientation(orientation, pair)
    axis = column_axis(len(x.shape)) if orientation == "column" else -1
    return Kept.of(None if spec is None else spec.proto(x, axis))


def _width(config: Config, kept: Saved) -> int:
    """Read K from the tensors that were kept."""
    x, w = kept.x_codes, kept.w_codes
    if kept.width is not None:
        return kept.width.shape[1]
    if w is not None:
        return w.shape[0] if config.kept_w == "column" else w.shape[1]
    if x is not None:
        return x.shape[0] if config.kept_x == "column" else x.shape[-1]
    return 0


# -- a weight gradient that a graph leaves to backward_dw() (octavo.runtime.deferred_wgrad) ----------------------------


def _abstract_dy_buffers(config: Config, y: TensorProto) -> tuple[TensorProto, ...]:
    """Buffers for dy as dw needs it."""
    spec = config.dy_pair[1]
    if spec is None:
        return (y,)
    q = spec.proto(y, column_axis(len(y.shape)))
    return abstract_dy_buffers(q, q.shape[1], y)


def _dy_columns(config: Config, buffers: Sequence[Tensor], rows: int) -> QTensor:
    """dy's column codes [N, M], in the buffers."""
    spec = config.dy_pair[1]
    assert spec is not None
    return spec.assemble(buffers[:-1], (rows, buffers[-1].shape[0]), config.y_dtype)


# -- backward --------------------------------------------------------------------------------------------------------


def gradients(dx: Tensor | None, dw: Tensor | None, db: Tensor | None) -> Tensors:
    """One gradient for each input."""
    return dx, dw, db, *[None] * (len(Inputs._fields) - 3)


def dy_buffers(call: Backward, like: TensorProto) -> tuple[tuple[QTensor | None, QTensor | None], CastArgs]:
    """Output buffers and cast arguments for a fused producer that writes dy as codes."""
    arguments = known_scale(call.kept.dy_scaling, call.buffers.amax)._replace(seed=call.seed())
    return empty_pair(like, *call.config.dy_pair, one_scale=True), arguments


def x_column_buffer(call: Backward, like: TensorProto) -> tuple[QTensor | None, CastArgs]:
    """The output buffer and cast arguments for a fused backward that makes x's column codes again."""
    if "w" not in call.config.grads:
        return None, CastArgs()
    arguments = CastArgs(amax=(None, call.kept.x_amax), inverse_scale=call.kept.x_inverse_scale)
    return empty_pair(like, None, call.config.quant.wgrad.right)[1], arguments


def finish(call: Backward, dy: Any, column: QTensor | None, x_column: QTensor | None = None) -> Tensor | None:
    """Compute dw, then advance the random counter. If column codes are given, only dy's shape is used."""
    dw = _weight_gradient(call, dy, column, x_column) if "w" in call.config.grads else None
    call.advance()
    return dw


def _weight_gradient(call: Backward, dy: Any, column: QTensor | None, x_column: QTensor | None) -> Tensor | None:
    """Compute dw. If it is deferred, leave its operands in the queue or in the buffers, and return None."""
    config, kept, buffers, writes = call
    if config.dy_buffers:
        if column is None and kept.dy_buffer is not None:  # codes are in their place already
            kept.dy_buffer.copy_(dy.view(kept.dy_buffer.shape))
        return None
    left: Operand = flat(dy).T if column is None else column
    right = _x_operand(config, kept, math.prod(dy.shape[:-1]), dy.dtype) if x_column is None else x_column
    if config.deferred_wgrad:
        assert buffers.mail is not None
        call.write(buffers.mail.put, config, left, right)
        return None
    return layer.weight_gradient(config, (left, right), buffers.main_grad, writes)


def quantized_dy(call: Backward, dy: Tensor) -> tuple[QTensor | None, QTensor | None]:
    """Quantize dy by row and by column, the latter into the buffers of a deferred dw if there are any."""
    config, kept, buffers, _ = call
    pair, seed = config.dy_pair, call.seed()
    if config.dy_buffers < 2:
        return _quantize(config, dy, pair, kept.dy_scaling, buffers.amax, seed)
    row = None if pair[0] is None else pair[0].proto(TensorProto.of(dy)).empty()
    codes = row, _dy_columns(config, kept.dy_buffers, dy.shape[-1])
    arguments = cast_args(config.recipe, pair, kept.dy_scaling, partial(_amax, dy), buffers.amax, seed)
    fill_pair(as_matrix(dy), codes, arguments)
    return codes


def input_gradient(call: Backward, dy: Any, row: QTensor | None) -> Tensor:
    """Compute dx. If row codes are given, only dy's shape is used."""
    config, kept, n = call.config, call.kept, dy.shape[-1]
    codes = kept.w_codes
    assert codes is not None
    right: Operand
    if config.kept_w == "plain":
        right = codes.to(dy.dtype).T
    elif config.kept_w == "again":
        right = _columns_again(config, codes, kept)
    elif config.kept_w == "row":
        assert config.quant.fprop.right is not None
        shape = (n, _columns_of(kept, codes))
        right = _assembled(config.quant.fprop.right, kept.w, shape, dy.dtype).dequantize().T
    else:
        assert config.quant.dgrad.right is not None
        right = _assembled(config.quant.dgrad.right, kept.w, (codes.shape[0], n), dy.dtype)
    left = flat(dy) if row is None else row
    dx = product(left, right, dy.dtype, None, config.quant.dgrad.accumulation)
    return dx if len(dy.shape) == 2 else dx.view(*dy.shape[:-1], dx.shape[-1])


def _columns_again(config: Config, weight: Tensor, kept: Saved) -> QTensor:
    """Make the weight's column codes that forward would have made."""
    spec = config.quant.dgrad.right
    amax = None if kept.w_amax is None else kept_amax(kept.w_amax, spec)
    _, column = quantize_pair(weight, None, spec, CastArgs(amax=(None, amax), inverse_scale=kept.w_inverse_scale))
    assert column is not None
    return column


def _columns_of(kept: Saved, codes: Tensor) -> int:
    return codes.shape[1] if kept.width is None else kept.width.shape[1]


def _x_operand(config: Config, kept: Saved, tokens: int, dtype: torch.dtype) -> Operand:
    """xᵀ, contracted over the tokens, as dw's second operand."""
    codes = kept.x_codes
    assert codes is not None
    if config.kept_x == "plain":
        return flat(codes).to(dtype).T
    if config.kept_x == "column":
        assert config.quant.wgrad.right is not None
        return _assembled(config.quant.wgrad.right, kept.x, (codes.shape[0], tokens), dtype)
    spec = config.quant.fprop.left
    assert spec is not None
    q = _assembled(spec, kept.x, (codes.shape[0], _columns_of(kept, codes)), dtype)
    return q.transpose() if config.wgrad_mode == "quantized" else q.dequantize().T


def _assembled(spec: Quantizer, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> QTensor:
    q = spec.assemble(parts, shape, dtype)
    return in_order(q, spec._scale_strides(*q.scale.shape))


def _store(config: Config, target: Target | LazyTarget, out: Tensor, dw: Tensor) -> None:
    """Add or copy dw to the matrix that a target opened."""
    with preserve_version_counter(out):  # a graph in flight may have saved it
        out.add_(dw) if config.main_grad == "add" else out.copy_(dw)
    target.close()
