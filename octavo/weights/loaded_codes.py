"""Weights made of codes that arrive piece by piece, such as those of a file: memory first, then rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.recipes import Recipe
from octavo.weights.code_memory import Kind, codes_of, fill_columns, group_slices, room_for
from octavo.weights.quantized_weight import QuantizedWeight


def empty_codes(
    layer: str, recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, trainable: bool
) -> QuantizedWeight:
    """Allocate a whole weight of zero codes, for `fill_rows`."""
    kind = Kind(layer, recipe.key, shape, trainable)
    with torch.inference_mode(False):  # made when inference mode is on, it must still serve training
        row = [part.zero_() for part in room_for(kind, dtype, device)[0]]
        return QuantizedWeight.of(kind, dtype, device, row)


def fill_rows(weight: QuantizedWeight, parts: Sequence[Tensor], group: int | None, start: int) -> None:
    """Overwrite codes and scales of rows from `start` on, of one group or of a weight without groups. Call `note_rows`
    after the last."""
    for mine, part in zip(rows_of(weight, group, start, parts), parts, strict=True):
        mine.copy_(part)


def note_rows(weight: QuantizedWeight) -> None:
    """Make the column codes of changed row codes, if the weight keeps any, and let a backward that has saved the codes
    know."""
    if column := codes_of(weight, "column"):
        fill_columns(weight.kind, codes_of(weight, "row"), column, weight.dtype)
    weight.note_write()


def rows_of(weight: QuantizedWeight, group: int | None, start: int, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the memory of codes and scales of as many rows as `like` has, from `start` on."""
    own: Sequence[Tensor] = codes_of(weight, "row")
    if group is not None:
        own = group_slices(tuple(own), room_for(weight.kind, weight.dtype, torch.device("meta"), groups=1)[0], group)
    spec = weight.kind.pair[0]
    height = None if spec is None else spec.block[0]
    places = start, 0 if height is None else start // height, 0
    return [
        mine.narrow(0, at, part.shape[0]).narrow(1, 0, part.shape[1]) if mine.dim() == 2 else mine
        for mine, part, at in zip(own, like, places, strict=False)
    ]
