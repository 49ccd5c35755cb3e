"""The end of a step of delayed scaling, as nodes of a graph.

Layers raise running amaxes without telling the compiler (`octavo.runtime.graph_nodes`), which might therefore read
these too early. All operators here say that they write to the amaxes, also the one that reads them: the compiler then
runs each after the layers before it in the graph, and before the layers after it. They write to the memory that the
layers write to; a result of torch's own operations might lie elsewhere for a while."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo._torch.operators import foreach_copy_
from octavo.scaling.delayed_state import DelayedState, update_all


@torch.library.custom_op("octavo::read_amaxes", mutates_args=("amaxes",))
def _read(amaxes: list[Tensor]) -> Tensor:
    return torch.cat(amaxes)


_read.register_fake(torch.cat)


@torch.library.custom_op("octavo::write_amaxes", mutates_args=("amaxes",))
def _write(amaxes: list[Tensor], values: Tensor) -> None:
    # one launch; the addresses stay, which captured graphs have
    foreach_copy_(amaxes, list(torch.split(values, [t.numel() for t in amaxes])))


@torch.library.custom_op("octavo::update_scales", mutates_args=("states",))
def _update(states: list[Tensor], algorithm: str, margin: int, sharing: list[int]) -> None:
    found = [DelayedState(*states[at : at + _FIELDS]) for at in range(0, len(states), _FIELDS)]
    update_all(found, algorithm=algorithm, margin=margin, sharing=sharing)


# an operator takes flat lists: states follow each other, field by field
_FIELDS = len(DelayedState.__dataclass_fields__)


def read_amaxes(amaxes: Sequence[Tensor]) -> Tensor:
    """Return all amaxes in one tensor."""
    return torch.ops.octavo.read_amaxes(list(amaxes))


def write_amaxes(amaxes: Sequence[Tensor], values: Tensor) -> None:
    """Replace all amaxes, by the values that `read_amaxes` returned for them or that follow from these."""
    torch.ops.octavo.write_amaxes(list(amaxes), values)


def update_scales(states: Sequence[DelayedState], algorithm: str, margin: int, sharing: Sequence[int]) -> None:
    """Update many states of one window length and device, as `update_all` does."""
    tensors = [t for state in states for t in state.tensors().values()]
    torch.ops.octavo.update_scales(tensors, algorithm, margin, list(sharing))
