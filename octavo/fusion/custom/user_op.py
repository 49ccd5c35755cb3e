"""Users' functions as a layer: `UserOp` is an operation (`octavo.fusion.custom.basic_operation`), and `UserLayer` is
the base that it shares with a fused operation (`octavo.fusion.custom.user_fusion`).

    compute (settings, inputs)                   -> y, extra outputs, intermediates
    select  (settings, inputs, outputs, fresh)   -> the values among these that backward needs
    backward(settings, saved, grads, wants)      -> gradients, by the names of the inputs or one for each of them

Everything but y has an entry for each operation that the functions stand for; a `UserOp` stands for one. When a run is
planned, `probe` runs the functions on tensors without data, and finds the choice of `select` and the kind of each fresh
value. Both are part of the config, and no step asks again.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from octavo._torch.fakes import is_fake
from octavo.errors import UnsupportedConfig
from octavo.fusion.custom.gradient_check import check_gradient
from octavo.fusion.custom.saved_values import kind_of, packed, slots_of, told, unpacked_all
from octavo.runtime.contract import LAYERS, ForwardResult, Layer, Tensors
from octavo.runtime.dry_run import Miscounted, abstract, stand_in, tried, without_data
from octavo.runtime.named_gradients import in_order
from octavo.text import plural
from octavo.values import Value, register


class Functions(NamedTuple):
    """A user's functions, or their names for messages."""

    compute: Any
    select: Any
    backward: Any
    abstract: Any = None  # called for shapes in place of compute


@dataclass(frozen=True, repr=False, eq=False)
class UserConfig(Value):
    """The part of a config that planning finds."""

    is_listed: ClassVar[bool] = False
    intermediates: tuple[str, ...] = ()  # the kind of each intermediate (`octavo.fusion.custom.saved_values`)
    saved: tuple[tuple[str, ...], ...] = ()  # for each operation: "none", "empty", "input:0", "output:0", "fresh:0"

    @cached_property
    def operations(self) -> tuple[tuple[Any, Any], ...]:
        """The layer and the config of each operation that the functions stand for."""
        return ((LAYERS[self.registered_name], self),)

    @cached_property
    def all_settings(self) -> tuple[Any, ...]:
        """The settings of each operation, as its own functions know them."""
        return tuple(stage.settings if isinstance(stage, OpConfig) else stage for _, stage in self.operations)

    @cached_property
    def forks(self) -> bool:
        """Whether the first operation may return x itself as an extra output."""
        return bool(self.operations[0][0].forks)

    @cached_property
    def shown(self) -> tuple[tuple[int, ...], ...]:
        """For each operation, which of its extra outputs leave this layer."""
        return tuple(tuple(range(layer.outputs(stage) - 1)) for layer, stage in self.operations)

    @cached_property
    def wants(self) -> tuple[Any, ...]:
        """For each operation, which of its inputs want a gradient, by name."""
        return tuple(layer.Inputs._make(layer.wants(stage)) for layer, stage in self.operations)

    @cached_property
    def gradients(self) -> tuple[tuple[str, Any], ...]:
        """The name of each gradient, and what it is checked against if its operation is a user's."""
        as_y = len(self.operations) == 1 or all(
            isinstance(stage, OpConfig) and stage.likes[0][2] for _, stage in self.operations
        )
        found: list[tuple[str, Any]] = []
        for i, ((_, stage), wants) in enumerate(zip(self.operations, self.wants, strict=True)):
            for j, name in enumerate(wants._fields):
                like = stage.likes[j] if isinstance(stage, OpConfig) else None
                if i == 0 or j > 0:
                    named = name if stage is self else f"{i}.{name}"
                    found.append((named, like and (*like[:2], like[2] and as_y)))
        return tuple(found)

    @cached_property
    def sources(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """For each saved value, the group that it comes from, such as the inputs, and its place there."""
        split = [[source.partition(":") for source in part] for part in self.saved]
        return tuple(tuple((name, int(at or 0)) for name, _, at in part) for part in split)

    @cached_property
    def saved_kinds(self) -> tuple[tuple[str, ...], ...]:
        def kind(name: str, at: int) -> str:
            return (
                self.intermediates[at] if name == "intermediates" else name if name in ("none", "empty") else "tensor"
            )

        return tuple(tuple(kind(*source) for source in part) for part in self.sources)

    @cached_property
    def intermediates_spans(self) -> tuple[slice, ...]:
        ends = [0, *accumulate(slots_of(kind) for kind in self.intermediates)]
        return tuple(slice(a, b) for a, b in pairwise(ends))


@dataclass(frozen=True, repr=False, eq=False)
class OpConfig(UserConfig):
    """The config of one operation. Each class of operations has a config class of its own, whose name holds a digest of
    the functions' text: a graph cached on disk must not outlive them."""

    settings: Value | None = None
    wanted: tuple[bool, ...] = ()  # which inputs want a gradient
    likes: tuple[
        tuple[str, tuple[int, ...], bool], ...
    ] = ()  # of each gradient (`octavo.fusion.custom.gradient_check`)


@lru_cache(maxsize=4096)
def fields_of(names: tuple[str, ...]) -> Any:
    return namedtuple("Inputs", names)


class UserLayer(Layer):
    """Runs users' functions, and checks how many values they return, of which kinds, and in whose memory."""

    def __init__(
        self, name: str, base: type[UserConfig], inputs: Any, title: str, functions: Functions, where: Functions
    ) -> None:
        """`where` holds the functions' names, for messages."""
        super().__init__(register(name)(type("Config", (base,), {"__qualname__": name})), inputs)
        self.title, self.where = title, where
        self.functions = functions._replace(abstract=functions.abstract or functions.compute)
        otherwise = ", or define op_abstract, which is asked for shapes in its place" if where.abstract else ""
        self.asked = (where.compute, otherwise) if functions.abstract is None else (where.abstract,)

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, config: Any, inputs: Any, function: Any = None) -> ForwardResult:
        """Run compute, or `function` in its place, and check what it returns."""
        where = self.where.compute
        y, extra, parts = self._computed(config, inputs, function or self.functions.compute)
        intermediates = list(chain.from_iterable(parts))
        kinds = tuple([kind_of(value, where) for value in intermediates])
        if kinds != config.intermediates:
            raise Miscounted(
                f"{where} handed over {list(kinds)}, and {list(config.intermediates)} when the run was planned. Which "
                "there are follows from op_config alone."
            )
        given = [t for field in inputs for t in (field if isinstance(field, tuple) else (field,)) if t is not None]
        away = extra
        if config.forks and extra and extra[0] is inputs[0]:  # the first operation returns x itself
            layer, stage = config.operations[0]
            away, extra = extra[1:], [layer.forward(stage, layer.Inputs(inputs[0])).outputs[1], *extra[1:]]
        _refuse_inputs(where, (y, *away), given)
        outputs = without_aliases((y, *extra), ())
        tensors = list(chain.from_iterable(map(packed, intermediates)))
        return ForwardResult(outputs, (), without_aliases(tensors, (*given, *outputs)))

    def abstract(self, config: Any, inputs: Any) -> ForwardResult:
        with without_data(), tried(*self.asked):
            fields = self.inputs_of(config, stand_in(tuple(inputs)))
            return ForwardResult(*(abstract(group) for group in self.forward(config, fields, self.functions.abstract)))

    def _computed(self, config: Any, inputs: Any, function: Callable[..., Any]) -> tuple[Any, list[Any], list[Any]]:
        """Return y, the extra outputs that leave this layer, and the intermediates of each operation, after a check of
        their numbers."""
        where, count = self.where.compute, len(config.operations)
        made = function(config.all_settings, self.split(config, inputs))
        if not isinstance(made, tuple) or len(made) != 3:
            raise Miscounted(f"{where} returns y, extra outputs and intermediates, got {told(made)}.")
        if not isinstance(made[0], Tensor):
            raise Miscounted(f"{where} returns a tensor first, got {told(made[0])}.")
        extra = entries(where, "extra outputs", made[1], count)
        shown: list[Any] = []
        for i, ((layer, stage), values) in enumerate(zip(config.operations, extra, strict=True)):
            if len(values) != (want := layer.outputs(stage) - 1):
                raise Miscounted(f"{where} returns {plural(want, 'extra output')}{_of(i, count)}, got {len(values)}.")
            for k in config.shown[i]:
                shown.append(values[k])
                if values[k] is None:
                    raise Miscounted(
                        f"{where} leaves out an extra output{_of(i, count)} that is public, or taken by an operation "
                        "outside its forward fusion. Return it."
                    )
                if not isinstance(values[k], Tensor):
                    raise Miscounted(f"{where} returns tensors as extra outputs, got {told(values[k])}{_of(i, count)}.")
        return made[0], shown, entries(where, "intermediates", made[2], count)

    def split(self, config: Any, inputs: Any) -> Sequence[Any]:
        """The inputs of each operation."""
        return (inputs,)

    def save(self, config: Any, inputs: Any, made: ForwardResult) -> tuple[Any, ...]:
        found: list[Any] = []
        for name, at in chain.from_iterable(config.sources):
            if name == "intermediates":
                found += made.intermediates[config.intermediates_spans[at]]
            elif name != "none":
                found.append(None if name == "empty" else (inputs if name == "input" else made.outputs)[at])
        return tuple(found)

    # -- backward ------------------------------------------------------------------------------------------------------

    def abstract_gradients(self, config: Any, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        with without_data(), tried(self.where.backward):
            found: tuple[Any, ...] = abstract(self.backward(config, stand_in(tuple(saved)), (), stand_in(grads)))
            return found

    def backward(self, config: Any, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        where, wants = self.where.backward, config.wants
        kept = self.unpacked(config, saved)
        found = self.functions.backward(config.all_settings, kept, self.widened(config, grads), wants)
        found = _placed(where, found, [wanted._fields for wanted in wants])
        flat = (found[0][0], *[t for part in found for t in part[1:]])
        given, chosen = self.given(config, kept), list[Any]()
        for i, (g, want, (name, like)) in enumerate(zip(flat, self.wants(config), config.gradients, strict=True)):
            if want and g is None:
                raise Miscounted(f"{where} returned no gradient of {name}, which is wanted.")
            if want:
                check_gradient(where, name, g, like, given.get(i), grads[0])
            chosen.append(g if want else None)
        return without_aliases(chosen, (*grads, *saved))

    def widened(self, config: Any, grads: Tensors) -> Tensors:
        """The gradient of y, and of every extra output of every operation."""
        return grads

    def unpacked(self, config: Any, saved: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The values that `select` chose, for each operation."""
        rest = iter(saved)
        return [unpacked_all(kinds, rest) for kinds in config.saved_kinds]

    def given(self, config: Any, kept: Sequence[Any]) -> dict[int, Any]:
        """The inputs that were saved, by their places."""
        return {
            at: t for part, values in zip(config.sources, kept, strict=True)
            for (name, at), t in zip(part, values, strict=True) if name == "input"
        }  # fmt: skip

    # -- counts --------------------------------------------------------------------------------------------------------

    def intermediates_size(self, config: Any) -> int:
        return sum(slots_of(kind) for kind in config.intermediates)

    def saved_size(self, config: Any) -> int:
        return sum(slots_of(kind) for part in config.saved_kinds for kind in part)

    def decided_by_layout(self, config: Any, side: str) -> bool:
        return False

    # -- planning ------------------------------------------------------------------------------------------------------

    def probe(self, config: Any, inputs: Sequence[Any]) -> "Probed":
        """Run compute and select on inputs without data, and return the config with what planning finds."""
        with without_data():
            fields = self.inputs_of(config, stand_in(tuple(inputs)))
            with tried(*self.asked):
                y, extra, parts = self._computed(config, fields, self.functions.abstract)
            outputs, intermediates = (y, *extra), list(chain.from_iterable(parts))
            with tried(self.where.select):
                chosen = self.functions.select(config.all_settings, self.split(config, fields), outputs, parts)
            chosen = entries(self.where.select, "what is saved", chosen, len(parts), TypeError)
            kinds = tuple(kind_of(value, self.where.compute) for value in intermediates)
            places = {"input": fields, "output": outputs, "intermediates": intermediates}
            saved = tuple(
                tuple(self._source(value, places, isinstance(stage, OpConfig)) for value in part)
                for (_, stage), part in zip(config.operations, chosen, strict=True)
            )
            return Probed(replace(config, intermediates=kinds, saved=saved), outputs, chosen)

    def _source(self, value: Any, places: dict[str, Sequence[Any]], is_users: bool) -> str:
        """Return where `select` found a value. Octavo's own layers keep a place for a value that is missing."""
        if value is None:
            return "none" if is_users else "empty"
        kind_of(value, self.where.select)
        for name, there in places.items():
            for i, place in enumerate(there):
                if place is value:
                    return f"{name}:{i}"
        raise TypeError(
            f"{self.where.select} made {told(value)}. It only selects, among inputs, outputs and what compute hands "
            "it, since it does not run at every step. Make the tensor in compute and hand it over."
        )


class Probed(NamedTuple):
    config: Any
    outputs: tuple[Tensor, ...]  # without data
    chosen: list[tuple[Any, ...]]  # the saved values of each operation, without data


class UserOp(UserLayer):
    """A user's operation."""

    def __init__(self, name: str, inputs: Any, outputs: int, title: str, functions: Functions) -> None:
        where = Functions(*(f"{title}'s {name}" for name in ("compute", "save_ctx", "backward", "op_abstract")))
        super().__init__(name, OpConfig, inputs, title, functions, where)
        self.number = outputs  # y and the extra ones

    def outputs(self, config: OpConfig) -> int:
        return self.number

    def wants(self, config: OpConfig) -> tuple[bool, ...]:
        return config.wanted

    def has_backward(self, config: OpConfig) -> bool:
        return any(config.wanted)


# -- checks ------------------------------------------------------------------------------------------------------------


def entries(
    where: str, what: str, found: Any, number: int, error: type[Exception] = Miscounted, kinds: str = "tuple"
) -> list[tuple[Any, ...]]:
    """The entries that a function returned, one for each operation."""
    if not isinstance(found, tuple | list) or len(found) != number:
        raise error(f"{where} returns {what} with an entry for each of {number} operations, got {told(found)}.")
    for i, part in enumerate(found):
        if not isinstance(part, tuple | list):
            raise error(f"{where} returns a {kinds} of {what}{_of(i, number)}, got {told(part)}.")
    return list(map(tuple, found))


def _placed(where: str, found: Any, names: Sequence[tuple[str, ...]]) -> list[tuple[Any, ...]]:
    """The gradients of each operation in the order of its inputs, from a dict by name or a tuple with all of them."""
    number = len(names)
    parts = in_order(where, found, names) if isinstance(found, tuple | list) else found
    placed = entries(where, "gradients", parts, number, kinds="tuple or dict")
    for i, (part, own) in enumerate(zip(placed, names, strict=True)):
        if len(part) != len(own):
            raise Miscounted(
                f"{where} returns a gradient for each of {', '.join(own)}{_of(i, number)}: {len(own)}, got "
                f"{len(part)}. A dict of gradients by name may leave out those that are None."
            )
    return placed


def _of(i: int, number: int) -> str:
    return f" for operation {i}" if number > 1 else ""


def _memory(t: Tensor) -> int:
    """The address of a tensor's memory; 0 for one without data."""
    return 0 if t.is_meta or is_fake(t) else t.untyped_storage().data_ptr()


def _refuse_inputs(where: str, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for value in outputs:
        place = _memory(value)
        if place != 0 and any([_memory(t) == place for t in given if t.numel()]):
            raise UnsupportedConfig(
                f"{where} returns one of its inputs, or a view of it. Return an intermediate: a node of a graph has no "
                "aliases."
            )


def without_aliases(found: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...]:
    """Return the tensors, with copies of those that lie in given memory or share theirs with another: a node of a graph
    returns no aliases."""
    taken = {_memory(t) for t in given if isinstance(t, Tensor)}
    intermediates: list[Any] = []
    for t in found:
        if t is not None:
            place = _memory(t)
            if place != 0 and place in taken:
                t = t.clone(memory_format=torch.contiguous_format)
                place = _memory(t)
            taken.add(place)
        intermediates.append(t)
    return tuple(intermediates)
