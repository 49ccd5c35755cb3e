"""Memory for a weight's codes: its allocation, quantizing into it, and the values that the codes stand for."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo._torch.fakes import FakeTensor
from octavo._torch.tracing import is_watched
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import QuantizerPair
from octavo.quant.scale_blocks import are_transposed
from octavo.runtime.contract import LAYERS, WeightCast
from octavo.runtime.weight_nodes import refresh as refresh_in_graph
from octavo.runtime.weight_nodes import weight_values


class Kind(NamedTuple):
    """How the codes of a whole weight were made."""

    layer: str  # the name of a layer in a graph's plan
    recipe: str  # canonical
    shape: tuple[int, ...]  # [N, K]; of groups [G, N, K]
    trainable: bool = False  # whether optimizers may write to it
    columns: bool = False  # whether there are column codes too

    @property
    def key(self) -> str:
        return f"{self.layer}(recipe={self.recipe})"

    @property
    def config(self) -> Any:
        return LAYERS[self.layer].config(self.key)

    @property
    def pair(self) -> QuantizerPair:
        """The quantizers of the weight's row and column codes."""
        quant = self.config.quant
        return quant.fprop.right, quant.dgrad.right

    @property
    def turns(self) -> bool:
        """Whether the column codes of a weight are its row codes, transposed."""
        return are_transposed(*self.pair)


def quantize_into(kind: Kind, cast: WeightCast) -> None:
    """Overwrite codes with those of a weight. A backward that still needs the old ones notices."""
    with torch.no_grad():
        if isinstance(cast.weight, FakeTensor):  # a reference may read values, which a fake does not have
            refresh_in_graph(kind.layer, kind.key, cast._replace(weight=cast.weight.detach()))
        else:
            LAYERS[kind.layer].refresh(kind.config, cast)
        torch.autograd.graph.increment_version([*cast.row, *cast.column])


def fill_columns(kind: Kind, row: Parts, column: Parts, dtype: torch.dtype) -> None:
    """Overwrite the column codes of a whole weight with its row codes, transposed."""
    layer: Any = LAYERS[kind.layer]
    made = layer.kind.transposed(layer.weight_codes(kind.config, row, kind.shape, dtype))
    for own, new in zip(column, made.tensors(), strict=True):
        own.copy_(new.view(own.dtype))


def scales_by_amax(kind: Kind) -> bool:
    """Return whether the scales of a cast of the weight follow from one amax of each matrix."""
    return all(spec is not None and spec.block == (None, None) and not spec.two_level for spec in kind.pair)


def is_plain(t: Tensor) -> bool:
    """Return whether a tensor is plain memory, and nothing that a tracer watches."""
    return type(t) in (Tensor, nn.Parameter)


def values_of(kind: Kind, row: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the values [*shape] that row codes stand for."""
    if is_plain(row[0]) and not is_watched():
        return LAYERS[kind.layer].weight_values(kind.config, row, shape, dtype).contiguous()
    return weight_values(kind.layer, kind.key, row, shape, dtype)


def room_for(kind: Kind, dtype: torch.dtype, device: torch.device, *, groups: int | None = None) -> tuple[Parts, Parts]:
    """Allocate memory for codes by row and by column, of the whole weight or of `groups` of its groups."""
    shape = kind.shape if groups is None else (groups, *kind.shape[1:])
    row, column = LAYERS[kind.layer].abstract_weight(kind.config, TensorProto(shape, dtype, device))
    return room_of(row), room_of(column) if kind.columns else ()


def room_of(proto: Any) -> Parts:
    """Allocate memory for codes, which are bytes, and scales; none if there are no such codes."""
    if proto is None:
        return ()
    with torch.inference_mode(False):  # made when inference mode is on, it must still serve training
        codes, *scales = proto.empty().tensors()
    return codes.view(torch.uint8), *scales


def group_slices(parts: Parts, alone: Parts, group: int) -> list[Tensor]:
    """Return one group's part of each tensor, along the dim that grows with the number of groups. `alone` has the
    tensors of one group."""
    return [_slice(t, one, group) for t, one in zip(parts, alone, strict=True)]


def _slice(tensor: Tensor, alone: Tensor, group: int) -> Tensor:
    for dim, (n, one) in enumerate(zip(tensor.shape, alone.shape, strict=True)):
        if n != one:
            return tensor.narrow(dim, group * one, one)
    return tensor


def codes_of(weight: Any, side: str) -> Parts:
    """Return the codes and scales of a quantized weight by "row" or "column", in the order in which a layer takes them;
    none if there are no such codes."""
    parts = [getattr(weight, f"{side}_{name}") for name in ("codes", "scale", "level2")]
    return () if parts[0] is None else tuple([t for t in parts if t is not None])
