"""The linear layer: y = x · wᵀ + bias, dx = dy · w, dw = dyᵀ · x, each GEMM as the recipe says.

What is quantized when, for x [M, K], w [N, K], dy [M, N] ("column" is the other orientation, contracted over M or N):

    forward    x row and column, w row and column, each from one read       y  = gemm(x row, w row)
    backward   dy row and column, from one read                              dx = gemm(dy row, w column)
                                                                             dw = gemm(dy column, x column)

A column that no gradient needs is not made. Backward keeps x's column codes and w's, an eighth to a half of what bf16
would take; an operand of a GEMM in high precision is kept as it is, by reference, and "dequantized" backward GEMMs run
on the row codes of forward. Operands may also arrive as codes: x from a layer that made them, w from a cache.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo._torch.operators import unsafe_view
from octavo.delayed_scaling import casts as delayed
from octavo.delayed_scaling.casts import Amax, Amaxes, W, X
from octavo.kernels.column_sums import column_sums
from octavo.kernels.gemm import product
from octavo.layers.contract import DTYPES, Made, Tensors, WeightLayer
from octavo.layers.linear_config import NOTHING, Slots, padded
from octavo.layers.linear_config import Config as Config
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts, QProto, QTensor
from octavo.quant.quantizer import (
    CastArgs,
    Quantizer,
    QuantizerPair,
    as_matrix,
    column_axis,
    empty_pair,
    fill_pair,
    in_order,
    quantize_pair,
)
from octavo.wgrad import deferred as post
from octavo.wgrad.targets import LazyTarget, Mail, Target, Writes, advance

Operand = Tensor | QTensor
Operands = tuple[Operand, Operand]  # of dw: dy, x


class Inputs(NamedTuple):
    x: Tensor | None  # [..., K]; of a quantized input the token that carries its gradient, if it has one
    weight: Tensor  # [N, K]; where codes are all there is, the token that receives its gradient
    bias: Tensor | None = None  # [N]
    x_codes: Parts = ()  # of a quantized input [M, K]
    w_row: Parts = ()  # of a weight given as codes: w's [N, K] ...
    w_column: Parts = ()  # ... and wᵀ's [K, N]
    scaling: Parts = ()  # delayed: multipliers of x, w, dy, an element each; if one is measured also what all have seen
    seen: Parts = ()  # delayed, observed in place: running amaxes of x and w, one element each


class Buffers(NamedTuple):
    """What backward writes besides its results."""

    main_grad: Target | LazyTarget | None = None
    amax: Tensor | None = None  # [1]: the amax of dy, folded by maximum
    seed: Tensor | None = None  # [2] int64: seed and step of stochastic rounding; the step advances
    mail: Mail | None = None


class Fresh(NamedTuple):
    """Codes of x and w that forward makes and backward needs."""

    x_codes: Any = None
    x_scale: Any = None
    x_global_scale: Any = None
    w_codes: Any = None
    w_scale: Any = None
    w_global_scale: Any = None
    width: Any = None  # [0, K], for its shape alone


class Saved(NamedTuple):
    """x as dw needs it, w as dx needs it (a QTensor's tensors, or one plain tensor in the place of its codes), and what
    casts in backward take."""

    x_codes: Tensor | None = None
    x_scale: Tensor | None = None
    x_global_scale: Tensor | None = None
    w_codes: Tensor | None = None
    w_scale: Tensor | None = None
    w_global_scale: Tensor | None = None
    width: Tensor | None = None  # [0, K], for its shape alone
    dy_encode: Tensor | None = None  # delayed: dy's multiplier, and what it has seen if it is measured
    dy_seen: Tensor | None = None
    x_encode: Tensor | None = None  # delayed multipliers of x's and w's columns, if those are made in backward
    w_encode: Tensor | None = None
    dy_room: Tensor | None = (
        None  # where a graph posts dy for a dw that is put off: dy itself, or its codes and the rest
    )
    dy_room_1: Tensor | None = None
    dy_room_2: Tensor | None = None
    dy_room_3: Tensor | None = None

    @property
    def x(self) -> Slots:
        return self.x_codes, self.x_scale, self.x_global_scale

    @property
    def w(self) -> Slots:
        return self.w_codes, self.w_scale, self.w_global_scale

    @property
    def dy_slot(self) -> list[Tensor]:
        return [t for t in (self.dy_encode, self.dy_seen) if t is not None]

    @property
    def room(self) -> Parts:
        found = self.dy_room, self.dy_room_1, self.dy_room_2, self.dy_room_3
        return tuple([t for t in found if t is not None])


class LinearLayer(WeightLayer):
    """x · wᵀ + bias."""

    scales = ("x_scale", "w_scale")

    def graph_buffers(
        self, config: Config, main_grad: Parts, amax: Tensor | None, seed: Tensor | None, mark: Tensor | None
    ) -> Buffers:
        """Buffers from the tensors that a graph passes along. `mark` only tells one posted call from another."""
        return Buffers(Target(main_grad, config.main_grad) if main_grad else None, amax, seed)

    def replays(self, config: Config, side: str) -> bool:
        return config.shipped

    def forward(self, config: Config, inputs: Inputs) -> Made:
        amaxes = observed(config, inputs)
        return forward_from(config, inputs, _quantized_x(config, inputs, amaxes.x), amaxes)

    def abstract(self, config: Config, inputs: Inputs) -> Made:
        weight: Any = inputs.weight
        like: Any = inputs.x if inputs.x is not None else inputs.x_codes[0]
        lead = tuple(like.shape[:-1])
        y = TensorProto((*lead, weight.shape[0]), config.y_dtype, weight.device)
        outputs: tuple[TensorProto, ...] = (y,)
        extras: tuple[TensorProto, ...] = ()
        if config.quantize_output:
            spec = config.quant.fprop.left
            assert spec is not None
            outputs, extras = (
                (TensorProto(y.shape, y.dtype, y.device, (0,) * len(y.shape)),),
                _proto_parts(spec.proto(y)),
            )
        if config.observe == "returned":
            extras = (*extras, TensorProto((2,), torch.float32, weight.device))
        if config.slots:
            extras = (*extras, *_abstract_dy_buffers(config, y))
            if config.kept_x == "plain":
                extras = (*extras, TensorProto(tuple(like.shape), like.dtype, like.device))
        kept: list[TensorProto | None] = []
        for source, given, pair, form in (
            (inputs.x, config.x == "codes", config.x_pair, config.kept_x),
            (inputs.weight, config.weight != "plain", config.w_pair, config.kept_w),
        ):
            spec = None if given else {"row": pair[0], "column": pair[1]}.get(form)
            tensor: Any = source
            if spec is None:
                kept += [None] * 3
            else:
                q = spec.proto(tensor, column_axis(len(tensor.shape)) if form == "column" else -1)
                kept += [q.codes, q.scale, q.global_scale]
        kept.append(TensorProto((0, weight.shape[1]), weight.dtype, weight.device) if config.keeps_width else None)
        return Made(outputs, extras, Fresh._make(kept))

    def wants(self, config: Config) -> tuple[bool, ...]:
        w = "w" in config.grads and not config.delay and (not config.main_grad or config.dummy_grad)
        return "x" in config.grads, w, "b" in config.grads, *[False] * (len(Inputs._fields) - 3)

    def fills(self, config: Config) -> bool:
        return config.slots > 0

    def extras(self, config: Config) -> int:
        found = (config.observe == "returned") + (config.quant.parts if config.quantize_output else 0)
        return found + config.slots + (config.slots > 0 and config.kept_x == "plain")

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
        gemms = ("x" in config.grads) + ("w" in config.grads and not config.delay)
        return int(gemms * 2 * math.prod(dy.shape) * _width(config, Saved._make(saved)))

    def posted_operands(self, config: Config, mail: Parts, x: Parts, weight: Tensor) -> Operands:
        slots, codes = mail[: config.slots], mail[config.slots :] or x
        dy: Operand = flat(slots[0]).T if config.slots == 1 else _slot(config, slots, weight.shape[0])
        tokens = dy.columns if isinstance(dy, QTensor) else dy.shape[1]
        kept = Saved(*padded(codes), width=weight.detach()[:0])
        return dy, _x_operand(config, kept, tokens, config.y_dtype)

    def abstract_weight(self, config: Config, weight: TensorProto) -> tuple[QProto | None, QProto | None]:
        row, column = config.quant.fprop.right, config.quant.dgrad.right
        return (None if row is None else row.proto(weight)), (None if column is None else column.proto(weight, 0))

    def weight_values(
        self, config: Config, row: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        spec = config.quant.fprop.right
        assert spec is not None
        return spec.assemble(row, shape, dtype).dequantize(dtype)

    def refresh(
        self, config: Config, weight: Tensor, row: Sequence[Tensor], column: Sequence[Tensor], amaxes: Sequence[Tensor],
        scaling: Sequence[Tensor], skip: Tensor | None = None,
    ) -> None:  # fmt: skip
        n, k = weight.shape
        specs = config.quant.fprop.right, config.quant.dgrad.right
        pair = (
            None if specs[0] is None or not row else specs[0].assemble(row, (n, k), weight.dtype),
            None if specs[1] is None or not column else specs[1].assemble(column, (k, n), weight.dtype),
        )
        given = CastArgs(skip=skip)
        if scaling:
            given = _given(config, weight, specs, scaling, amaxes[0][1:] if amaxes else None)._replace(skip=skip)
        fill_pair(as_matrix(weight), pair, given)

    def save(self, config: Config, inputs: Inputs, made: Made) -> Saved:
        fresh = Fresh._make(made.fresh)
        x: Slots = (fresh.x_codes, fresh.x_scale, fresh.x_global_scale)
        w: Slots = (fresh.w_codes, fresh.w_scale, fresh.w_global_scale)
        if config.slots:
            x = NOTHING  # it is in the post
        elif config.kept_x == "plain":
            x = (inputs.x, None, None)
        elif config.kept_x and config.x == "codes":
            x = padded(inputs.x_codes)
        if config.kept_w in ("plain", "again"):
            w = (inputs.weight, None, None)
        elif config.kept_w and config.weight != "plain":
            w = padded(inputs.w_row if config.kept_w == "row" else inputs.w_column)
        dy = delayed.kept_for(config.dy_pair, config.measured, inputs.scaling)
        has = len(inputs.scaling) > 0
        x_encode = inputs.scaling[X] if has and config.x_columns == "backward" and "w" in config.grads else None
        w_encode = inputs.scaling[W] if has and config.kept_w == "again" else None
        start = config.posted[0] - 1
        return Saved(*x, *w, fresh.width, *dy, x_encode, w_encode, *made.extras[start : start + config.slots])

    def backward(
        self, config: Config, saved: Any, buffers: Buffers, grads: Tensors, writes: Writes | None = None
    ) -> Tensors:
        dy = grads[0]
        if dy is None:
            return (None,) * len(Inputs._fields)
        kept = Saved._make(saved)
        row, column = quantized_dy(config, dy, kept, buffers, writes)
        dx = input_gradient(config, dy, row, kept) if "x" in config.grads else None
        db = column_sums(flat(dy), DTYPES[config.bias_dtype]) if "b" in config.grads else None
        return gradients(dx, finish(config, dy, column, kept, buffers, writes), db)

    def weight_gradient(
        self, config: Config, operands: Operands, target: Target | LazyTarget | None, writes: Writes | None = None
    ) -> Tensor | None:
        """Both operands are contracted over the tokens."""
        dy, x = operands
        accumulation = config.quant.wgrad.accumulation
        if target is None:
            return product(dy, x, DTYPES[config.weight_dtype], None, accumulation)
        n, k = (q.rows if isinstance(q, QTensor) else q.shape[0] for q in operands)
        out = target.open(n, k)
        _write(writes, _store, config, target, out, product(dy, x, out.dtype, None, accumulation))
        return torch.zeros(n, k, dtype=DTYPES[config.weight_dtype], device=out.device) if config.dummy_grad else None


layer = LinearLayer(Config, Inputs, Fresh, Saved, Buffers)


# -- forward ---------------------------------------------------------------------------------------------------------


def observed(config: Config, inputs: Inputs) -> Amaxes:
    return delayed.observed(config.observe, inputs.seen, 1, inputs.weight.device)


def forward_from(
    config: Config, inputs: Inputs, x: tuple[QTensor | None, QTensor | None], amaxes: Amaxes,
    lead: tuple[int, ...] | None = None,
) -> Made:  # fmt: skip
    """The rest of forward, once x is quantized: by this layer, or by what made x, which then says x's leading dims."""
    x_row, x_column = x
    w_row, w_column = _quantized_w(config, inputs, amaxes.w)
    y = product(
        _matrix(inputs.x, config.y_dtype) if x_row is None else x_row,
        inputs.weight.to(config.y_dtype) if w_row is None else w_row,
        config.y_dtype,
        inputs.bias,
        config.quant.fprop.accumulation,
    )
    if lead is None and inputs.x is not None and inputs.x.dim() != 2:
        lead = tuple(inputs.x.shape[:-1])
    if lead is not None and len(lead) != 1:
        y = unsafe_view(y, (*lead, y.shape[-1]))  # fresh: nobody has the matrix, so it is no view of it
    extras: Parts = () if amaxes.extra is None else (amaxes.extra,)
    if config.quantize_output:
        y, extras = _quantized_output(config, y, extras)
    if config.slots:
        extras = (*extras, *_empty_slots(config, y))
        if config.kept_x == "plain" and inputs.x is not None:
            extras = (*extras, inputs.x.clone(memory_format=torch.contiguous_format))  # who owns x may write to it
    x_kept = _kept(config.kept_x, x_row, x_column) if config.x == "plain" else NOTHING
    w_kept = _kept(config.kept_w, w_row, w_column) if config.weight == "plain" else NOTHING
    width = inputs.weight.new_empty(0, inputs.weight.shape[1]) if config.keeps_width else None
    return Made((y,), extras, Fresh(*x_kept, *w_kept, width))


def fill_x(
    config: Config, scaling: Parts, like: TensorProto, column: bool, observed: Tensor | None
) -> tuple[tuple[QTensor | None, QTensor | None], CastArgs]:
    """Room for x's codes, with what a cast of x takes, for one who makes x and casts it in the same pass."""
    row, other = config.x_pair
    given = delayed.warm(config.recipe, scaling[X::3], observed)
    return empty_pair(like, row, other if column else None, one_scale=True), given


def _matrix(x: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert x is not None
    return flat(x).to(dtype)


def flat(x: Tensor) -> Tensor:
    """[..., K] as [M, K]."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _quantized_x(config: Config, inputs: Inputs, observed: Tensor | None) -> tuple[QTensor | None, QTensor | None]:
    if config.x == "codes":
        spec = config.quant.fprop.left
        assert spec is not None
        shape = (inputs.x_codes[0].shape[0], inputs.weight.shape[1])
        return spec.assemble(inputs.x_codes, shape, config.y_dtype), None
    assert inputs.x is not None
    return _quantize(config, inputs.x, config.x_pair, delayed.slot_of(X, config.measured, inputs.scaling), observed)


def _quantized_w(config: Config, inputs: Inputs, observed: Tensor | None) -> tuple[QTensor | None, QTensor | None]:
    if config.weight == "plain":
        slot = delayed.slot_of(W, config.measured, inputs.scaling)
        return _quantize(config, inputs.weight, config.w_pair, slot, observed)
    spec = config.quant.fprop.right
    n, k = inputs.weight.shape
    return (None if spec is None else spec.assemble(inputs.w_row, (n, k), inputs.weight.dtype)), None


def _quantize(
    config: Config,
    x: Tensor,
    pair: QuantizerPair,
    slot: Sequence[Tensor],
    observed: Tensor | None,
    seed: Tensor | None = None,
) -> tuple[QTensor | None, QTensor | None]:
    """The orientations that a pair of quantizers asks for, by the multiplier of its slot if scaling is delayed."""
    if pair[0] is None and pair[1] is None:
        return None, None
    return quantize_pair(x, *pair, _given(config, x, pair, slot, observed, seed), one_scale=True)


def _given(
    config: Config,
    x: Tensor,
    pair: QuantizerPair,
    slot: Sequence[Tensor],
    observed: Tensor | None,
    seed: Tensor | None = None,
) -> CastArgs:
    """What the layer brings to a cast of x."""
    return delayed.cast_args(config.recipe, pair, slot, _amax_of(x), observed, seed)


def _amax_of(x: Tensor) -> Amax:
    return lambda spec, warm: spec.amax(x, skip=warm).view(1)


def _quantized_output(config: Config, y: Tensor, extras: Parts) -> tuple[Tensor, Parts]:
    """A token that carries the gradient, and the codes of y in front of the extras. The scale is y's own."""
    spec = config.quant.fprop.left
    assert spec is not None
    return y.new_zeros(1).expand(y.shape), (*spec.quantize(y).tensors(), *extras)


def _kept(form: str, row: QTensor | None, column: QTensor | None) -> Slots:
    q = column if form == "column" else row if form == "row" else None
    return NOTHING if q is None else (q.codes, q.scale, q.global_scale)


def _proto_parts(q: QProto) -> tuple[TensorProto, ...]:
    return tuple(p for p in (q.codes, q.scale, q.global_scale) if p is not None)


def _width(config: Config, kept: Saved) -> int:
    """K, from whatever was kept."""
    x, w = kept.x_codes, kept.w_codes
    if kept.width is not None:
        return kept.width.shape[1]
    if w is not None:
        return w.shape[0] if config.kept_w == "column" else w.shape[1]
    if x is not None:
        return x.shape[0] if config.kept_x == "column" else x.shape[-1]
    return 0


# -- gradients put off in a graph (octavo.wgrad.deferred) --------------------------------------------------------------


def _abstract_dy_buffers(config: Config, y: TensorProto) -> tuple[TensorProto, ...]:
    """Room for dy as dw needs it."""
    spec = config.dy_pair[1]
    if spec is None:
        return (y,)
    q = spec.proto(y, column_axis(len(y.shape)))
    return post.room(q, q.shape[1], y)


def _empty_slots(config: Config, y: Tensor) -> Parts:
    return post.unfilled(_abstract_dy_buffers(config, TensorProto(tuple(y.shape), y.dtype, y.device)))


def _slot(config: Config, slots: Sequence[Tensor], rows: int) -> QTensor:
    """dy's slots as the column codes [N, M] that they are."""
    spec = config.dy_pair[1]
    assert spec is not None
    return spec.assemble(slots[:-1], (rows, slots[-1].shape[0]), config.y_dtype)


# -- cached weights --------------------------------------------------------------------------------------------------


# -- backward --------------------------------------------------------------------------------------------------------


def gradients(dx: Tensor | None, dw: Tensor | None, db: Tensor | None) -> Tensors:
    """One for each input."""
    return dx, dw, db, *[None] * (len(Inputs._fields) - 3)


def fill_dy(
    config: Config, kept: Saved, like: TensorProto, buffers: Buffers, writes: Writes | None
) -> tuple[tuple[QTensor | None, QTensor | None], CastArgs]:
    """Room for dy's codes, with what a cast of dy takes, for one who makes dy and casts it in the same pass."""
    given = delayed.warm(config.recipe, kept.dy_slot, buffers.amax)
    if config.draws:
        given = given._replace(seed=_drawn(buffers, writes))
    return empty_pair(like, *config.dy_pair, one_scale=True), given


def fill_x_again(config: Config, kept: Saved, like: TensorProto) -> tuple[QTensor | None, CastArgs]:
    """The same for x's column codes, where they are made in backward."""
    if "w" not in config.grads:
        return None, CastArgs()
    return empty_pair(like, None, config.quant.wgrad.right)[1], CastArgs(encode=kept.x_encode)


def finish(
    config: Config, dy: Tensor | TensorProto, column: QTensor | None, kept: Saved, buffers: Buffers,
    writes: Writes | None, x_column: QTensor | None = None,
) -> Tensor | None:  # fmt: skip
    """dw, and then the step of the random counter: a backward that fails on the way draws the same again. (dy's amax
    was raised when it was cast, and is no higher if that happens again.) Of dy the shape is enough if there are column
    codes of it."""
    dw = _delivered(config, dy, column, kept, buffers, writes, x_column) if "w" in config.grads else None
    if config.draws and buffers.seed is not None:
        _write(writes, advance, buffers.seed)
    return dw


def _write(writes: Writes | None, write: Callable[..., Any], *arguments: Any) -> None:
    if writes is None:
        write(*arguments)
    else:
        writes.put_off(write, *arguments)


def _drawn(buffers: Buffers, writes: Writes | None) -> Tensor | None:
    """The random counter that a cast of dy draws by."""
    return buffers.seed if buffers.seed is None or writes is None else writes.drawn(buffers.seed)


def _delivered(
    config: Config, dy: Any, column: QTensor | None, kept: Saved, buffers: Buffers, writes: Writes | None,
    x_column: QTensor | None,
) -> Tensor | None:  # fmt: skip
    """dw; or its operands brought to where they are waited for."""
    if config.slots:
        if column is None and kept.dy_room is not None:  # codes are in their place already
            kept.dy_room.copy_(dy.view(kept.dy_room.shape))
        return None
    left: Operand = flat(dy).T if column is None else column
    right = _x_operand(config, kept, math.prod(dy.shape[:-1]), dy.dtype) if x_column is None else x_column
    if config.delay:
        assert buffers.mail is not None
        _write(writes, buffers.mail.put, config, left, right)
        return None
    return layer.weight_gradient(config, (left, right), buffers.main_grad, writes)


def quantized_dy(
    config: Config, dy: Tensor, kept: Saved, buffers: Buffers, writes: Writes | None
) -> tuple[QTensor | None, QTensor | None]:
    slot = kept.dy_slot
    row, column = config.dy_pair
    drawn = _drawn(buffers, writes) if config.draws else None
    if config.slots < 2 or column is None:
        return _quantize(config, dy, config.dy_pair, slot, buffers.amax, drawn)
    found = (
        None if row is None else row.proto(TensorProto.of(dy)).empty(),
        _slot(config, kept.room, dy.shape[-1]),
    )
    fill_pair(as_matrix(dy), found, _given(config, dy, config.dy_pair, slot, buffers.amax, drawn))
    return found


def input_gradient(config: Config, dy: Any, row: QTensor | None, kept: Saved) -> Tensor:
    """dx. Of dy the shape is enough if there are row codes of it."""
    n = dy.shape[-1]
    codes = kept.w_codes
    assert codes is not None
    right: Operand
    if config.kept_w == "plain":
        right = codes.to(dy.dtype).T
    elif config.kept_w == "again":
        right = _columns_again(config, codes, kept.w_encode)
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


def _columns_again(config: Config, weight: Tensor, encode: Tensor | None) -> QTensor:
    """The column codes that forward would have made."""
    _, column = quantize_pair(weight, None, config.quant.dgrad.right, CastArgs(encode=encode))
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


def _assembled(spec: Quantizer, slots: Slots, shape: tuple[int, ...], dtype: torch.dtype) -> QTensor:
    q = spec.assemble([t for t in slots if t is not None], shape, dtype)
    return in_order(q, spec.scale_strides(*q.scale.shape))


def _store(config: Config, target: Target | LazyTarget, out: Tensor, dw: Tensor) -> None:
    """Bring dw to the matrix that a target opened."""
    with preserve_version_counter(out):  # a graph in flight may have it among what it saved
        out.add_(dw) if config.main_grad == "add" else out.copy_(dw)
    target.close()
