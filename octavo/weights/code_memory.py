"""Memory for a weight's codes: its allocation, quantizing into it, and the values that the codes stand for."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo._torch.fakes import FakeTensor
from octavo._torch.tracing import is_watched
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts
from octavo.runtime.contract import LAYERS, WeightCast
from octavo.runtime.weight_nodes import refresh as refresh_in_graph
from octavo.runtime.weight_nodes import weight_values


class Kind(NamedTuple):
    """How the codes of a whole weight were made."""

    layer: str  # the name of a layer in a graph's plan
    recipe: str  # canonical
    shape: tuple[int, ...]  # [N, K]; of groups [G, N, K]
    trainable: bool = False  # whether optimizers may write to it

    @property
    def key(self) -> str:
        return f"{self.layer}(recipe={self.recipe})"


def quantize_into(kind: Kind, cast: WeightCast) -> None:
    """Overwrite codes with those of a weight. A backward that still needs the old ones notices."""
    with torch.no_grad():
        if isinstance(cast.weight, FakeTensor):  # a reference may read values, which a fake does not have
            refresh_in_graph(kind.layer, kind.key, cast._replace(weight=cast.weight.detach()))
        else:
            layer = LAYERS[kind.layer]
            layer.refresh(layer.config(kind.key), cast)
        torch.autograd.graph.increment_version([*cast.row, *cast.column])


def measured_by(kind: Kind, amax: Tensor) -> Parts:
    """Return an amax as a cast of the weight takes it, by row and by column; nothing where it decides no scale."""
    layer = LAYERS[kind.layer]
    quant = layer.config(kind.key).quant
    pair = quant.fprop.right, quant.dgrad.right
    if any(spec is None or spec.block != (None, None) or spec.two_level for spec in pair):
        return ()
    bits = amax.view(torch.int32)
    return bits, bits


def is_plain(t: Tensor) -> bool:
    """Whether a tensor is plain memory, and nothing that a tracer watches."""
    return type(t) in (Tensor, nn.Parameter)


def values_of(kind: Kind, row: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The values [*shape] that row codes stand for."""
    if is_plain(row[0]) and not is_watched():
        layer = LAYERS[kind.layer]
        values: Tensor = layer.weight_values(layer.config(kind.key), row, shape, dtype)
        return values.contiguous()
    return weight_values(kind.layer, kind.key, row, shape, dtype)


def room_for(kind: Kind, dtype: torch.dtype, device: torch.device, *, groups: int | None = None) -> tuple[Parts, Parts]:
    """Allocate memory for codes by row and by column, of the whole weight or of `groups` of its groups."""
    layer = LAYERS[kind.layer]
    shape = kind.shape if groups is None else (groups, *kind.shape[1:])
    row, column = layer.abstract_weight(layer.config(kind.key), TensorProto(shape, dtype, device))
    return room_of(row), room_of(column)


def room_of(proto: Any) -> Parts:
    """Allocate memory for codes, which are bytes, and scales; none if there are no such codes."""
    if proto is None:
        return ()
    with torch.inference_mode(False):  # made when inference mode is on, it must still serve training
        codes, *scales = proto.empty().tensors()
    return codes.view(torch.uint8), *scales


def group_slices(parts: Parts, alone: Parts, group: int) -> list[Tensor]:
    """One group's part of each tensor, along the dim that grows with the number of groups. `alone` has the tensors of
    one group."""
    return [_slice(t, one, group) for t, one in zip(parts, alone, strict=True)]


def _slice(tensor: Tensor, alone: Tensor, group: int) -> Tensor:
    for dim, (n, one) in enumerate(zip(tensor.shape, alone.shape, strict=True)):
        if n != one:
            return tensor.narrow(dim, group * one, one)
    return tensor
