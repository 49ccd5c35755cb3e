"""Rows that travel between the ranks of experts: values, or codes with their scales."""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fusion.sequential import Sequential
from octavo.moe.agreed_scale import History, largest_of_ranks, remembered
from octavo.moe.expert_exchange import Plan
from octavo.ops.grouped_linear import GroupedLinear
from octavo.quant.grouped import GroupedTensor
from octavo.quant.grouped_codes import bytes_as_rows, rows_as_bytes
from octavo.quant.quantizer import Quantizer
from octavo.recipes import Delayed, Recipe
from octavo.recipes.ambient import ambient

WHOLE = (None, None)  # the block of a quantizer with one scale for a tensor


class Payload(NamedTuple):
    """The quantizers of the experts' x and dy as codes on the wire; None for values, and why."""

    x: Quantizer | None = None
    dy: Quantizer | None = None
    why: str = ""
    one_scale: bool = False  # the ranks agree on one scale for the rows of all experts: other codes than with values
    is_split: bool = False  # the features of the experts are split over further ranks, which sum y and dx
    x_history: History | None = None  # where that scale is remembered
    dy_history: History | None = None


NO_CODES = Payload(why="no recipe of the experts was given")


def payload_of(experts: Sequential) -> Payload:
    """Return the quantizers by which the experts of a mixture take x and dy, if their codes may travel."""
    if torch.compiler.is_compiling():
        return NO_CODES
    layers = [layer for layer in experts if isinstance(layer, GroupedLinear)]
    if len(layers) != 2:
        return Payload(why="the experts are no octavo.GroupedLinear")
    first, second = (_recipe_of(layer) for layer in layers)
    x, dy = first.linear(), second.linear()
    x_spec, why = _travels(first, x.fprop.left, x.wgrad.right, "x")
    dy_spec, why_dy = _travels(second, dy.dgrad.left, dy.wgrad.left, "dy")
    if layers[1].parallel is not None:
        dy_spec, why_dy = None, "the features of the experts are split, and dy is of their sum over ranks"
    one_scale = any([spec is not None and spec.block == WHOLE for spec in (x_spec, dy_spec)])
    memories = [
        History(layer, recipe, direction) if isinstance(recipe, Delayed) else None
        for layer, recipe, direction in ((layers[0], first, "forward"), (layers[1], second, "backward"))
    ]
    is_split = any([layer.parallel is not None for layer in layers])
    return Payload(x_spec, dy_spec, why or why_dy, one_scale, is_split, *memories)


def _recipe_of(layer: GroupedLinear) -> Recipe:
    return layer._recipe or layer._followed(ambient.recipe)


def _travels(
    recipe: Recipe, spec: Quantizer | None, column: Quantizer | None, name: str
) -> tuple[Quantizer | None, str]:
    """Return a quantizer of rows whose codes may travel; for another one None, and why. Columns are made of them."""
    if spec is None:
        return None, f"{recipe.key} does not quantize {name}"
    if column is None:
        return None, f"dw has no quantizer for the columns of {name} in {recipe.key}"
    if spec.two_level or spec.is_stochastic or spec.basis or not spec.shipped or spec.block[0] not in (1, None):
        return None, f"rows of {name} that {spec} quantizes do not have scales of their own"
    return spec, ""


# -- codes on the wire -------------------------------------------------------------------------------------------------


def encoded(
    x: Tensor, spec: Quantizer, plan: Plan, history: History | None = None, observes: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return rows of x as bytes that travel alone. Where one scale belongs to all rows, also that scale, on which the
    ranks have agreed; the experts may observe the amax."""
    if spec.block != WHOLE:
        return rows_as_bytes(spec.quantize(x)), None
    amax = spec.amax(x)
    if history is None:
        q = spec.quantize(x, amax=largest_of_ranks(amax, plan.ranks))
    else:
        q = spec.quantize(x, inverse_scale=remembered(amax, spec, history, observes, plan.ranks))
    return q.codes.view(torch.uint8), q.scale


def decoded(
    arrived: Tensor, spec: Quantizer, scale: Tensor | None, columns: int, dtype: torch.dtype, plan: Plan,
    anchor: Tensor | None = None,
) -> GroupedTensor:  # fmt: skip
    """Return the rows that arrived in the groups of the experts."""
    codes = arrived
    if scale is None:
        codes, scale = bytes_as_rows(spec, arrived, columns)
    else:
        scale = scale.reshape(1).expand(plan.sizes.shape[0])
    return GroupedTensor.of(spec, codes, scale, plan.sizes, source=plan.source, dtype=dtype, anchor=anchor)
