"""The linear layer of many experts: rows of x come in ragged groups, and each group has a weight of its own.

    y[g] = x[g] · w[g]ᵀ + bias[g]        dx[g] = dy[g] · w[g]        dw[g] = dy[g]ᵀ · x[g]

How many rows a group has is on the device, in `splits`, and is never read back: shapes follow from x, whose rows after
the last group are a tail that nothing reads. Each group is quantized as if it were alone, weights too, which are groups
of equal size. Backward keeps the column codes of x and of w; an operand of a GEMM in high precision is kept as it is.
A bias may be scaled, token by token: y[t] = x[t] · w[g]ᵀ + bias[g] * scales[t].
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo.delayed_scaling import casts as delayed
from octavo.delayed_scaling.casts import Amax, W, X
from octavo.errors import UnsupportedConfig
from octavo.kernels import grouped_gemm
from octavo.layers.contract import DTYPES, Made, Tensors, WeightLayer
from octavo.layers.linear_config import NOTHING, Matmuls, Slots, padded
from octavo.memory import overlap
from octavo.quant.grouped import (
    GroupedTensor,
    fill_groups,
    grouped_assemble,
    grouped_proto,
    groups_amax,
    quantize_groups,
    scale_strides,
)
from octavo.quant.groups import BLOCK, Groups, equal, split
from octavo.quant.groups import abstract as abstract_groups
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts, QProto, QTensor
from octavo.quant.quantizer import CastArgs, Quantizer, QuantizerPair, in_order
from octavo.quant.tensorwise import Tensorwise
from octavo.recipes import BF16, Recipe
from octavo.values import register
from octavo.wgrad import deferred as post
from octavo.wgrad.targets import LazyTarget, Mail, Target, Writes, advance

ALIGNED = 16  # columns of codes, for the GEMM's copies; missing ones are zeros
Operand = Tensor | GroupedTensor


class Operands(NamedTuple):
    """Operands of dw."""

    dy: Operand
    x: Operand
    groups: Groups  # where a plain one is packed
    shape: tuple[int, ...]  # of dw: [G, N, K]


@register("grouped-linear")
class Config(Matmuls):
    """Everything that decides what a call does, but for its tensors."""

    recipe: Recipe = BF16()
    dtype: str = "float32"  # of y
    weight_dtype: str = "float32"
    bias_dtype: str = ""  # empty: no bias
    scales_dtype: str = ""  # of the bias' scales; empty: the bias is added as it is
    grads: str = ""  # which gradients are wanted: letters of "xwbs"
    weight: str = "plain"  # or "codes", given besides the weight; or "held": given, and there is nothing else
    observe: str = ""  # delayed scaling's amaxes are measured, and "returned" or raised "in_place"
    measured: str = ""  # delayed: letters of "xwd" (d is dy): no step may have seen them, and they scale themselves
    main_grad: str = ""  # dw goes to a buffer: "add", "overwrite"
    dummy_grad: bool = False  # and zeros are returned in its place, so that hooks fire
    delay: str = ""  # dw is put off: its operands go to a "mailbox", or in a graph to the "post"
    dgrad_out: bool = False  # dx goes to a buffer of the caller's
    tail: str = "zero"  # rows of y and dx after the last group; or "untouched": whatever is there

    @cached_property
    def kept_x(self) -> str:
        """What backward needs of x: "" or "plain", "column"."""
        return "" if "w" not in self.grads else "plain" if self.quant.wgrad.left is None else "column"

    @cached_property
    def kept_w(self) -> str:
        """What backward needs of w; "row" where its values are known from row codes alone."""
        if "x" not in self.grads:
            return ""
        if self.quant.dgrad.left is not None:
            return "column"
        return "row" if self.weight == "held" else "plain"

    @cached_property
    def x_pair(self) -> QuantizerPair:
        return self.quant.fprop.left, self.quant.wgrad.right if self.kept_x == "column" else None

    @cached_property
    def dy_pair(self) -> QuantizerPair:
        return (
            self.quant.dgrad.left if "x" in self.grads else None,
            self.quant.wgrad.left if "w" in self.grads else None,
        )

    @cached_property
    def posted(self) -> tuple[int, int]:
        """Where among all that forward makes, as a flat list, the post is: dy's slots, x as codes or a copy, groups."""
        start = 1 + (self.observe == "returned")
        spec = self.x_pair[1]
        of_x = post.slots_of_x(self.kept_x, spec)
        return start, start + self.slots + of_x + len(Groups._fields) - 1


def refusal(recipe: Recipe) -> str:
    """Why groups cannot run in a recipe; empty if they can."""
    quant = recipe.linear()
    if any(gemm.mode == "dequantized" for gemm in (quant.fprop, quant.dgrad, quant.wgrad)):
        return "a backward on dequantized codes has no grouped kernels in this version"
    return ""


class Inputs(NamedTuple):
    x: Tensor  # [rows, K]
    weight: Tensor  # [G, N, K]; where codes are all there is, the token that receives its gradient
    bias: Tensor | None  # [G, N]
    splits: Tensor  # [G] int32 or int64
    scales: Tensor | None = None  # [rows], of the bias
    out: Tensor | None = None  # [rows, N], the caller's: y is written there, and its tail is left alone
    w_row: Parts = ()  # of a weight given as codes
    w_column: Parts = ()
    scaling: Parts = ()  # delayed: multipliers [G] of x, w, dy; if one is measured also what all have seen
    seen: Parts = ()  # delayed, observed in place: running amaxes [G] of x and w


class Buffers(NamedTuple):
    """What backward writes besides its results."""

    main_grad: Target | LazyTarget | None = None
    amax: Tensor | None = None  # [G]: the amaxes of dy, folded by maximum
    seed: Tensor | None = None  # [2] int64: seed and step of stochastic rounding; the step advances
    mail: Mail | None = None
    dgrad_out: Tensor | None = None  # [rows, K], the caller's: dx is written there, and its tail is left alone


class Fresh(NamedTuple):
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


class Saved(NamedTuple):
    """x as dw needs it, w as dx needs it (column codes, or one plain tensor in their place), where the groups are, and
    what casts in backward take."""

    x_codes: Tensor | None
    x_scale: Tensor | None
    x_global_scale: Tensor | None
    w_codes: Tensor | None
    w_scale: Tensor | None
    w_global_scale: Tensor | None
    width: Tensor  # [0, K], for its shape alone
    bias: Tensor | None
    scales: Tensor | None
    dy_encode: Tensor | None  # delayed: dy's multipliers, and what they have seen if they are measured
    dy_seen: Tensor | None
    start: Tensor  # these five as of octavo.quant.groups.Groups
    block: Tensor
    owner: Tensor
    source: Tensor
    live: Tensor
    dy_room: Tensor | None = (
        None  # where a graph posts dy for a dw that is put off: dy itself, or its codes and the rest
    )
    dy_room_1: Tensor | None = None
    dy_room_2: Tensor | None = None
    dy_room_3: Tensor | None = None

    @property
    def x(self) -> Parts:
        return tuple([t for t in (self.x_codes, self.x_scale, self.x_global_scale) if t is not None])

    @property
    def w(self) -> Parts:
        return tuple([t for t in (self.w_codes, self.w_scale, self.w_global_scale) if t is not None])

    @property
    def dy_slot(self) -> list[Tensor]:
        return [t for t in (self.dy_encode, self.dy_seen) if t is not None]

    @property
    def room(self) -> Parts:
        found = self.dy_room, self.dy_room_1, self.dy_room_2, self.dy_room_3
        return tuple([t for t in found if t is not None])

    def groups(self, rows: int) -> Groups:
        return Groups(self.start, self.block, self.owner, self.source, self.live, rows)


class GroupedLinearLayer(WeightLayer):
    """x[g] · w[g]ᵀ + bias[g]."""

    scales = ("x_scale", "w_scale")
    takes_memory = True

    def graph_buffers(
        self,
        config: Config,
        main_grad: Parts,
        amax: Tensor | None,
        seed: Tensor | None,
        mark: Tensor | None,
        dgrad_out: Tensor | None,
    ) -> Buffers:
        """Buffers from the tensors that a graph passes along. `mark` only tells one posted call from another."""
        return Buffers(Target(main_grad, config.main_grad) if main_grad else None, amax, seed, None, dgrad_out)

    def returned_elsewhere(self, config: Config) -> dict[int, int]:
        return {0: Buffers._fields.index("dgrad_out")} if config.dgrad_out else {}

    def replays(self, config: Config, side: str) -> bool:
        """A tape does not see whether buffers of the caller's overlap others, or follow each other in memory."""
        return config.shipped and (side == "forward" or not (config.dgrad_out or config.main_grad))

    def forward(self, config: Config, inputs: Inputs) -> Made:
        x, number = inputs.x, inputs.weight.shape[0]
        if inputs.out is not None:
            _check_out(config, inputs, inputs.out)
        groups = split(inputs.splits, x.shape[0])
        amaxes = delayed.observed(config.observe, inputs.seen, number, x.device)
        slot = delayed.slot_of(X, config.measured, inputs.scaling)
        given = _given(config, x, config.x_pair, groups, slot, amaxes.x)
        x_row, x_column = _quantized(x, config.x_pair, groups, given)
        w_row, w_column = _quantized_weight(config, inputs, amaxes.w)
        y = inputs.out
        if y is None:
            y = torch.empty(x.shape[0], inputs.weight.shape[1], dtype=config.y_dtype, device=x.device)
        scales = inputs.scales
        if x_row is None or w_row is None:
            weight = inputs.weight.to(config.y_dtype)
            grouped_gemm.plain_rows(x.to(config.y_dtype), weight, y, groups, inputs.bias, scales)
        else:
            grouped_gemm.rows(x_row, w_row, y, inputs.bias, scales, height=_height(inputs.weight))
        if inputs.out is None:
            y = _finished(config, y, groups)
        else:  # a slice's version is the whole allocation's, where other slices may move
            y = y.data if y._is_view() else y.detach()
        extras: Parts = () if amaxes.extra is None else (amaxes.extra,)
        if config.slots:
            extras = (*extras, *_empty_slots(config, y, groups))
            if config.kept_x == "plain":
                extras = (*extras, x.clone(memory_format=torch.contiguous_format))  # who owns x may write to it
        x_kept = _parts(None if x_column is None else x_column.q)
        w_kept = _parts(w_column)
        width = x.new_empty(0, inputs.weight.shape[2])
        return Made((y,), extras, Fresh._make((*x_kept, *groups.tensors(), *w_kept, width)))

    def abstract(self, config: Config, inputs: Inputs) -> Made:
        x: Any = inputs.x
        weight: Any = inputs.weight
        number, n, k = weight.shape
        y = TensorProto((x.shape[0], n), config.y_dtype, x.device)
        groups = abstract_groups(x.shape[0], number, x.device)
        padded = groups[2].shape[0] * BLOCK
        extras: tuple[TensorProto, ...] = ()
        if config.observe == "returned":
            extras = (TensorProto((2 * number,), torch.float32, x.device),)
        if config.slots:
            extras = (*extras, *_abstract_dy_buffers(config, y, padded, number))
            if config.kept_x == "plain":
                extras = (*extras, TensorProto(tuple(x.shape), x.dtype, x.device))
        of_x, of_w = NOTHING, NOTHING
        if config.x_pair[1] is not None:
            of_x = _proto_parts(grouped_proto(config.x_pair[1], padded, number, _wide(k), "column", x.dtype, x.device))
        if config.w_pair[1] is not None:
            of_w = _proto_parts(_weight_proto(config.w_pair[1], "column", weight))
        return Made((y,), extras, Fresh._make((*of_x, *groups, *of_w, TensorProto((0, k), x.dtype, x.device))))

    def wants(self, config: Config) -> tuple[bool, ...]:
        w = "w" in config.grads and not config.delay and (not config.main_grad or config.dummy_grad)
        grads = config.grads
        return "x" in grads, w, "b" in grads, False, "s" in grads, *[False] * (len(Inputs._fields) - 5)

    def fills(self, config: Config) -> bool:
        return config.slots > 0

    def extras(self, config: Config) -> int:
        return (config.observe == "returned") + config.slots + (config.slots > 0 and config.kept_x == "plain")

    def posted_operands(self, config: Config, mail: Parts, x: Parts, weight: Tensor) -> Operands:
        count = len(Groups._fields) - 1
        slots, codes = mail[: config.slots], mail[config.slots : -count]
        groups = Groups._make((*mail[-count:], slots[-1].shape[0]))
        dy: Operand = slots[0] if config.slots == 1 else _slot(config, slots, groups)
        return Operands(dy, _x_operand(config, codes, groups, config.y_dtype), groups, tuple(weight.shape))

    def abstract_weight(self, config: Config, weight: TensorProto) -> tuple[QProto | None, QProto | None]:
        row, column = config.quant.fprop.right, config.quant.dgrad.right
        return (
            None if row is None else _weight_proto(row, "row", weight),
            None if column is None else _weight_proto(column, "column", weight),
        )

    def weight_values(
        self, config: Config, row: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        number, n, k = shape
        spec = config.quant.fprop.right
        assert spec is not None
        q = grouped_assemble(spec, row, number, "row", _wide(k), dtype)
        return GroupedTensor(q, equal(number, n, q.device), "row").dequantize(dtype).view(number, n, -1)[..., :k]

    def refresh(
        self, config: Config, weight: Tensor, row: Sequence[Tensor], column: Sequence[Tensor], amaxes: Sequence[Tensor],
        scaling: Sequence[Tensor], skip: Tensor | None = None,
    ) -> None:  # fmt: skip
        specs, (number, _, k) = (config.quant.fprop.right, config.quant.dgrad.right), weight.shape
        matrix, groups = _stacked(weight)
        pair = tuple(
            GroupedTensor(grouped_assemble(spec, parts, number, side, _wide(k), weight.dtype), groups, side)
            if spec is not None and parts
            else None
            for spec, parts, side in zip(specs, (row, column), ("row", "column"), strict=True)
        )
        given = CastArgs(skip=skip)
        if scaling:
            given = _given(config, matrix, specs, groups, scaling, amaxes[0][number:] if amaxes else None)
            given = given._replace(skip=skip)
        fill_groups(_aligned(matrix), (pair[0], pair[1]), given)

    def save(self, config: Config, inputs: Inputs, made: Made) -> Saved:
        fresh = Fresh._make(made.fresh)
        x: Slots = (fresh.x_codes, fresh.x_scale, fresh.x_global_scale)
        w: Slots = (fresh.w_codes, fresh.w_scale, fresh.w_global_scale)
        if config.slots:
            x = NOTHING  # it is in the post
        elif config.kept_x == "plain":
            x = (inputs.x, None, None)
        if config.kept_w == "plain":
            w = (inputs.weight, None, None)
        elif config.kept_w and config.weight != "plain":
            given = inputs.w_row if config.kept_w == "row" else inputs.w_column
            w = padded(given)
        bias = inputs.bias if "s" in config.grads else None
        scales = inputs.scales if "b" in config.grads else None
        dy = delayed.kept_for(config.dy_pair, config.measured, inputs.scaling)
        groups = (fresh.start, fresh.block, fresh.owner, fresh.source, fresh.live)
        start = config.posted[0] - 1
        room = made.extras[start : start + config.slots]
        return Saved(*x, *w, fresh.width, bias, scales, *dy, *groups, *room)

    def backward(
        self, config: Config, saved: Any, buffers: Buffers, grads: Tensors, writes: Writes | None = None
    ) -> Tensors:
        dy = grads[0]
        if dy is None:
            return (None,) * len(Inputs._fields)
        kept = Saved._make(saved)
        if buffers.dgrad_out is not None and overlap(buffers.dgrad_out, dy):
            _refuse_overlap("dgrad_out", "dy, which this layer and others may still have to read")
        dy = dy.contiguous()  # expanded and turned gradients too: every kernel reads rows
        groups = kept.groups(dy.shape[0])
        row, column = _quantized_dy(config, dy, kept, groups, buffers.amax, buffers.seed)
        dx = dw = db = ds = None
        if "x" in config.grads:
            dx = _input_gradient(config, dy, row, kept, groups, buffers.dgrad_out)
        if "b" in config.grads:
            db = grouped_gemm.column_sums_of(dy, groups, DTYPES[config.bias_dtype], kept.scales)
        if "s" in config.grads:
            assert kept.bias is not None
            ds = grouped_gemm.bias_products(dy, kept.bias, groups, DTYPES[config.scales_dtype])
        if "w" in config.grads:  # buffers are written last
            dw = _delivered(config, dy, column, kept, groups, buffers)
        if config.draws and buffers.seed is not None:
            advance(buffers.seed)
        return dx, dw, db, None, ds, *[None] * (len(Inputs._fields) - 5)

    def weight_gradient(
        self, config: Config, operands: Any, target: Target | LazyTarget | None, writes: Writes | None = None
    ) -> Tensor | None:
        dy, x, groups, shape = Operands._make(operands)
        number, n, k = shape
        dtype, device = DTYPES[config.weight_dtype], groups.start.device
        if target is None:
            if isinstance(dy, Tensor) and isinstance(x, Tensor):
                return grouped_gemm.fresh_wgrad(dy, x, groups, dtype)
            return _fill_weight_gradient(
                dy, x, groups, torch.empty(shape, dtype=dtype, device=device), accumulate=False
            )
        out = target.open(number * n, k).view(number, n, k)
        with preserve_version_counter(out):  # a graph in flight may have it among what it saved
            _fill_weight_gradient(dy, x, groups, out, accumulate=config.main_grad == "add")
        target.close()
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
        """Counts every row, also of the tail: how long that is only the device knows."""
        return 2 * inputs.x.shape[0] * math.prod(inputs.weight.shape[1:])

    def gradient_flops(self, config: Config, saved: Any, dy: Any) -> int:
        gemms = ("x" in config.grads) + ("w" in config.grads and not config.delay)
        return int(gemms * 2 * dy.numel() * Saved._make(saved).width.shape[1])


layer = GroupedLinearLayer(Config, Inputs, Fresh, Saved, Buffers)


# -- forward ---------------------------------------------------------------------------------------------------------


def _quantized(
    x: Tensor, pair: QuantizerPair, groups: Groups, given: CastArgs
) -> tuple[GroupedTensor | None, GroupedTensor | None]:
    if pair[0] is None and pair[1] is None:
        return None, None
    return quantize_groups(_aligned(x), *pair, groups, given)


def _given(
    config: Config, x: Tensor, pair: QuantizerPair, groups: Groups, slot: Sequence[Tensor], observed: Tensor | None,
    seed: Tensor | None = None,
) -> CastArgs:  # fmt: skip
    """What the layer brings to a cast of x, whose groups have a multiplier each."""
    flat = [t.view(groups.number) for t in slot]
    return delayed.cast_args(config.recipe, pair, flat, _amaxes_of(x, groups), observed, seed)


def _amaxes_of(x: Tensor, groups: Groups) -> Amax:
    def own(spec: Tensorwise, warm: Tensor) -> Tensor:
        amax = groups_amax(x, spec, None, groups)[0]
        assert amax is not None
        return amax

    return own


def _aligned(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % ALIGNED)) if x.shape[-1] % ALIGNED else x


def _wide(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED


def _height(weight: Tensor | TensorProto) -> int:
    """Rows from one expert's stacked weight to the next one's."""
    return -(-weight.shape[1] // BLOCK) * BLOCK


def _quantized_weight(config: Config, inputs: Inputs, observed: Tensor | None) -> tuple[QTensor | None, QTensor | None]:
    """Row codes [G * height, K] and column codes [K, G * height], given or made."""
    weight, spec = inputs.weight, config.quant.fprop.right
    if config.weight != "plain":
        number, _, k = weight.shape
        if spec is None:
            return None, None
        return grouped_assemble(spec, inputs.w_row, number, "row", _wide(k), weight.dtype), None
    if config.w_pair[0] is None and config.w_pair[1] is None:
        return None, None
    matrix, groups = _stacked(weight)
    slot = delayed.slot_of(W, config.measured, inputs.scaling)
    given = _given(config, matrix, config.w_pair, groups, slot, observed)
    row, column = _quantized(matrix, config.w_pair, groups, given)
    return (None if row is None else row.q), (None if column is None else column.q)


def _stacked(weight: Tensor) -> tuple[Tensor, Groups]:
    """Weights [G, N, K] as rows in groups."""
    number, n, k = weight.shape
    return weight.detach().reshape(number * n, k), equal(number, n, weight.device)


def _check_out(config: Config, inputs: Inputs, out: Tensor) -> None:
    """Refuse a y that would be written to what is still to be read."""
    if overlap(out, inputs.x) and (config.kept_x == "plain" or config.quant.fprop.left is None):
        _refuse_overlap("out", "x, which is multiplied as it is, now or for the weight's gradient")
    for name in ("weight", "bias", "splits", "scales"):
        tensor = getattr(inputs, name)
        if tensor is not None and overlap(out, tensor):
            _refuse_overlap("out", f"{name}, which the layer needs as it is")


def _refuse_overlap(name: str, what: str) -> NoReturn:
    raise UnsupportedConfig(f"{name} lies in the memory of {what}. Give it memory of its own.")


def _parts(q: QTensor | None) -> Slots:
    return NOTHING if q is None else (q.codes, q.scale, q.global_scale)


def _finished(config: Config, out: Tensor, groups: Groups) -> Tensor:
    if config.tail == "zero":
        grouped_gemm.zero_tail(out, groups)
    return out


def _proto_parts(q: QProto) -> Any:
    return q.codes, q.scale, q.global_scale


# -- gradients put off in a graph (octavo.wgrad.deferred) ---------------------------------------------------------


def _abstract_dy_buffers(config: Config, y: TensorProto, padded: int, number: int) -> tuple[TensorProto, ...]:
    """Room for dy as dw needs it."""
    spec = config.dy_pair[1]
    if spec is None:
        return (y,)
    q = grouped_proto(spec, padded, number, _wide(y.shape[1]), "column", y.dtype, y.device)
    return post.room(q, y.shape[0], y)


def _empty_slots(config: Config, y: Tensor, groups: Groups) -> Parts:
    like = TensorProto(tuple(y.shape), y.dtype, y.device)
    return post.unfilled(_abstract_dy_buffers(config, like, groups.padded, groups.number))


def _slot(config: Config, slots: Sequence[Tensor], groups: Groups) -> GroupedTensor:
    """dy's slots as the column codes that they are."""
    spec = config.dy_pair[1]
    assert spec is not None
    q = grouped_assemble(spec, slots[:-1], groups.number, "column", slots[0].shape[0], config.y_dtype)
    return GroupedTensor(q, groups, "column")


# -- cached weights --------------------------------------------------------------------------------------------------


def _weight_proto(spec: Quantizer, side: str, weight: Tensor | TensorProto) -> QProto:
    number, _, k = weight.shape
    return grouped_proto(spec, number * _height(weight), number, _wide(k), side, weight.dtype, weight.device)


# -- backward --------------------------------------------------------------------------------------------------------


def _quantized_dy(
    config: Config, dy: Tensor, kept: Saved, groups: Groups, observed: Tensor | None, seed: Tensor | None
) -> tuple[GroupedTensor | None, GroupedTensor | None]:
    slot = kept.dy_slot
    drawn = seed if config.draws else None
    given = _given(config, dy, config.dy_pair, groups, slot, observed, drawn)
    spec, into = config.dy_pair
    if config.slots < 2 or into is None:
        return _quantized(dy, config.dy_pair, groups, given)
    row = None
    if spec is not None:
        like = grouped_proto(spec, groups.padded, groups.number, _wide(dy.shape[1]), "row", dy.dtype, dy.device)
        row = GroupedTensor(like.empty(), groups, "row")
    found = row, _slot(config, kept.room, groups)
    fill_groups(_aligned(dy), found, given)
    return found


def _input_gradient(
    config: Config, dy: Tensor, row: GroupedTensor | None, kept: Saved, groups: Groups, out: Tensor | None
) -> Tensor:
    number, n, k = groups.number, dy.shape[1], kept.width.shape[1]
    dx = torch.empty(dy.shape[0], k, dtype=dy.dtype, device=dy.device) if out is None else out
    if row is None:
        weight = kept.w_codes
        if config.kept_w == "row":
            weight = layer.weight_values(config, kept.w, (number, n, k), dy.dtype)
        assert weight is not None
        grouped_gemm.plain_rows(dy, weight.to(dy.dtype).transpose(1, 2), dx, groups)
    else:
        spec = config.quant.dgrad.right
        assert spec is not None
        w = _saved_columns(spec, kept.w, number, _wide(k), dy.dtype)
        grouped_gemm.rows(row, w, dx, height=-(-n // BLOCK) * BLOCK, along="columns")
    return _finished(config, dx, groups) if out is None else dx


def _delivered(
    config: Config, dy: Tensor, column: GroupedTensor | None, kept: Saved, groups: Groups, buffers: Buffers
) -> Tensor | None:
    """dw; or its operands brought to where they are waited for."""
    if config.slots:
        room = kept.dy_room
        if column is None and room is not None:  # codes are in their place already
            room.copy_(dy)
        return None
    right = _x_operand(config, kept.x, groups, dy.dtype)
    shape = (groups.number, dy.shape[1], kept.width.shape[1])
    operands = Operands(dy if column is None else column, right, groups, shape)
    if config.delay:
        assert buffers.mail is not None
        buffers.mail.put(config, *operands)
        return None
    return layer.weight_gradient(config, operands, buffers.main_grad)


def _x_operand(config: Config, parts: Sequence[Tensor], groups: Groups, dtype: torch.dtype) -> Operand:
    if config.kept_x == "plain":
        return parts[0].to(dtype)
    spec = config.quant.wgrad.right
    assert spec is not None
    q = _saved_columns(spec, parts, groups.number, parts[0].shape[0], dtype)
    return GroupedTensor(q, groups, "column")


def _saved_columns(spec: Quantizer, parts: Sequence[Tensor], number: int, k: int, dtype: torch.dtype) -> QTensor:
    q = grouped_assemble(spec, parts, number, "column", k, dtype)
    return in_order(q, scale_strides(spec, (q.scale.shape[0], q.scale.shape[1])))


def _fill_weight_gradient(dy: Operand, x: Operand, groups: Groups, out: Tensor, *, accumulate: bool) -> Tensor:
    if isinstance(dy, GroupedTensor) and isinstance(x, GroupedTensor):
        return grouped_gemm.grouped_wgrad(dy, x, out, accumulate=accumulate)
    assert isinstance(dy, Tensor) and isinstance(x, Tensor)
    return grouped_gemm.plain_wgrad(dy, x, out, groups, accumulate=accumulate)
