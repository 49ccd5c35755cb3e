"""Weights that FSDP2 gathers as codes: this rank's shard, a tensor with FSDP2's hooks around the all-gather.

    pre     cast the shard, once until it is written to; send row codes, and scales where ranks have their own
    post    a quantized weight of all ranks' row codes. Backward transposes them where blocks are square; elsewhere
            column codes are made of the values of the row codes

Where one scale belongs to the whole weight, ranks agree on its amax first: all weights in one all-reduce at
`octavo.step`, or each in one of its own if the shard was written to since. A shard whose codes are not those of the
whole weight is sent as values.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo._torch.cuda import is_capturing
from octavo._torch.operators import schema, to_copy
from octavo._torch.tensors import local_part, tree_map, wrapper_subclass
from octavo.communication import collectives
from octavo.communication.all_reduced_amaxes import number_of, scales_whole
from octavo.communication.amax_reduction import measured
from octavo.communication.groups import name_of, registered_name
from octavo.errors import UnsupportedConfig, warn_caller
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts
from octavo.recipes import Recipe
from octavo.recipes.ambient import process
from octavo.runtime.contract import LAYERS, WeightCast
from octavo.runtime.weight_nodes import step_listeners
from octavo.scaling.delayed_scaling import BUFFER_NAMES
from octavo.weights.code_memory import Kind, codes_of, quantize_into, room_for, room_of, values_of
from octavo.weights.quantized_weight import QuantizedWeight

aten = torch.ops.aten
AMAXES = BUFFER_NAMES["forward"]["running_amax"]
# operators of FSDP2 and of modules that move or cut a shard: their results are shards again
_SHARDS = frozenset((
    aten.empty_like.default, aten.new_zeros.default, aten.slice.Tensor, aten.copy_.default, aten.view.default,
    aten.as_strided.default, to_copy, aten.split.Tensor, aten.clone.default, aten.detach.default,
))  # fmt: skip
_said: set[str] = set()  # reasons for values that were warned of
_sources: "weakref.WeakSet[WeightSource]" = weakref.WeakSet()


class Gathered(NamedTuple):
    """The values that the hooks of one all-gather share."""

    kind: Kind | None  # of the whole weight; None: values are gathered
    own: Parts  # scales that are not sent: all ranks have them alike


class ShardedWeight(Tensor):
    """This rank's shard of a weight, as plain values. Any result but a shard is a plain tensor."""

    __slots__ = ("shard", "source")
    shard: Tensor
    source: "WeightSource"

    @staticmethod
    def __new__(cls, values: Tensor, source: "WeightSource") -> "ShardedWeight":
        made: ShardedWeight = wrapper_subclass(
            cls, tuple(values.shape), values.stride(), dtype=values.dtype, device=values.device,
            storage_size=values.untyped_storage().nbytes(),
        )  # fmt: skip
        return made

    def __init__(self, values: Tensor, source: "WeightSource") -> None:
        self.shard, self.source = values, source

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["shard"], self.source

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], source: Any, size: Any, stride: Any) -> "ShardedWeight":
        return ShardedWeight(inner["shard"], source)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({tuple(self.shape)}, {self.dtype}, {self.device}, gathered as codes)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle plain values: files of a checkpoint load without Octavo."""
        return self.shard.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        values: Any = self.shard.detach().clone()
        copied = memo[id(self)] = torch.nn.Parameter(values, self.requires_grad)
        return copied

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        sources: list[WeightSource] = []

        def plain(t: Any) -> Any:
            if not isinstance(t, ShardedWeight):
                return t
            sources.append(t.source)
            return t.shard

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        if schema(func).is_mutable:
            for source in sources:
                source.note_write()
        if func not in _SHARDS:
            return result
        return tree_map(lambda t: ShardedWeight(t, sources[0]) if isinstance(t, Tensor) else t, result)

    # -- FSDP2's hooks -------------------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[Parts, Gathered]:
        with torch.no_grad():
            return self.source.to_gather(self.shard, mesh, mp_policy.param_dtype)

    def fsdp_post_all_gather(
        self, outputs: Parts, gathered: Gathered, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        with torch.no_grad():
            return self.source.gathered(outputs, gathered, param_dtype, out)


class WeightSource:
    """One weight: its layer, the codes of this rank's shard and whether they are those of its values."""

    def __init__(self, layer: Any) -> None:
        self.layer = weakref.ref(layer)
        self.shape = tuple(layer.weight.shape)
        self.group: str | None = None  # the ranks that have the shards, known at the first gather
        self.kind: Kind | None = None  # of the whole weight, once it was gathered as codes
        self.casts = 0
        _sources.add(self)
        self.replayed = False  # whether a write was captured in a CUDA graph, whose replays nothing tells of
        self.forget()

    def note_write(self) -> None:
        """Note that the shard has changed."""
        self.forget()
        self.replayed = self.replayed or is_capturing()

    def forget(self) -> None:
        """Drop what was made from the shard: it, or a scale of its codes, has changed."""
        self.codes: Parts = ()
        self.observed = False  # whether fp8-delayed's running amax has that of these codes
        self.own_amaxes: Tensor | None = None  # bits, by row and by column
        self.amaxes: Tensor | None = None  # the largest of all ranks

    def _recipe(self) -> Recipe | None:
        layer = self.layer()
        found: Recipe | None = None if layer is None else layer.recipe
        return found

    def _specs(self) -> tuple[Any, Any]:
        recipe = self._recipe()
        assert recipe is not None
        quant = recipe.linear()
        return quant.fprop.right, quant.dgrad.right

    def why_values(self, size: int) -> str:
        """Return why the weight is gathered as values over that many ranks; empty if as codes."""
        recipe, layer = self._recipe(), self.layer()
        if recipe is None or layer is None:
            return "the layer has no recipe of its own"
        quant = recipe.linear()
        row, column = quant.fprop.right, quant.dgrad.right
        if row is None or quant.dgrad.mode != "quantized" or column is None:
            return f"{recipe} multiplies the weight unquantized"
        if not (row.shipped and column.shipped):
            return "a quantizer is not Octavo's own"
        if layer.parallel is not None:
            return "the layer is split over other ranks too"
        height, rows = row.block[0] or 1, self.shape[0]
        part = -(-rows // size)
        if part % height and size > 1:
            return f"shards of {part} rows cut blocks of {height}, which share a scale"
        if rows % size and (row.block != (None, None) or row.fmt.packed > 1):
            return f"{rows} rows do not divide by {size} ranks, and FSDP2 sends parts of other sizes as values alone"
        return ""

    # -- before the all-gather -----------------------------------------------------------------------------------------

    def to_gather(self, values: Tensor, mesh: Any, param_dtype: torch.dtype | None) -> tuple[Parts, Gathered]:
        size = int(mesh.size())
        self.group = name_of(mesh)
        rows = -(-self.shape[0] // size)
        why = self.why_values(size)
        recipe, layer = self._recipe(), self.layer()
        if why or recipe is None or layer is None:
            self._check_kind(None)
            if why not in _said:
                _said.add(why)
                title = "A layer" if layer is None else layer.op_describe()
                warn_caller(f"gather_codes: {title} gathers values, because {why}. Such layers send as without it.")
            padded = _padded(values, rows)
            return (padded if param_dtype is None else padded.to(param_dtype),), Gathered(None, ())
        kind = Kind(layer.NAME, recipe.key, self.shape, True)
        kind = kind._replace(columns=not kind.turns)
        self._check_kind(kind)
        layer._materialize_for_call()
        keep = not self.replayed and not is_capturing()
        if not keep:  # Python does not see what a replay writes: each gather of a capture casts
            self.forget()
        observes = recipe.stateful and layer.training and not process.dry  # FSDP2 gathers without gradients
        if not self.codes:
            self.codes = self._cast(layer, recipe, _padded(values, rows), observes)
        elif observes and not self.observed:  # it was cast in eval mode
            self.observe(layer, values)
        self.observed = self.observed or observes
        codes, scale, *level2 = self.codes
        if not keep:
            self.forget()
        if size == 1 or self._specs()[0].block == (None, None):  # FSDP2 takes one tensor alone where a rank is alone
            return (codes,), Gathered(kind, (scale, *level2))
        return (codes, scale.contiguous().view(torch.uint8)), Gathered(kind, tuple(level2))

    def _check_kind(self, kind: Kind | None) -> None:
        """Refuse a change of what is gathered: FSDP2 makes the whole parameter once."""
        if self.casts and kind != self.kind:
            raise UnsupportedConfig(
                f"A weight of {self.shape} was gathered as codes of {self.kind.recipe if self.kind else None}, and is "
                f"{'of ' + kind.recipe if kind else 'values'} now. Keep the recipe of a layer after gather_codes, or "
                "build the model again."
            )
        self.kind = kind

    def _cast(self, layer: Any, recipe: Recipe, values: Tensor, observes: bool) -> Parts:
        """Cast this rank's rows by the scales of the whole weight."""
        kind = Kind(layer.NAME, recipe.key, tuple(values.shape))
        contract: Any = LAYERS[layer.NAME]
        proto = TensorProto(kind.shape, values.dtype, values.device)
        row = room_of(contract.abstract_weight(contract.config(kind.key), proto)[0])
        amaxes, inverse_scales = layer._scaling.of_weight(layer, recipe, observes)
        bits: Parts = ()
        if any(map(scales_whole, self._specs())) and (not recipe.stateful or len(inverse_scales) > 1):
            if self.amaxes is None:
                assert self.group is not None
                self.amaxes = collectives.largest(self.measure(layer, values), self.group, layer.op_describe())
            bits = self.amaxes.unsqueeze(1).unbind()
        quantize_into(kind, WeightCast(values, row, (), amaxes, inverse_scales, None, bits))
        self.casts += 1
        return row

    def measure(self, layer: Any, values: Tensor) -> Tensor:
        """Measure this rank's rows, by row and by column, as bits."""
        if self.own_amaxes is None:
            specs = [spec if scales_whole(spec) else None for spec in self._specs()]
            self.own_amaxes = measured((None, None, *specs), values, values, False)[2:4]
        return self.own_amaxes

    def observe(self, layer: Any, values: Tensor) -> None:
        """Raise the running amax of w, which a step takes over all ranks."""
        running = layer._hidden._buffers[AMAXES].chunk(2)[1]
        torch.maximum(running, number_of(self.measure(layer, values)[:1]), out=running)

    # -- after it ------------------------------------------------------------------------------------------------------

    def gathered(self, outputs: Parts, gathered: Gathered, dtype: torch.dtype, out: Any) -> Any:
        """Return the whole weight and the memory that FSDP2 may free; or fill it again, where it has freed it."""
        kind = gathered.kind
        if kind is None:
            return None if out is not None else (outputs[0][: self.shape[0]].view(self.shape), ())
        if out is not None:
            row, column = codes_of(out, "row"), codes_of(out, "column")
            with preserve_version_counter((*row, *column)):
                _fill(kind, outputs, gathered, row, column, dtype)
            return None
        row, column = room_for(kind, dtype, outputs[0].device)
        codes = outputs[0][: self.shape[0]]
        row = (codes.view(row[0].shape), *row[1:])
        _fill(kind, outputs, gathered, row, column, dtype)
        whole = QuantizedWeight.of(kind, dtype, codes.device, row, column)
        return whole, tuple([t for t in (*row[1:], *column) if t.numel() > 1])


def _fill(kind: Kind, outputs: Parts, gathered: Gathered, row: Parts, column: Parts, dtype: torch.dtype) -> None:
    """Write scales of the whole weight, and its column codes if there are some."""
    for own, new in zip(row[1:], [*outputs[1:], *gathered.own], strict=True):
        flat = new.reshape(-1).view(own.dtype)
        own.copy_(flat[: own.numel()].view(own.shape))
    if column:
        quantize_into(kind, WeightCast(values_of(kind, row, kind.shape, dtype), (), column))


def _padded(values: Tensor, rows: int) -> Tensor:
    """Return a shard with zeros after its rows: the last ranks may have fewer."""
    return values if values.shape[0] == rows else F.pad(values, (0, 0, 0, rows - values.shape[0]))


def refresh(modules: Sequence[Any]) -> None:
    """Agree on the amaxes of all weights that are gathered as codes and were written to, in one all-reduce for each
    group; and cast again where the scales of delayed scaling have moved. At the end of a step."""
    shared: dict[str, list[tuple[WeightSource, Any, Tensor]]] = {}
    for module in modules:
        source = module._sharded
        if source is None or source.group is None or source.kind is None or source.replayed:
            continue
        recipe = source._recipe()
        if recipe is not None and recipe.stateful:
            source.codes, source.observed = (), False
            continue
        shard = local_part(module._parameters["weight"])
        if source.amaxes is None and type(shard) is ShardedWeight and any(map(scales_whole, source._specs())):
            shared.setdefault(source.group, []).append((source, module, shard.shard))
    for group, members in shared.items():
        own = torch.stack([source.measure(module, values) for source, module, values in members])
        found = collectives.largest(own, registered_name(group), "octavo.step")
        for (source, _, _), amaxes in zip(members, found.unbind(), strict=True):
            source.amaxes = amaxes


def _note_graph(written: Sequence[Tensor]) -> None:
    """Note that an optimizer in a graph writes to these values: a graph has a shard's memory, and not the shard."""
    places = {t.untyped_storage().data_ptr() for t in written} if _sources else set()
    for source in list(_sources) if places else ():
        layer = source.layer()
        shard = None if layer is None else local_part(layer._parameters["weight"])
        if type(shard) is ShardedWeight and shard.shard.untyped_storage().data_ptr() in places:
            source.note_write()


step_listeners.append(_note_graph)
