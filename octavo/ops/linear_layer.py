"""The linear layer: y = x · wᵀ + bias, as `octavo.ops.matmul` computes it.

Its functions take rows of either kind (`octavo.ops.operands`): `octavo.ops.grouped_linear_layer` is the same layer with
rows in groups, and states only what is its own.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from octavo.communication.all_reduced_amaxes import all_reduced_cast
from octavo.ops.linear_config import Config as Config
from octavo.ops.linear_config import LinearSettings, of_orientation
from octavo.ops.matmul import (
    NO_PARTS,
    WeightTarget,
    abstract_buffers_for_dy,
    dy_columns,
    finish,
    forward_from,
    input_gradient,
    own_amax,
    quantized,
    quantized_dy,
    weight_gradient,
    weight_values,
    x_operand,
)
from octavo.ops.operands import DENSE, PLACES, WHOLE, BackwardCall, Dense, Intermediates, Operands, Pair, Saved
from octavo.quant.groups import Groups
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts, QProto
from octavo.runtime.contract import Deferral, ForwardResult, Layer, Tensors, WeightCast, wanted_protos
from octavo.runtime.gradient_targets import LazyTarget, OperandQueue, Target, Writes
from octavo.scaling.delayed_scaling import RunningAmaxes, W, X, cast_args


class Inputs(NamedTuple):
    x: Tensor | None  # [..., K]; for a quantized input, the anchor that carries its gradient, if it has one
    weight: Tensor  # [N, K]; for a quantized weight, the gradient anchor that receives its gradient
    bias: Tensor | None = None  # [N]
    x_codes: Parts = ()  # of a quantized input [M, K]
    w_row: Parts = ()  # of a weight given as codes: w's [N, K] ...
    w_column: Parts = ()  # ... and wᵀ's [K, N]
    scaling: Parts = ()  # delayed: inverse scales of x, w, dy; if one is uncalibrated also their amax counts
    running_amaxes: Parts = ()  # delayed, in training: running amaxes of x and w, one element each
    x_column: Parts = ()  # of a quantized input in the other orientation [K, M]
    all_reduced: Parts = ()  # all-reduced amaxes, bits of one element each: row's and column's, of x and of w


class Buffers(NamedTuple):
    """Tensors that backward writes to besides its results."""

    main_grad: Target | LazyTarget | None = None
    amax: Tensor | None = None  # [1]: the amax of dy, folded by maximum
    seed: Tensor | None = None  # [2] int64: seed and step of stochastic rounding; the step advances
    queue: OperandQueue | None = None


class LinearLayer(Layer):
    """Compute x · wᵀ + bias. The rows of x are dense unless a subclass passes others. The weight may arrive as codes,
    and dw may be computed later."""

    scales = ("x_scale", "w_scale")
    kind: ClassVar[Any] = Dense

    def rows_of(self, inputs: Any, rows: int) -> Dense:
        """Return how this many rows of x lie."""
        return DENSE

    def backward_call(self, config: Any, saved: Any, buffers: Any, writes: Writes | None, rows: int) -> BackwardCall:
        """Return a call of backward for dy with that many rows."""
        kept: Any = Saved._make(saved)
        own = DENSE if kept.start is None else self.kind(Groups._make((*kept[PLACES], rows)))
        return BackwardCall(config, kept, buffers, writes, own)

    # -- the four that every layer defines

    def forward(self, config: Any, inputs: Any) -> ForwardResult:
        rows = DENSE if self.kind is Dense else self.rows_of(inputs, inputs.x.shape[0])
        amaxes, x_amax = RunningAmaxes(*inputs.running_amaxes), None
        if config.x == "codes":
            return forward_from(config, inputs, (rows.given_x(config, inputs), None), rows, amaxes)
        if config.keeps_x_amax:
            x_amax = own_amax(inputs.x, config.quant.fprop.left)
        x = quantized(config, inputs, config.x_cast, inputs.x, rows, amaxes.x, amax=x_amax)
        return forward_from(config, inputs, x, rows, amaxes, x_amax=x_amax)

    def abstract(self, config: Any, inputs: Any, rows: Dense = DENSE) -> ForwardResult:
        weight: Any = inputs.weight
        x: Any = inputs.x if inputs.x is not None else inputs.x_codes[0]
        n, k, device = weight.shape[-2], weight.shape[-1], weight.device
        y = TensorProto((*x.shape[:-1], n), config.y_dtype, device)
        output, auxiliary = y, tuple[TensorProto, ...]()
        if config.output_parts:  # y is then an anchor that carries the gradient of its codes
            output = TensorProto(y.shape, y.dtype, y.device, (0,) * len(y.shape))
            auxiliary = tuple([p for p in _parts(config.quant.fprop.left.proto(y)) if p is not None])
        if config.dy_buffers:
            copy = (TensorProto(tuple(x.shape), x.dtype, x.device),) if config.kept_x == "plain" else ()
            auxiliary = (*auxiliary, *abstract_buffers_for_dy(config, rows, y), *copy)
        x_spec, w_spec = of_orientation(config.made_x, config.x_pair), of_orientation(config.made_w, config.w_pair)
        amaxes = [
            TensorProto((1, 1), torch.float32, device) if keeps else None
            for keeps in (config.keeps_x_amax, config.keeps_w_amax)
        ]
        return ForwardResult((output,), auxiliary, Intermediates._make((
            *_parts(None if x_spec is None else rows.proto(x_spec, config.made_x, x)),
            *rows.places,
            *_parts(None if w_spec is None else self.kind.weight_proto(w_spec, config.made_w, weight)),
            TensorProto((0, k), config.y_dtype, device) if config.keeps_width else None,
            *amaxes,
        )))  # fmt: skip

    def save(self, config: Any, inputs: Any, made: ForwardResult) -> Saved:
        """Select x, w and the arguments of casts from the inputs or from what forward made."""
        intermediates = Intermediates._make(made.intermediates)
        x: Sequence[Any] = intermediates[:3]
        w: Sequence[Any] = intermediates[8:11]
        if config.dy_buffers:
            x = NO_PARTS  # the deferred dw has it
        elif config.kept_x in ("plain", "again"):
            x = inputs.x, None, None
        elif config.kept_x and not config.made_x:
            x = _three(inputs.x_column if config.kept_x == "column" else inputs.x_codes)
        again = config.kept_w == "again"
        if again or config.kept_w == "plain":
            w = inputs.weight, None, None
        elif config.kept_w and not config.made_w:
            w = _three(inputs.w_column if config.kept_w == "column" else inputs.w_row)
        dy_inverse_scale, dy_amax_count = (*inputs.scaling[config.dy_scaling], None, None)[:2]
        x_again = inputs.scaling and config.wants_dw and (config.x_columns == "backward" or config.kept_x == "again")
        w_amaxes = inputs.all_reduced[config.w_cast.all_reduced] if again else ()
        return Saved._make((
            *x, *w, intermediates.width, dy_inverse_scale, dy_amax_count,
            inputs.scaling[X] if x_again else None, inputs.scaling[W] if again and inputs.scaling else None,
            intermediates.x_amax, w_amaxes[1] if w_amaxes else intermediates.w_amax,  # the former is that of all ranks
            inputs.bias if config.wants_ds else None,
            inputs.scales if config.scales_dtype and config.wants_db else None,
            *intermediates[3:8], *(*made.auxiliary[config.dy_buffer_auxiliary], None, None, None, None)[:4],
        ))  # fmt: skip

    def backward(
        self, config: Any, saved: Any, buffers: Any, grads: Tensors, writes: Writes | None = None,
        rows: Dense = DENSE, codes: Pair | None = None,
    ) -> Tensors:  # fmt: skip
        """Return one gradient for each input. `codes` are dy's, if they arrived."""
        dy = grads[0]
        if dy is None:
            return self.gradients(None, None, None)
        call = BackwardCall(config, Saved._make(saved), buffers, writes, rows)
        row, column = quantized_dy(call, dy) if codes is None else codes
        dx = input_gradient(call, dy, row) if config.wants_dx else None
        db, ds = rows.bias_gradients(call, dy)
        return self.gradients(dx, finish(call, dy, column), db, ds)  # buffers are written last

    # -- gradients

    def gradients(self, dx: Any, dw: Any, db: Any, ds: Any = None) -> tuple[Any, ...]:
        """Return one gradient for each input. Only a grouped layer has scales of its bias, as its fifth input."""
        return dx, dw, db, None, ds, *[None] * (len(self.Inputs._fields) - 5)

    def wants(self, config: Any) -> tuple[bool, ...]:
        wanted = self.gradients(config.wants_dx, config.returns_dw, config.wants_db, config.wants_ds)
        return tuple([bool(one) for one in wanted])

    def has_backward(self, config: Any) -> bool:
        return any((config.wants_dx, config.wants_dw, config.wants_db, config.wants_ds))

    def deferrable_gradients(self, config: Any) -> dict[int, Deferral]:
        queue, target = (self.Buffers._fields.index(name) for name in ("queue", "main_grad"))
        defers = config.wants_dw and not config.deferred_wgrad
        return {self.Inputs._fields.index("weight"): Deferral(queue, target)} if defers else {}

    def abstract_gradients(self, config: Any, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        kept = Saved._make(saved)
        lead = () if kept.start is None else (kept.start.shape[0] - 1,)
        n, k = dy.shape[-1], _width(config, kept)
        wants = config.wants_dx and not config.dgrad_out, config.returns_dw, config.wants_db, config.wants_ds
        own = (((*dy.shape[:-1], k), dy.dtype), ((*lead, n, k), config.weight_dtype), ((*lead, n), config.bias_dtype),
               (dy.shape[:1], config.scales_dtype))  # fmt: skip
        return self.gradients(*wanted_protos(dy, wants, *own))

    # -- weights, and a dw that is computed later

    def abstract_weight(self, config: Any, weight: Any) -> tuple[QProto | None, QProto | None]:
        """Return row and column codes of a weight, without data; None for an orientation that the recipe does not
        use."""
        row, column = config.quant.fprop.right, config.quant.dgrad.right
        return (
            None if row is None else self.kind.weight_proto(row, "row", weight),
            None if column is None else self.kind.weight_proto(column, "column", weight),
        )

    def weight_codes(self, config: Any, row: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Return the QTensor or GroupedTensor of a weight with these row codes; columns that GEMMs read besides are in
        it."""
        return self.kind.weight_codes(config.quant.fprop.right, row, shape, dtype)

    def weight_values(self, config: Any, row: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the weight that row codes stand for."""
        return weight_values(config, self.kind, row, shape, dtype)

    def refresh(self, config: Any, cast: WeightCast) -> None:
        """Overwrite cached codes of a weight."""
        pair = config.quant.fprop.right, config.quant.dgrad.right
        matrix, rows = self.kind.of_weight(cast.weight)
        n, k = cast.weight.shape[-2:]
        row, column = (
            rows.assemble(spec, parts, side, shape, matrix.dtype) if spec is not None and parts else None
            for spec, parts, side, shape in zip(
                pair, (cast.row, cast.column), ("row", "column"), ((n, k), (k, n)), strict=True
            )
        )
        # the weight's amaxes follow x's in one tensor, in equal number
        running_amax = cast.amaxes[0].chunk(2)[1] if cast.amaxes else None
        if cast.all_reduced:
            arguments = all_reduced_cast(
                config.recipe, pair, cast.scaling, cast.all_reduced, running_amax, rows.groups is not None
            )
        else:
            arguments = cast_args(config.recipe, pair, cast.scaling, partial(rows.amax, matrix, None), running_amax)
        rows.fill(matrix, (row, column), arguments._replace(skip=cast.skip))

    def deferred_operands(self, config: Any, tensors: Parts, x: Parts, weight: Tensor) -> Operands:
        """Return the operands of a dw that a graph left to `backward_dw()`, from the tensors of its `deferred_span`; x
        is given where the graph made no codes of it."""
        end = len(tensors) - config.group_tensors
        buffers, codes = tensors[: config.dy_buffers], tensors[config.dy_buffers : end] or x
        tokens, n, k = math.prod(buffers[-1].shape[:-1]), *weight.shape[-2:]
        rows = self.kind(Groups._make((*tensors[end:], tokens))) if config.group_tensors else DENSE
        dy = rows.wgrad_operand(buffers[0]) if len(buffers) == 1 else dy_columns(config, rows, buffers, n)
        right = x_operand(config, rows, _three(codes), k, tokens, config.y_dtype)
        return Operands(dy, right, rows, tuple(weight.shape))

    def weight_gradient(
        self, config: Any, operands: Any, target: WeightTarget, writes: Writes | None = None
    ) -> Tensor | None:
        """Compute dw from its operands. With a target, the layer writes dw there, and returns None or zeros in its
        place."""
        return weight_gradient(config, Operands._make(operands), target, writes)

    # -- what the driver asks

    def decided_by_layout(self, config: Any, side: str) -> bool:
        return config.shipped

    def graph_buffers(
        self, config: Any, main_grad: Parts, amax: Tensor | None, seed: Tensor | None, mark: Tensor | None, *rest: Any
    ) -> Any:
        """Return buffers from the tensors that a graph passes along. `mark` only tells one call with a deferred dw from
        another."""
        return self.Buffers(Target(main_grad, config.main_grad) if main_grad else None, amax, seed, None, *rest)

    def keeps_state(self, config: Any) -> bool:
        states = config.main_grad, config.observe, config.deferred_wgrad, config.is_stochastic
        return any(states) or config.weight == "quantized"

    def fills(self, config: Any) -> bool:
        return bool(config.dy_buffers)

    def auxiliary(self, config: Any) -> int:
        copies = config.dy_buffers > 0 and config.kept_x == "plain"
        return int(config.dy_buffer_auxiliary.stop + copies)

    def flat_places(self, config: Any) -> tuple[int, ...]:
        made = {"x_scale": (config.made_x, config.x_pair), "w_scale": (config.made_w, config.w_pair)}
        # one scale of a whole matrix is [1, 1] for any sizes: it leaves a node as it is, without a view each way
        whole = [name for name, one in made.items() if (spec := of_orientation(*one)) and spec.block == WHOLE]
        flat = self.scales if config.group_tensors else [name for name in self.scales if name not in whole]
        return tuple([Intermediates._fields.index(name) for name in flat])

    def flops(self, config: Any, inputs: Any) -> int:
        """Count every row, those after the last group too: only the device knows how many they are."""
        x = inputs.x if inputs.x is not None else inputs.x_codes[0]
        return int(2 * math.prod(x.shape[:-1]) * math.prod(inputs.weight.shape[-2:]))

    def gradient_flops(self, config: Any, saved: Any, dy: Any) -> int:
        gemms = config.wants_dx + (config.wants_dw and not config.deferred_wgrad)
        return int(gemms * 2 * math.prod(dy.shape) * _width(config, Saved._make(saved)))


layer = LinearLayer(Config, Inputs, Intermediates, Saved, Buffers)


def _three(parts: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return codes, scale and global scale, None where there is none."""
    codes, scale, global_scale = (*parts, None, None, None)[:3]
    return codes, scale, global_scale


def _parts(q: QProto | None) -> tuple[Any, Any, Any]:
    return NO_PARTS if q is None else (q.codes, q.scale, q.global_scale)


def _width(config: LinearSettings, kept: Saved) -> int:
    """Read K from the tensors that were kept."""
    x, w = kept.x_codes, kept.w_codes
    if kept.width is not None:
        return kept.width.shape[1]
    if w is not None:
        return w.shape[0] if config.kept_w == "column" else w.shape[1]
    if x is not None:
        return x.shape[0] if config.kept_x == "column" else x.shape[-1]
    return 0
