"""The cast of rows in groups that carries a gradient: in eager mode one autograd function, in a graph one node.

    octavo::quantize_groups (Tensor x, Tensor sizes, Tensor? seed, Tensor? source, str row, str column) -> Tensor[]

Its results are a gradient anchor, the codes as bytes and flat scales of each orientation that has a quantizer, and the
places of the groups. The anchor has the shape of the rows in one stored element. Its gradient is that of the values,
and goes to x unchanged; with a `source`, each row of x gets the sum of the rows that were copied from it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.quant import grouped
from octavo.quant.cast_checks import check_source
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import BLOCK, Groups, abstract, split
from octavo.quant.qtensor import ORIENTATIONS, QTensor
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.values import parse

Pair = tuple[Quantizer | None, Quantizer | None]


def cast_groups(x: Tensor, sizes: Tensor, pair: Pair, seed: Tensor | None, source: Tensor | None) -> GroupedTensor:
    """Return a GroupedTensor of x's rows in groups, with a gradient if x requires one."""
    needs = x.requires_grad and torch.is_grad_enabled()
    rows = math.prod(x.shape[:-1]) if source is None else check_source(source, x)
    anchor = None
    if torch.compiler.is_compiling():
        keys = ["" if spec is None else spec.key for spec in pair]
        anchor, *parts = torch.ops.octavo.quantize_groups(x, sizes, seed, source, *keys)
        groups = Groups(parts[-5], parts[-4], parts[-3], parts[-2], parts[-1], rows)
        row, column = _assembled(parts, x, pair, sizes.shape[0])
    else:
        groups = split(sizes, rows)
        made = grouped.quantize_groups(x, *pair, groups, CastArgs(seed=seed, source=source))
        row, column = (None if t is None else t.q for t in made)
        if needs:
            anchor = _Carrier.apply(x, source, groups.start)  # type: ignore[no-untyped-call]
    anchor = anchor if needs else None
    if row is not None:
        return GroupedTensor(row, groups, "row", column, anchor)
    assert column is not None
    return GroupedTensor(column, groups, "column", None, anchor)


class _Carrier(torch.autograd.Function):
    """Return the gradient anchor of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor | None, start: Tensor) -> Tensor:
        ctx.shape = x.shape
        ctx.save_for_backward(source, start)
        return _anchor(x, source)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _gradient(dy, ctx.shape, *ctx.saved_tensors), None, None


def _anchor(x: Tensor, source: Tensor | None) -> Tensor:
    rows = math.prod(x.shape[:-1]) if source is None else source.shape[0]
    return x.new_zeros(1).expand(rows, x.shape[-1])


def _gradient(dy: Tensor, shape: Sequence[int], source: Tensor | None, start: Tensor) -> Tensor:
    """Return the gradient of x from that of its anchor. Sums of rows are float32, in a fixed order."""
    if source is None:
        return dy.reshape(shape)
    tokens = math.prod(shape[:-1])
    row = torch.arange(source.shape[0], device=dy.device, dtype=torch.int64)
    none = (source < 0) | (source >= tokens) | (row >= start[-1])
    sums = torch.zeros(tokens + 1, shape[-1], dtype=torch.float32, device=dy.device)
    places = torch.where(none, tokens, source.long())  # the last row is cut off
    sums = sums.index_put((places,), dy.float(), accumulate=True)
    return sums[:tokens].to(dy.dtype).reshape(shape)


# -- the node of a graph -----------------------------------------------------------------------------------------------


@torch.library.custom_op("octavo::quantize_groups", mutates_args=())
def _quantize_groups(
    x: Tensor, sizes: Tensor, seed: Tensor | None, source: Tensor | None, row: str, column: str
) -> list[Tensor]:
    anchor = _anchor(x, source)
    groups = split(sizes, anchor.shape[0])
    made = grouped.quantize_groups(x.detach(), *_parsed(row, column), groups, CastArgs(seed=seed, source=source))
    parts = [part for t in made if t is not None for part in crossing(t.q)]
    return [anchor, *parts, *groups.tensors()]


@_quantize_groups.register_fake
def _(x: Tensor, sizes: Tensor, seed: Tensor | None, source: Tensor | None, row: str, column: str) -> list[Tensor]:
    anchor, number = _anchor(x, source), sizes.shape[0]
    places = abstract(anchor.shape[0], number, x.device)
    padded = places[2].shape[0] * BLOCK
    parts: list[Tensor] = []
    for spec, side in zip(_parsed(row, column), ORIENTATIONS, strict=True):
        if spec is not None:
            proto = grouped.grouped_proto(spec, padded, number, anchor.shape[1], side, x.dtype, x.device)
            parts += crossing(proto.empty())
    return [anchor, *parts, *[place.empty() for place in places]]


def _parsed(row: str, column: str) -> Pair:
    return (parse(row) if row else None), (parse(column) if column else None)


def crossing(q: QTensor) -> list[Tensor]:
    """Return the tensors of q as they leave a node: codes as bytes, which have no gradient, and the scale flat."""
    level2 = [] if q.global_scale is None else [q.global_scale]
    return [q.codes.view(torch.uint8), q.scale.as_strided((q.scale.numel(),), (1,)), *level2]


def _assembled(parts: Sequence[Tensor], x: Tensor, pair: Pair, number: int) -> tuple[QTensor | None, QTensor | None]:
    """Return the codes that left a node."""
    found: list[QTensor | None] = []
    for spec, side in zip(pair, ORIENTATIONS, strict=True):
        found.append(
            None if spec is None else grouped.grouped_assemble(spec, parts, number, side, x.shape[-1], x.dtype)
        )
        parts = parts if spec is None else parts[3 if spec.two_level else 2 :]
    return found[0], found[1]


def _set_up(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    x, _, _, source, _, _ = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(source, output[-5])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, None, None, None, None, None]:
    dx = None if grads[0] is None else _gradient(grads[0], ctx.shape, *ctx.saved_tensors)
    return dx, None, None, None, None, None


_quantize_groups.register_autograd(_backward, setup_context=_set_up)
