"""The amaxes that the ranks of a split layer agree on before they cast: each rank measures its part, and the maximum
over ranks counts. Where one scale belongs to a whole tensor, x and w then have the codes of one process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.communication import collectives
from octavo.communication.all_reduced_amaxes import scales_whole
from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import Quantizer
from octavo.recipes import Recipe
from octavo.runtime.call import Stage, call

Specs = Sequence[Quantizer | None]  # x's row and column, w's row and column


def all_reduce_amaxes(
    layer: Any, parallel: Any, recipe: Recipe, x: Tensor | None, weight: Tensor, side: Any, needs_dw: bool,
    as_nodes: bool, splits: Tensor | None = None,
) -> tuple[bool, bool, Parts]:  # fmt: skip
    """Return whether the amaxes of x and of w are reduced over the ranks in a call, and these amaxes: row's and
    column's of each. x is None if it arrived as codes; `side` is the weight's part in the call, a `WeightSide`. With
    the `splits` of a grouped layer, there is an amax for each group."""
    quant, delayed, measured = recipe.linear(), recipe.stateful, side.measured
    specs: list[Quantizer | None] = [None] * 4
    of_x = of_w = False
    if parallel.mode == "row" and x is not None and (not delayed or measured.x):
        column = quant.wgrad.right if needs_dw else None
        specs[:2] = [spec if scales_whole(spec) else None for spec in (quant.fprop.left, column)]
        of_x = any([spec is not None for spec in specs])
    if side.weight == "plain" and (not delayed or measured.w):
        specs[2:] = _weight_specs(recipe)
        of_w = any([spec is not None for spec in specs[2:]])
    if not of_x and not of_w:
        return False, False, ()
    like = weight if x is None or not of_x else x
    if splits is not None and not of_x:
        splits = weight  # sizes are not read; inside of a run they may be unknown
    # a quantized weight has no memory to measure
    found = largest_of(
        layer._name_for_collectives(), parallel.group, specs, like, weight if of_w else like, as_nodes, splits
    )
    parts = _each(found, 1 if splits is None else splits.shape[0])
    return of_x, of_w, parts[0 if of_x else 2 : 4 if of_w else 2]


def all_reduced_weight(
    layer: Any, group: str, recipe: Recipe, weight: Tensor, as_nodes: bool, of_groups: bool = False
) -> Parts:
    """Return the amaxes of a weight by row and by column, for a cast into a cache; none if it needs none. `of_groups`:
    it has a weight for each group."""
    specs = _weight_specs(recipe)
    if not any([spec is not None for spec in specs]) or (recipe.stateful and not layer._scaling.uncalibrated.w):
        return ()
    where, groups = layer._name_for_collectives(), weight if of_groups else None
    found = largest_of(where, group, (None, None, *specs), weight, weight, as_nodes, groups)
    return _each(found, weight.shape[0] if of_groups else 1)[2:]


def largest_of(
    where: str, group: str, specs: Specs, x: Tensor, weight: Tensor, as_nodes: bool, splits: Tensor | None = None,
    each: Quantizer | None = None,
) -> Tensor:  # fmt: skip
    """Measure x and a weight, and take the maximum over ranks: x's row and column, w's row and column; with `each`,
    then x's columns."""
    with torch.no_grad():
        found = measured((*specs, each), x, weight, as_nodes, splits)
        return collectives.largest(found, group, where)


def measured(specs: Specs, x: Tensor, weight: Tensor, as_nodes: bool, splits: Tensor | None = None) -> Tensor:
    """Measure x and a weight on this rank, as bits: x's row and column, w's row and column, each column of x."""
    fields = zip(("x_row", "x_column", "w_row", "w_column", "each_column"), specs, strict=False)
    key = "amaxes(" + ",".join([f"{field}={spec.key}" for field, spec in fields if spec is not None]) + ")"
    more = weight.detach(), None if splits is None else splits.detach()
    return call(Stage("amaxes", key, more, (), False), x.detach(), as_nodes)[0]


def _weight_specs(recipe: Recipe) -> list[Quantizer | None]:
    quant = recipe.linear()
    return [spec if scales_whole(spec) else None for spec in (quant.fprop.right, quant.dgrad.right)]


def _each(found: Tensor, number: int) -> Parts:
    """Return the four amaxes, of `number` groups each."""
    return tuple([found[at * number : (at + 1) * number] for at in range(4)])
