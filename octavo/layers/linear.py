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
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from octavo.kernels.columns import column_sums
from octavo.kernels.gemm import product
from octavo.layers import delayed, post
from octavo.layers.contract import DTYPES, Counts, Made, reader
from octavo.layers.delayed import Amax, Amaxes, W, X
from octavo.layers.linear_config import NOTHING, Pair, Parts, Slots
from octavo.layers.linear_config import Config as Config
from octavo.layers.plain import passed as passed
from octavo.layers.plain import returned_elsewhere as returned_elsewhere
from octavo.layers.targets import Mail, Sought, Target, Writes, advance
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QProto, QTensor
from octavo.quant.quantizer import (
    Given,
    Quantizer,
    as_matrix,
    column_axis,
    empty_pair,
    fill_pair,
    in_order,
    quantize_pair,
)

Operand = Tensor | QTensor
Operands = tuple[Operand, Operand]  # of dw: dy, x


config = reader(Config)


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

    main_grad: Target | Sought | None = None
    amax: Tensor | None = None  # [1]: the amax of dy, folded by maximum
    seed: Tensor | None = None  # [2] int64: seed and step of stochastic rounding; the step advances
    mail: Mail | None = None
    writes: Writes | None = None  # of a chain, which does them last of all; None: they are done here


def graph_buffers(
    config: Config, main_grad: Parts, amax: Tensor | None, seed: Tensor | None, mark: Tensor | None
) -> Buffers:
    """Buffers from the tensors that a graph passes along. `mark` only tells one posted call from another."""
    return Buffers(Target(main_grad, config.main_grad) if main_grad else None, amax, seed)


def replays(config: Config, side: str) -> bool:
    return config.shipped


# -- forward ---------------------------------------------------------------------------------------------------------


def forward(config: Config, inputs: Inputs) -> Made:
    amaxes = observed(config, inputs)
    return forward_from(config, inputs, _quantized_x(config, inputs, amaxes.x), amaxes)


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
        y = torch.ops.aten._unsafe_view(y, (*lead, y.shape[-1]))  # fresh: nobody has the matrix, so it is no view of it
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
    return Made((y,), extras, (*x_kept, *w_kept, width))


def fill_x(
    config: Config, scaling: Parts, like: TensorProto, column: bool, observed: Tensor | None
) -> tuple[tuple[QTensor | None, QTensor | None], Given]:
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
    config: Config, x: Tensor, pair: Pair, slot: Sequence[Tensor], observed: Tensor | None, seed: Tensor | None = None
) -> tuple[QTensor | None, QTensor | None]:
    """The orientations that a pair of quantizers asks for, by the multiplier of its slot if scaling is delayed."""
    if pair[0] is None and pair[1] is None:
        return None, None
    return quantize_pair(x, *pair, _given(config, x, pair, slot, observed, seed), one_scale=True)


def _given(
    config: Config, x: Tensor, pair: Pair, slot: Sequence[Tensor], observed: Tensor | None, seed: Tensor | None = None
) -> Given:
    """What the layer brings to a cast of x."""
    return delayed.given(config.recipe, pair, slot, _amax_of(x), observed, seed)


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


def protos(config: Config, inputs: Inputs) -> Made:
    """What forward makes, from inputs that are TensorProtos."""
    weight: Any = inputs.weight
    like: Any = inputs.x if inputs.x is not None else inputs.x_codes[0]
    lead = tuple(like.shape[:-1])
    y = TensorProto((*lead, weight.shape[0]), config.y_dtype, weight.device)
    outputs: tuple[TensorProto, ...] = (y,)
    extras: tuple[TensorProto, ...] = ()
    if config.quantize_output:
        spec = config.quant.fprop.left
        assert spec is not None
        outputs, extras = (TensorProto(y.shape, y.dtype, y.device, (0,) * len(y.shape)),), _proto_parts(spec.proto(y))
    if config.observe == "extra":
        extras = (*extras, TensorProto((2,), torch.float32, weight.device))
    if config.slots:
        extras = (*extras, *_slot_protos(config, y))
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
    return Made(outputs, extras, tuple(kept))


def _proto_parts(q: QProto) -> tuple[TensorProto, ...]:
    return tuple(p for p in (q.codes, q.scale, q.global_scale) if p is not None)


def flat_places(config: Config) -> tuple[int, ...]:
    """Of what forward makes fresh: the scales."""
    return 1, 4


def counts(config: Config) -> Counts:
    extras = (config.observe == "extra") + (config.quant.parts if config.quantize_output else 0)
    return Counts(extras + config.slots + (config.slots > 0 and config.kept_x == "plain"), 7, 11 + config.slots, 4)


def wants(config: Config) -> tuple[bool, ...]:
    """Which inputs backward gives a gradient for."""
    w = "w" in config.grads and not config.delay and (not config.main_grad or config.dummy_grad)
    return "x" in config.grads, w, "b" in config.grads, *[False] * (len(Inputs._fields) - 3)


def fills(config: Config) -> bool:
    """Whether backward writes to something that forward made."""
    return config.slots > 0


def gradient_protos(config: Config, saved: tuple[Tensor | None, ...], dy: Tensor) -> tuple[TensorProto | None, ...]:
    """What backward returns, without data."""
    x, w, b, *rest = wants(config)
    n, k = dy.shape[-1], _width(config, saved)
    return (
        TensorProto((*dy.shape[:-1], k), dy.dtype, dy.device) if x else None,
        TensorProto((n, k), DTYPES[config.weight_dtype], dy.device) if w else None,
        TensorProto((n,), DTYPES[config.bias_dtype], dy.device) if b else None,
        *[None] * len(rest),
    )


def flops(config: Config, inputs: Inputs) -> int:
    """Of forward's GEMM."""
    lead = (inputs.x if inputs.x is not None else inputs.x_codes[0]).shape[:-1]
    return 2 * math.prod(lead) * inputs.weight.shape[0] * inputs.weight.shape[1]


def gradient_flops(config: Config, saved: tuple[Tensor | None, ...], dy: Tensor) -> int:
    """Of backward's."""
    gemms = ("x" in config.grads) + ("w" in config.grads and not config.delay)
    return gemms * 2 * math.prod(dy.shape) * _width(config, saved)


def _width(config: Config, saved: tuple[Tensor | None, ...]) -> int:
    """K, from whatever was kept."""
    x, w, width = saved[0], saved[3], saved[6]
    if width is not None:
        return width.shape[1]
    if w is not None:
        return w.shape[0] if config.kept_w == "column" else w.shape[1]
    if x is not None:
        return x.shape[0] if config.kept_x == "column" else x.shape[-1]
    return 0


# -- gradients put off in a graph (octavo.layers.post) ----------------------------------------------------------------


def _slot_protos(config: Config, y: TensorProto) -> tuple[TensorProto, ...]:
    """Room for dy as dw needs it."""
    spec = config.dy_pair[1]
    if spec is None:
        return (y,)
    q = spec.proto(y, column_axis(len(y.shape)))
    return post.room(q, q.shape[1], y)


def _empty_slots(config: Config, y: Tensor) -> Parts:
    return post.unfilled(_slot_protos(config, TensorProto(tuple(y.shape), y.dtype, y.device)))


def _slot(config: Config, slots: Sequence[Tensor], rows: int) -> QTensor:
    """dy's slots as the column codes [N, M] that they are."""
    spec = config.dy_pair[1]
    assert spec is not None
    return spec.assemble(slots[:-1], (rows, slots[-1].shape[0]), config.y_dtype)


def posted_operands(config: Config, mail: Parts, x: Parts, weight: Tensor) -> Operands:
    """dw's operands from the post, and from `x` as it was given where no codes of it were made."""
    slots, codes = mail[: config.slots], mail[config.slots :] or x
    dy: Operand = flat(slots[0]).T if config.slots == 1 else _slot(config, slots, weight.shape[0])
    tokens = dy.columns if isinstance(dy, QTensor) else dy.shape[1]
    kept = Saved(_padded(codes), width=weight.detach()[:0])
    return dy, _x_operand(config, kept, tokens, config.y_dtype)


# -- cached weights --------------------------------------------------------------------------------------------------


def weight_protos(config: Config, weight: TensorProto) -> tuple[QProto | None, QProto | None]:
    """Row and column codes of a weight, without data."""
    row, column = config.quant.fprop.right, config.quant.dgrad.right
    return (None if row is None else row.proto(weight)), (None if column is None else column.proto(weight, 0))


def weight_values(config: Config, row: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The weight that row codes stand for."""
    spec = config.quant.fprop.right
    assert spec is not None
    return spec.assemble(row, shape, dtype).dequantize(dtype)


def refresh(
    config: Config, weight: Tensor, row: Sequence[Tensor], column: Sequence[Tensor], amaxes: Sequence[Tensor],
    scaling: Sequence[Tensor], skip: Tensor | None = None,
) -> None:  # fmt: skip
    """Overwrite cached codes of a weight, unless `skip`, on the device, says not to. Delayed: `scaling` is w's
    multiplier, and if it is measured what it has seen; `amaxes` [2], if they are observed, those of x and w so far."""
    n, k = weight.shape
    specs = config.quant.fprop.right, config.quant.dgrad.right
    pair = (
        None if specs[0] is None or not row else specs[0].assemble(row, (n, k), weight.dtype),
        None if specs[1] is None or not column else specs[1].assemble(column, (k, n), weight.dtype),
    )
    given = Given(skip=skip)
    if scaling:
        given = _given(config, weight, specs, scaling, amaxes[0][1:] if amaxes else None)._replace(skip=skip)
    fill_pair(as_matrix(weight), pair, given)


# -- backward --------------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """x as dw needs it, w as dx needs it (a QTensor's tensors, or one plain tensor), dy's delayed multiplier."""

    x: Slots = NOTHING
    w: Slots = NOTHING
    width: Tensor | None = None  # [0, K], for its shape alone
    scaling: tuple[Tensor | None, Tensor | None] = (None, None)
    encode: tuple[Tensor | None, Tensor | None] = (None, None)  # delayed multipliers of x's and w's columns, if those
    # are made in backward
    slots: tuple[Tensor | None, ...] = ()  # for dy, in the post


def save(config: Config, inputs: Inputs, made: Made) -> tuple[Tensor | None, ...]:
    x, w = made.fresh[:3], made.fresh[3:6]
    if config.slots:
        x = NOTHING  # it is in the post
    elif config.kept_x == "plain":
        x = (inputs.x, None, None)
    elif config.kept_x and config.x == "codes":
        x = _padded(inputs.x_codes)
    if config.kept_w in ("plain", "again"):
        w = (inputs.weight, None, None)
    elif config.kept_w and config.weight != "plain":
        w = _padded(inputs.w_row if config.kept_w == "row" else inputs.w_column)
    scaling = delayed.kept_for(config.dy_pair, config.measured, inputs.scaling)
    has = len(inputs.scaling) > 0
    x_encode = inputs.scaling[X] if has and config.x_columns == "backward" and "w" in config.grads else None
    w_encode = inputs.scaling[W] if has and config.kept_w == "again" else None
    start = config.posted[0] - 1
    return (*x, *w, made.fresh[6], *scaling, x_encode, w_encode, *made.extras[start : start + config.slots])


def _padded(parts: Parts) -> Slots:
    first, second, third = (*parts, None, None)[:3]
    return first, second, third


def backward(
    config: Config, saved: tuple[Tensor | None, ...], buffers: Buffers, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    dy = grads[0]
    if dy is None:
        return (None,) * len(Inputs._fields)
    kept = unpacked(saved)
    row, column = quantized_dy(config, dy, kept, buffers)
    dx = input_gradient(config, dy, row, kept) if "x" in config.grads else None
    db = column_sums(flat(dy), DTYPES[config.bias_dtype]) if "b" in config.grads else None
    return gradients(dx, finish(config, dy, column, kept, buffers), db)


def gradients(dx: Tensor | None, dw: Tensor | None, db: Tensor | None) -> tuple[Tensor | None, ...]:
    """One for each input."""
    return dx, dw, db, *[None] * (len(Inputs._fields) - 3)


def unpacked(saved: tuple[Tensor | None, ...]) -> Saved:
    return Saved(saved[:3], saved[3:6], saved[6], saved[7:9], saved[9:11], saved[11:])  # type: ignore[arg-type]


def fill_dy(
    config: Config, kept: Saved, like: TensorProto, buffers: Buffers
) -> tuple[tuple[QTensor | None, QTensor | None], Given]:
    """Room for dy's codes, with what a cast of dy takes, for one who makes dy and casts it in the same pass."""
    slot = [t for t in kept.scaling if t is not None]
    given = delayed.warm(config.recipe, slot, buffers.amax)
    if config.draws:
        given = given._replace(seed=_drawn(buffers))
    return empty_pair(like, *config.dy_pair, one_scale=True), given


def fill_x_again(config: Config, kept: Saved, like: TensorProto) -> tuple[QTensor | None, Given]:
    """The same for x's column codes, where they are made in backward."""
    if "w" not in config.grads:
        return None, Given()
    return empty_pair(like, None, config.quant.wgrad.right)[1], Given(encode=kept.encode[0])


def finish(
    config: Config, dy: Tensor | TensorProto, column: QTensor | None, kept: Saved, buffers: Buffers,
    x_column: QTensor | None = None,
) -> Tensor | None:  # fmt: skip
    """dw, and then the step of the random counter: a backward that fails on the way draws the same again. (dy's amax
    was raised when it was cast, and is no higher if that happens again.) Of dy the shape is enough if there are column
    codes of it."""
    dw = _delivered(config, dy, column, kept, buffers, x_column) if "w" in config.grads else None
    if config.draws and buffers.seed is not None:
        _write(buffers.writes, advance, buffers.seed)
    return dw


def _write(writes: Writes | None, write: Callable[..., Any], *arguments: Any) -> None:
    if writes is None:
        write(*arguments)
    else:
        writes.put_off(write, *arguments)


def _drawn(buffers: Buffers) -> Tensor | None:
    """The random counter that a cast of dy draws by."""
    if buffers.seed is None or buffers.writes is None:
        return buffers.seed
    return buffers.writes.drawn(buffers.seed)


def _delivered(
    config: Config, dy: Any, column: QTensor | None, kept: Saved, buffers: Buffers, x_column: QTensor | None
) -> Tensor | None:
    """dw; or its operands brought to where they are waited for."""
    if config.slots:
        room = kept.slots[0]
        if column is None and room is not None:  # codes are in their place already
            room.copy_(dy.view(room.shape))
        return None
    left: Operand = flat(dy).T if column is None else column
    right = _x_operand(config, kept, math.prod(dy.shape[:-1]), dy.dtype) if x_column is None else x_column
    if config.delay:
        assert buffers.mail is not None
        _write(buffers.writes, buffers.mail.put, config, left, right)
        return None
    return weight_gradient(config, (left, right), buffers.main_grad, buffers.writes)


def quantized_dy(config: Config, dy: Tensor, kept: Saved, buffers: Buffers) -> tuple[QTensor | None, QTensor | None]:
    slot = [t for t in kept.scaling if t is not None]
    row, column = config.dy_pair
    drawn = _drawn(buffers) if config.draws else None
    if config.slots < 2 or column is None:
        return _quantize(config, dy, config.dy_pair, slot, buffers.amax, drawn)
    found = (
        None if row is None else row.proto(TensorProto.of(dy)).empty(),
        _slot(config, kept.slots, dy.shape[-1]),  # type: ignore[arg-type]
    )
    fill_pair(as_matrix(dy), found, _given(config, dy, config.dy_pair, slot, buffers.amax, drawn))
    return found


def input_gradient(config: Config, dy: Any, row: QTensor | None, kept: Saved) -> Tensor:
    """dx. Of dy the shape is enough if there are row codes of it."""
    n = dy.shape[-1]
    codes = kept.w[0]
    assert codes is not None
    right: Operand
    if config.kept_w == "plain":
        right = codes.to(dy.dtype).T
    elif config.kept_w == "again":
        right = _columns_again(config, codes, kept.encode[1])
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
    _, column = quantize_pair(weight, None, config.quant.dgrad.right, Given(encode=encode))
    assert column is not None
    return column


def _columns_of(kept: Saved, codes: Tensor) -> int:
    return codes.shape[1] if kept.width is None else kept.width.shape[1]


def _x_operand(config: Config, kept: Saved, tokens: int, dtype: torch.dtype) -> Operand:
    """xᵀ, contracted over the tokens, as dw's second operand."""
    codes = kept.x[0]
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


def weight_gradient(
    config: Config, operands: Operands, target: Target | Sought | None, writes: Writes | None = None
) -> Tensor | None:
    """dw from its operands, both contracted over the tokens: a tensor, or what stands for one that goes to a buffer."""
    dy, x = operands
    accumulation = config.quant.wgrad.accumulation
    if target is None:
        return product(dy, x, DTYPES[config.weight_dtype], None, accumulation)
    n, k = (q.rows if isinstance(q, QTensor) else q.shape[0] for q in operands)
    out = target.open(n, k)
    _write(writes, _store, config, target, out, product(dy, x, out.dtype, None, accumulation))
    return torch.zeros(n, k, dtype=DTYPES[config.weight_dtype], device=out.device) if config.dummy_grad else None


def _store(config: Config, target: Target | Sought, out: Tensor, dw: Tensor) -> None:
    """Bring dw to the matrix that a target opened."""
    with _unsafe_preserve_version_counter(out):  # a graph in flight may have it among what it saved
        out.add_(dw) if config.main_grad == "add" else out.copy_(dw)
    target.close()
