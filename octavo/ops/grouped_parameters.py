"""Parameters of groups: one for all groups, or one for each on adjacent memory, which a layer takes without a copy."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo._torch.fakes import FakeTensor
from octavo._torch.tracing import is_watched
from octavo.communication.tensor_parallel import Parallel, own_part
from octavo.memory import joined_rows
from octavo.weights.gradient_anchor import linked_anchor, of_parts
from octavo.weights.quantized_weight import QuantizedWeight


def register(module: nn.Module, kind: str, whole: Tensor, single: bool) -> list[str]:
    """Register one parameter, or one for each group on the same memory, and return their names."""
    if single:
        module.register_parameter(kind, nn.Parameter(whole))
        return [kind]
    names = [f"{kind}{i}" for i in range(whole.shape[0])]
    for name, part in zip(names, whole.unbind(), strict=True):
        module.register_parameter(name, nn.Parameter(part))
    return names


def draw(own: Sequence[Tensor], groups: range, count: int, in_features: int, parallel: Parallel | None) -> None:
    """Initialise the parameters of these `groups` out of `count`, each as nn.Linear does. Groups of other ranks are
    drawn too, and a part of a weight is that of the whole weight, so that ranks with one seed have one layer."""
    size = 1 if parallel is None else parallel.size()
    columns, rows = (size, 1) if parallel is not None and parallel.mode == "column" else (1, size)
    bound = 1 / math.sqrt(in_features * rows) if in_features else 0
    for group in range(count if own else 0):
        part = own[group - groups.start] if group in groups else torch.empty_like(own[0])
        if parallel is None or part.is_meta or (rows > 1 and part.dim() == 1):
            nn.init.uniform_(part, -bound, bound)
            continue
        shape = (part.shape[0] * columns, *[n * rows for n in part.shape[1:]])
        whole = torch.empty(shape, dtype=part.dtype, device=part.device).uniform_(-bound, bound)
        with torch.no_grad():
            part.copy_(own_part(whole, parallel, 0 if columns > 1 else 1))


def stacked(own: Sequence[Tensor]) -> Tensor:
    """Return weights [N, K], or one [G, N, K], as [G, N, K]; its gradient flows to them."""
    if type(own[0]) is QuantizedWeight:
        return linked_anchor(own)
    if len(own) == 1 and own[0].dim() == 3:
        return own[0]
    if torch.compiler.is_compiling() or isinstance(own[0], FakeTensor) or is_watched():
        return torch.stack(list(own))
    return of_parts(_whole, True, own)


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Stack parameters of one shape; without a copy where they are adjacent in memory."""
    whole = joined(parts)
    return torch.stack(list(parts)) if whole is None else whole


def joined(parts: Any) -> Tensor | None:
    """Return parts [N, K] as [G, N, K], on their memory but not as a view of them; None where that needs a copy."""
    first = parts[0].detach()
    if isinstance(first, FakeTensor) or first.is_meta or isinstance(first, QuantizedWeight):
        return None
    rows = joined_rows([p.detach() for p in parts])
    if rows is None:
        return None
    shape = (len(parts), *first.shape)
    whole: Tensor = first.new_empty(0)
    whole.set_(rows.untyped_storage(), rows.storage_offset(), shape, (first.numel(), *first.stride()))
    return whole


def join(own: Sequence[Any]) -> None:
    """Move dense weights into one allocation, unless they are adjacent already."""
    movable = all(type(p.data) is Tensor and not p.is_meta and not p.is_shared() for p in own)
    if movable and joined(own) is None:
        for p, part in zip(own, torch.stack([p.data for p in own]).unbind(), strict=True):
            p.data = part


def convert_layout(state: dict[str, Any], key: str, number: int, *, single: bool) -> str:
    """Convert a checkpoint's entries, in place, to the layout that the layer has: one parameter for all groups, or one
    for each. Return why the groups cannot be stacked; empty if they can."""
    parts = [f"{key}{i}" for i in range(number)]
    found = [part for part in parts if part in state]
    if single and key not in state and found:
        shapes = {part: tuple(state[part].shape) for part in found}
        missing = [part for part in parts if part not in state]
        odd = [part for part in found if shapes[part] != shapes[found[0]]]
        if missing or odd:
            wrong = [f"{part} is missing" for part in missing]
            wrong += [f"{part} is {shapes[part]}, where {found[0]} is {shapes[found[0]]}" for part in odd]
            return f"{key} is made of {number} groups, and {', '.join(wrong)}."
        state[key] = torch.stack([state.pop(part) for part in parts])
    elif not single and key in state and not found and state[key].dim() and len(state[key]) == number:
        state |= dict(zip(parts, state.pop(key).unbind(), strict=True))
    return ""
