"""Casts by all-reduced amaxes, so that all ranks use one scale.

Two kinds of quantizers derive a scale from a whole tensor: one scale for each tensor, and NVFP4's second level. Where
ranks have parts of a tensor, they take the maximum of their amaxes before the cast. An operand's all-reduced amaxes are
two tensors of one element, or of one for each group, for its row and its column codes, each the bits of a float32 as
int32: a collective compares them so."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.quant.quantizer import CastArgs, Quantizer, QuantizerPair
from octavo.recipes import Recipe
from octavo.scaling.delayed_scaling import cast_args

WHOLE = (None, None)  # the block of a quantizer with one scale for a tensor


def scales_whole(spec: Quantizer | None) -> bool:
    """Return whether a scale of this quantizer depends on the whole tensor."""
    return spec is not None and (spec.block == WHOLE or spec.two_level)


def all_reduced_cast(
    recipe: Recipe, pair: QuantizerPair, part: Sequence[Tensor], all_reduced: Sequence[Tensor],
    running_amax: Tensor | None,
    of_groups: bool = False,
) -> CastArgs:  # fmt: skip
    """Return the arguments of a cast by all-reduced amaxes. Under delayed scaling they serve until a step has seen an
    amax."""
    if part:
        return cast_args(
            recipe, pair, part, lambda spec, is_calibrated: number_of(all_reduced[0]).view(-1), running_amax
        )
    row, column = pair
    first = _shaped(all_reduced[0], row, of_groups) if row is not None and scales_whole(row) else None
    if row is column:  # one tensor for both orientations: kernels then write both from one read
        return CastArgs(amax=(first, first), running_amax=running_amax)
    second = _shaped(all_reduced[1], column, of_groups) if column is not None and scales_whole(column) else None
    return CastArgs(amax=(first, second), running_amax=running_amax)


def kept_amax(amax: Tensor, spec: Quantizer | None, of_groups: bool = False) -> Tensor | None:
    """Return an amax that forward kept, a float32 or its bits, as a cast in backward takes it; None if no scale follows
    from it."""
    if spec is None or not scales_whole(spec):
        return None
    return amax if amax.dtype == torch.float32 else _shaped(amax, spec, of_groups)


def _shaped(amax: Tensor, spec: Quantizer, of_groups: bool = False) -> Tensor:
    found = number_of(amax)
    return found if of_groups else found.view(1) if spec.two_level else found.view(1, 1)


def number_of(bits: Tensor) -> Tensor:
    """Return the float32 whose bits are given."""
    return bits.view(torch.float32)
