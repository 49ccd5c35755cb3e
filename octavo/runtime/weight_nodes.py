"""Operators of weights in a graph: codes that are refreshed, codes in a weight's place, and steps of optimizers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from octavo.runtime.contract import LAYERS, WeightCast
from octavo.runtime.digest import DIGEST


@torch.library.custom_op("octavo::refresh", mutates_args=("row", "column", "amaxes"))
def _refresh(
    weight: Tensor, row: list[Tensor], column: list[Tensor], amaxes: list[Tensor], scaling: list[Tensor],
    skip: Tensor | None, all_reduced: list[Tensor], call: str,
) -> None:  # fmt: skip
    _, name, key = call.split("|", 2)
    layer = LAYERS[name]
    layer.refresh(layer.config(key), WeightCast(weight, row, column, amaxes, scaling, skip, all_reduced))


def refresh(name: str, key: str, cast: WeightCast) -> None:
    """Quantize a weight into cached codes, in place: the node before the layer's own."""
    parts = [list(group) for group in (cast.row, cast.column, cast.amaxes, cast.scaling)]
    torch.ops.octavo.refresh(cast.weight, *parts, cast.skip, list(cast.all_reduced), DIGEST + "|" + name + "|" + key)


graph_steps = [0]  # steps of optimizers that graphs have taken: a graph must not guard on a number that changes
step_listeners: list[Callable[[Sequence[Tensor]], None]] = []  # functions that get the weights of each of these steps


@torch.library.custom_op("octavo::advance", mutates_args=())
def _advance(weights: Sequence[Tensor]) -> None:
    """Advance versions when the graph runs: an optimizer in it is about to write to these weights."""
    # a graph writes to weights without counting, and caches of codes compare versions
    torch.autograd.graph.increment_version(list(weights))
    graph_steps[0] += 1
    for listener in step_listeners:
        listener(weights)


@_advance.register_fake
def _(weights: Sequence[Tensor]) -> None:
    return None


has_side_effect(torch.ops.octavo.advance.default)


@torch.library.custom_op("octavo::weight_values", mutates_args=())
def _weight_values(row: list[Tensor], shape: list[int], dtype: torch.dtype, call: str) -> Tensor:
    _, name, key = call.split("|", 2)
    layer = LAYERS[name]
    found: Tensor = layer.weight_values(layer.config(key), row, tuple(shape), dtype)
    # the fake says so: a compiler reads strides from it
    return found.contiguous()


@_weight_values.register_fake
def _(row: list[Tensor], shape: list[int], dtype: torch.dtype, call: str) -> Tensor:
    return row[0].new_empty(shape, dtype=dtype)


def weight_values(name: str, key: str, row: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the values that the row codes of a weight stand for."""
    return torch.ops.octavo.weight_values(list(row), list(shape), dtype, DIGEST + "|" + name + "|" + key)


@torch.library.custom_op("octavo::anchor", mutates_args=())
def _quantized_anchor(parts: list[Tensor], shape: list[int]) -> Tensor:
    return parts[0].new_zeros(1).expand(shape)


_quantized_anchor.register_fake(lambda parts, shape: parts[0].new_zeros(1).expand(shape))


def _anchor_gradient(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None]:
    return [grad] if ctx.number == 1 else list(grad.unbind()), None


def _count_parts(ctx: Any, inputs: tuple[list[Tensor], list[int]], output: Tensor) -> None:
    ctx.number = len(inputs[0])


_quantized_anchor.register_autograd(_anchor_gradient, setup_context=_count_parts)
ANCHOR = torch.ops.octavo.anchor.default


def anchor(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return a one-element tensor that looks like the weight that consists of `parts`, and passes its gradient to
    them."""
    return torch.ops.octavo.anchor(list(parts), list(shape))
