"""The linear layer of many experts: rows of x come in ragged groups, and each group has a weight of its own.

    y[g] = x[g] · w[g]ᵀ + bias[g]        dx[g] = dy[g] · w[g]        dw[g] = dy[g]ᵀ · x[g]

How many rows a group has is on the device, in `splits`, and is never read back: shapes follow from x, whose rows after
the last group are a tail that nothing reads. Each group is quantized as if it were alone. Backward keeps the column
codes of x and of w.
"""

import math
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import values
from octavo.errors import check_choice
from octavo.kernels import grouped_gemm
from octavo.layers.contract import Made
from octavo.layers.linear import DTYPES, Fixed, Target
from octavo.quant.grouped import GroupedTensor, quantize_groups
from octavo.quant.groups import BLOCK, Groups, split
from octavo.quant.groups import protos as group_protos
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Given, Quantizer, quantize_pair
from octavo.recipes import BF16, LinearQuant, Recipe
from octavo.values import Value, register

ALIGNED = 16  # columns of codes, for the GEMM's copies; missing ones are zeros


@register("grouped-linear")
class Config(Value):
    """Everything that decides what a call does, but for its tensors."""

    recipe: Recipe = BF16()
    dtype: str = "float32"  # of y
    weight_dtype: str = "float32"
    bias_dtype: str = ""  # empty: no bias
    grads: str = ""  # which gradients are wanted: letters of "xwb"
    main_grad: str = ""  # dw goes to a buffer: "add", "overwrite"
    dummy_grad: bool = False  # and zeros are returned in its place, so that hooks fire
    tail: str = "zero"  # rows of y and dx after the last group; or "untouched": whatever is there

    def validate(self) -> None:
        check_choice(self.tail, ("zero", "untouched"), what="tail")

    @cached_property
    def quant(self) -> LinearQuant:
        return self.recipe.linear()

    @cached_property
    def is_quantized(self) -> bool:
        return self.quant.fprop.left is not None

    @cached_property
    def y_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def refusal(recipe: Recipe) -> str:
    """Why groups cannot run in a recipe; empty if they can."""
    quant = recipe.linear()
    specs = [s for gemm in (quant.fprop, quant.dgrad, quant.wgrad) for s in (gemm.left, gemm.right)]
    if all(s is None for s in specs):
        return ""
    if any(s is None for s in specs):
        return "all three GEMMs must be quantized, or none"
    return "" if all(s.takes_groups for s in specs if s is not None) else "it has no grouped kernels in this version"


@lru_cache(maxsize=4096)
def config(key: str) -> Config:
    """The config whose string this is."""
    found = values.parse(key)
    assert isinstance(found, Config)
    return found


class Inputs(NamedTuple):
    x: Tensor  # [rows, K]
    weight: Tensor  # [G, N, K]
    bias: Tensor | None  # [G, N]
    splits: Tensor  # [G] int32 or int64
    out: Tensor | None = None  # [rows, N], the caller's: y is written there, and its tail is left alone


class Buffers(NamedTuple):
    """What backward writes besides its results."""

    main_grad: Target | None = None
    dgrad_out: Tensor | None = None  # [rows, K], the caller's: dx is written there, and its tail is left alone


# -- forward ---------------------------------------------------------------------------------------------------------


def forward(config: Config, inputs: Inputs) -> Made:
    groups = split(inputs.splits, inputs.x.shape[0])
    if not config.is_quantized:
        x, weight = inputs.x.to(config.y_dtype), inputs.weight.to(config.y_dtype)
        plain = grouped_gemm.plain_rows(x, weight, inputs.bias, groups)
        return Made((_finished(config, plain, groups),), (), (None,) * 4 + groups.tensors())
    y = inputs.out
    if y is None:
        y = torch.empty(inputs.x.shape[0], inputs.weight.shape[1], dtype=config.y_dtype, device=inputs.x.device)
    quant = config.quant
    x_row, x_column = quantize_groups(
        _aligned(inputs.x), quant.fprop.left, quant.wgrad.right if "w" in config.grads else None, groups
    )
    w_row, w_column = _quantized_weights(config, inputs.weight)
    assert x_row is not None and w_row is not None
    grouped_gemm.rows(x_row, w_row, y, inputs.bias, height=_height(inputs.weight))
    kept = (*_parts(None if x_column is None else x_column.q), *_parts(w_column))
    return Made((y if inputs.out is not None else _finished(config, y, groups),), (), kept + groups.tensors())


def _aligned(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % ALIGNED)) if x.shape[-1] % ALIGNED else x


def _height(weight: Tensor | TensorProto) -> int:
    """Rows from one expert's stacked weight to the next one's."""
    return -(-weight.shape[1] // BLOCK) * BLOCK


def _quantized_weights(config: Config, weight: Tensor) -> tuple[QTensor | None, QTensor | None]:
    """Row codes [G * height, K] and, for dx, column codes [K, G * height]: no block of 128 has two experts in it."""
    quant = config.quant
    missing = _height(weight) - weight.shape[1], -weight.shape[2] % ALIGNED
    w = F.pad(weight, (0, missing[1], 0, missing[0])) if any(missing) else weight
    column = quant.dgrad.right if "x" in config.grads else None
    return quantize_pair(w.reshape(-1, w.shape[2]), quant.fprop.right, column, Given())


def _parts(q: QTensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if q is None else (q.codes, q.scale)


def _finished(config: Config, out: Tensor, groups: Groups) -> Tensor:
    if config.tail == "zero":
        grouped_gemm.zero_tail(out, groups)
    return out


def protos(config: Config, inputs: Inputs) -> Made:
    """What forward makes, from inputs that are TensorProtos."""
    x, weight = inputs.x, inputs.weight
    rows, (number, n, k) = x.shape[0], weight.shape
    y = TensorProto((rows, n), config.y_dtype, x.device)
    groups = group_protos(rows, number, x.device)
    if not config.is_quantized:
        return Made((y,), (), (None,) * 4 + groups)
    wide = -(-k // ALIGNED) * ALIGNED
    padded = TensorProto((groups[2].shape[0] * BLOCK, wide), x.dtype, x.device)
    stacked = TensorProto((number * _height(weight), wide), weight.dtype, x.device)
    kept: list[TensorProto | None] = []
    for wanted, spec, like in (
        ("w" in config.grads, config.quant.wgrad.right, padded),
        ("x" in config.grads, config.quant.dgrad.right, stacked),
    ):
        q = spec.proto(like, axis=0) if wanted and spec is not None else None
        kept += [None, None] if q is None else [q.codes, q.scale]
    return Made((y,), (), (*kept, *groups))


FLAT = (1, 3)  # of what forward makes fresh: the scales


def wants(config: Config) -> tuple[bool, ...]:
    """Which inputs backward gives a gradient for."""
    w = "w" in config.grads and (not config.main_grad or config.dummy_grad)
    return "x" in config.grads, w, "b" in config.grads, False, False


def fills(config: Config) -> bool:
    return False


def graph_buffers(main_grad: Tensor | None) -> Buffers:
    """Buffers from the tensors that a graph passes along."""
    return Buffers(None if main_grad is None else Fixed(main_grad))


# -- backward --------------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    x: Tensor | None  # column codes, or plain
    x_scale: Tensor | None
    w: Tensor | None
    w_scale: Tensor | None
    shape: Tensor  # the weight itself, for its shape alone
    groups: tuple[Tensor, ...]


def save(config: Config, inputs: Inputs, made: Made) -> tuple[Tensor | None, ...]:
    x, x_scale, w, w_scale, *groups = made.fresh
    if not config.is_quantized:
        x = inputs.x if "w" in config.grads else None
        w = inputs.weight if "x" in config.grads else None
    return x, x_scale, w, w_scale, inputs.weight, *groups


def backward(
    config: Config, saved: tuple[Tensor | None, ...], buffers: Buffers, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    dy = grads[0]
    if dy is None:
        return (None,) * len(Inputs._fields)
    kept = Saved._make((*saved[:5], saved[5:]))
    dy = dy.contiguous()  # expanded and turned gradients too: every kernel reads rows
    groups = Groups._make((*kept.groups, dy.shape[0]))
    row, column = _quantized_dy(config, dy, groups)
    dx = dw = db = None
    if "x" in config.grads:
        dx = _input_gradient(config, dy, row, kept, groups, buffers.dgrad_out)
    if "b" in config.grads:
        db = grouped_gemm.column_sums_of(dy, groups, DTYPES[config.bias_dtype])
    if "w" in config.grads:  # buffers are written last
        dw = _weight_gradient(config, dy, column, kept, groups, buffers.main_grad)
    return dx, dw, db, None, None


def _quantized_dy(config: Config, dy: Tensor, groups: Groups) -> tuple[GroupedTensor | None, GroupedTensor | None]:
    if not config.is_quantized:
        return None, None
    row: Quantizer | None = config.quant.dgrad.left if "x" in config.grads else None
    column = config.quant.wgrad.left if "w" in config.grads else None
    return (None, None) if row is None and column is None else quantize_groups(_aligned(dy), row, column, groups)


def _input_gradient(
    config: Config, dy: Tensor, row: GroupedTensor | None, kept: Saved, groups: Groups, out: Tensor | None
) -> Tensor:
    assert kept.w is not None
    if row is None:
        dx = grouped_gemm.plain_rows(dy, kept.w.to(dy.dtype).transpose(1, 2), None, groups)
        return _finished(config, dx, groups)
    dx = torch.empty(dy.shape[0], kept.shape.shape[2], dtype=dy.dtype, device=dy.device) if out is None else out
    spec, height = config.quant.dgrad.right, _height(kept.shape)
    assert spec is not None and kept.w_scale is not None
    w = spec.assemble((kept.w, kept.w_scale), (kept.w.shape[0], groups.number * height), dy.dtype)
    grouped_gemm.rows(row, w, dx, height=height, along="columns")
    return _finished(config, dx, groups) if out is None else dx


def _weight_gradient(
    config: Config, dy: Tensor, column: GroupedTensor | None, kept: Saved, groups: Groups, target: Target | None
) -> Tensor | None:
    number, n, k = kept.shape.shape
    dtype = DTYPES[config.weight_dtype]
    if target is None:
        out = torch.empty(number, n, k, dtype=dtype, device=dy.device)
        return _fill_weight_gradient(config, dy, column, kept, groups, out, accumulate=False)
    out = target.open(number * n, k).view(number, n, k)
    _fill_weight_gradient(config, dy, column, kept, groups, out, accumulate=config.main_grad == "add")
    target.close()
    return torch.zeros(number, n, k, dtype=dtype, device=dy.device) if config.dummy_grad else None


def _fill_weight_gradient(
    config: Config, dy: Tensor, column: GroupedTensor | None, kept: Saved, groups: Groups, out: Tensor, *,
    accumulate: bool,
) -> Tensor:  # fmt: skip
    assert kept.x is not None
    if column is None:
        dw = grouped_gemm.plain_depth(dy, kept.x.to(dy.dtype), groups)
        return out.add_(dw) if accumulate else out.copy_(dw)
    spec = config.quant.wgrad.right
    assert spec is not None and kept.x_scale is not None
    q = spec.assemble((kept.x, kept.x_scale), (kept.x.shape[0], groups.padded), dy.dtype)
    return grouped_gemm.depth(column, GroupedTensor(q, groups, "column"), out, accumulate=accumulate)


def gradient_protos(config: Config, saved: tuple[Tensor | None, ...], dy: Tensor) -> tuple[TensorProto | None, ...]:
    """What backward returns, without data."""
    weight = saved[4]
    assert weight is not None
    x, w, b, *rest = wants(config)
    number, n, k = weight.shape
    return (
        TensorProto((dy.shape[0], k), dy.dtype, dy.device) if x else None,
        TensorProto((number, n, k), DTYPES[config.weight_dtype], dy.device) if w else None,
        TensorProto((number, n), DTYPES[config.bias_dtype], dy.device) if b else None,
        *[None] * len(rest),
    )


def flops(config: Config, inputs: Inputs) -> int:
    """Of forward's GEMM, as if no row were tail: how many are is not known here."""
    return 2 * inputs.x.shape[0] * math.prod(inputs.weight.shape[1:])


def gradient_flops(config: Config, saved: tuple[Tensor | None, ...], dy: Tensor) -> int:
    """Of backward's."""
    weight = saved[4]
    assert weight is not None
    return sum(letter in config.grads for letter in "xw") * 2 * dy.shape[0] * math.prod(weight.shape[1:])
