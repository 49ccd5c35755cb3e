"""Parameters of groups: one for all groups, or one for each on adjacent memory, which a layer takes without a copy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo._torch.fakes import FakeTensor
from octavo._torch.tracing import is_watched
from octavo.memory import joined_rows
from octavo.runtime.transforms import refuse_active, refuse_tangents
from octavo.weights.gradient_anchor import linked_anchor
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


def stacked(own: Sequence[Tensor]) -> Tensor:
    """Return weights [N, K], or one [G, N, K], as [G, N, K]; its gradient flows to them."""
    if type(own[0]) is QuantizedWeight:
        return linked_anchor(own)
    if len(own) == 1 and own[0].dim() == 3:
        return own[0]
    if torch.compiler.is_compiling() or isinstance(own[0], FakeTensor) or is_watched():
        return torch.stack(list(own))
    try:
        whole: Tensor = _Joined.apply(*own)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        refuse_active(error)
        raise
    return whole


class _Joined(torch.autograd.Function):
    """Stack parameters of one shape; without a copy where they are adjacent in memory."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        whole = joined(parts)
        return torch.stack(parts) if whole is None else whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return tuple(g if needed else None for g, needed in zip(grad.unbind(), ctx.needs_input_grad, strict=True))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_tangents()


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
