"""The codes and scales of a layer's weight as entries of the state that `octavo.state_dict` returns.

    codes.RECIPE.row_codes, row_scale, row_level2       every bit of them, where the recipe has them
    codes.RECIPE.column_codes, ...                      only if they do not follow from the row codes
    codes.RECIPE.master, or master.0, master.1, ...     float32 values, of the weight or by group, if writes compute
                                                        with them (`octavo.weights.master_values`)

`model.state_dict()` has the values, which a stock model loads. Codes that are made of these again can have other
scales: 448 times a float32 scale is rounded, and a rounded largest code may fit a smaller power of two.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.weights.code_memory import Kind, codes_of, fill_columns
from octavo.weights.master_values import kept_values, set_values
from octavo.weights.quantized_parameters import is_whole
from octavo.weights.quantized_weight import COLUMN, ROW, QuantizedWeight

PREFIX = "codes."


def export_codes(layer: Any) -> dict[str, Tensor]:
    """Return copies of the codes, scales and kept values of a layer's weight; none if it is not codes with memory."""
    weight = _whole(layer)
    if weight is None or weight.is_meta:
        return {}
    found = {name: _entry(weight, name) for name in entry_names(layer)}
    # kept values do not follow from codes: without them an update that was too small for a code is lost
    found |= {_master(weight.kind, group): values for group, values in kept_values(weight).items()}
    return {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in found.items()}


def entry_names(layer: Any) -> list[str]:
    """Return the names of the entries that a layer's codes need."""
    weight = _whole(layer)
    if weight is None:
        return []
    # column codes that are row codes transposed need no entry
    sides = ROW if weight.kind.turns else (*ROW, *COLUMN)
    return [_prefix(weight.kind) + name for name in sides if getattr(weight, name) is not None]


def unfit_names(layer: Any, state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the entries that the codes in a state lack, and those that this layer has no place for. A state without
    codes lacks none: `model.state_dict()` has the values."""
    given = [name for name in state if name.startswith(PREFIX)]
    needed = entry_names(layer)
    masters = {name for name, _ in _masters_in(layer, state)}
    return [n for n in needed if given and n not in state], [n for n in given if n not in needed and n not in masters]


def check_codes_of(layer: Any, state: Mapping[str, Any], path: str = "") -> None:
    """Refuse entries of another shape or dtype than the layer's; the message names the `path`."""
    weight = _whole(layer)
    if weight is None:
        return
    likes = {name: _entry(weight, name) for name in entry_names(layer) if name in state}
    likes |= {
        name: torch.empty(weight.kind.shape if g is None else weight.kind.shape[1:], dtype=torch.float32, device="meta")
        for name, g in _masters_in(layer, state)
    }
    for name, like in likes.items():
        _check(f"{path}.{name}" if path else name, state[name], like)


def restore_codes(layer: Any, rest: dict[str, Tensor]) -> None:
    """Write the codes in a state, and take their entries out of it. Codes that are incomplete, or of a weight without
    memory, stay."""
    weight, names = _whole(layer), entry_names(layer)
    if weight is None or weight.is_meta or not names or not all(name in rest for name in names):
        return
    # taken out with the codes, so that what is left in the state is known to be unread
    masters = [(group, rest.pop(name)) for name, group in _masters_in(layer, rest)]
    with torch.no_grad():
        for name in names:
            _entry(weight, name).copy_(rest.pop(name))
        # and are made again here
        if (column := codes_of(weight, "column")) and weight.kind.turns:
            fill_columns(weight.kind, codes_of(weight, "row"), column, weight.dtype)
        weight.note_write()
        set_values(weight, {group: t.to(weight.device, torch.float32, copy=True) for group, t in masters})


def _whole(layer: Any) -> QuantizedWeight | None:
    """Return the weight of a layer, if it is codes that are all its own."""
    if not layer._codes.has_quantized_weight:
        return None
    parts = layer._weight_parts()
    if not isinstance(parts[0], QuantizedWeight) or not is_whole(parts):
        return None
    return parts[0].whole()


def _prefix(kind: Kind) -> str:
    return f"{PREFIX}{kind.recipe}."


def _master(kind: Kind, group: int | None) -> str:
    return _prefix(kind) + ("master" if group is None else f"master.{group}")


def _entry(weight: QuantizedWeight, name: str) -> Tensor:
    return getattr(weight, name.removeprefix(_prefix(weight.kind)))


def _masters_in(layer: Any, state: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """Return the entries of a state that are kept values of the layer's weight, and their groups."""
    weight = _whole(layer)
    if weight is None or not weight.kind.trainable:
        return []
    shape = weight.kind.shape
    groups: list[int | None] = [None, *(range(shape[0]) if len(shape) == 3 else ())]
    return [(_master(weight.kind, g), g) for g in groups if _master(weight.kind, g) in state]


def _check(name: str, given: Any, like: Tensor) -> None:
    what = f"{name} is {like.dtype} {tuple(like.shape)}"
    if not isinstance(given, Tensor):
        raise UnsupportedDtype(f"{what}, got {type(given).__name__}. Load the state that octavo.state_dict returned.")
    if given.shape != like.shape:
        raise UnsupportedShape(f"{what}, got the shape {tuple(given.shape)}. Build the model that was saved.")
    if given.dtype != like.dtype:
        raise UnsupportedDtype(f"{what}, got {given.dtype}. Load the state as octavo.state_dict returned it.")
    if given.is_meta:
        raise UnsupportedDevice(f"{name} is on the meta device, and has no values. Load it from a file.")
