"""Users' functions as a layer. They stand for one operation (`octavo.fusion.custom.basic_operation`), or for several
that a fused operation replaces (`octavo.fusion.rule.FusedOperation`).

    compute (settings, inputs)                           -> y, extra outputs, intermediates
    select  (settings, inputs, outputs, intermediates)   -> the values among these that backward needs
    backward(settings, saved, grads, wants)              -> gradients, by the names of the inputs or one for each

Everything but y has an entry for each operation. When a run is planned, `probe` runs the functions on tensors without
data, and finds the choice of `select` and the kind of each intermediate. Both are part of the config, and no step asks
again.

A fused operation may define one side alone:

    forward alone     it saves what the operations themselves would have saved, and each runs its own backward
    backward alone    each operation runs its own forward, and it computes gradients from what they saved
    both              it saves what it likes
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise
from itertools import chain as chained
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from octavo.fusion.custom import returned_values as returned
from octavo.fusion.custom.returned_values import described, kind_of, of_operation, packed, tensor_count, without_aliases
from octavo.runtime import chain
from octavo.runtime.contract import ForwardResult, Layer, Tensors
from octavo.runtime.dry_run import Miscounted, abstract, stand_in, tried, without_data
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
    """The config of users' functions. Each class of operations has a config class of its own, whose name holds a digest
    of the functions' text: a graph cached on disk must not outlive them."""

    is_listed: ClassVar[bool] = False
    # found by planning
    intermediates: tuple[str, ...] = ()  # the kind of each intermediate (`octavo.fusion.custom.returned_values`)
    # for each operation: "none", "empty", "input:0", "output:0", "intermediates:0", "value:3", …
    saved: tuple[tuple[str, ...], ...] = ()
    # of an operation
    settings: Value | None = None
    wanted: tuple[bool, ...] = ()  # which inputs want a gradient
    likes: tuple[tuple[str, tuple[int, ...], bool], ...] = ()  # what each gradient is checked against
    constants: tuple[tuple[str, Any], ...] = ()  # keywords of a call that are not tensors: their names and values
    # of a fused operation
    side: str = "both"  # or "forward", "backward"
    stages: tuple[Value, ...] = ()
    routes: tuple[tuple[int, int, int, int], ...] = ()  # as in a chain's config: channels between these stages
    hidden: tuple[tuple[int, int], ...] = ()

    @cached_property
    def unfused(self) -> chain.Config:
        """The operations that the functions stand for, as a chain."""
        return chain.Config(self.stages or (self,), routes=self.routes, hidden=self.hidden)

    @cached_property
    def all_settings(self) -> tuple[Any, ...]:
        """The settings of each operation, as its own functions know them."""
        return tuple(settings_of(stage) for stage in self.unfused.stages)

    @cached_property
    def wants(self) -> tuple[Any, ...]:
        """For each operation, which of its inputs want a gradient, by name."""
        return tuple(layer.Inputs._make(layer.wants(stage)) for layer, stage in self.unfused.pairs)

    @cached_property
    def gradients(self) -> tuple[tuple[str, Any], ...]:
        """The name of each gradient, and what it is checked against if its operation is a user's."""
        stages: Any = self.unfused.stages
        as_y = len(stages) == 1 or all(is_users(stage) and stage.likes[0][2] for stage in stages)
        found: list[tuple[str, Any]] = []
        for i, (stage, wants) in enumerate(zip(stages, self.wants, strict=True)):
            for j, name in enumerate(wants._fields):
                like = stage.likes[j] if is_users(stage) else None
                if i == 0 or j > 0:  # x of the operations after the first is inside
                    named = f"{i}.{name}" if self.stages else name
                    found.append((named, like and (*like[:2], like[2] and as_y)))
        return tuple(found)

    @cached_property
    def sources(self) -> tuple[tuple[tuple[str, Any], ...], ...]:
        """For each saved value, the group that it comes from, such as the inputs, and its place there; or "value" and
        the value's text."""
        split = [[source.partition(":") for source in part] for part in self.saved]
        return tuple(tuple((name, at if name == "value" else int(at or 0)) for name, _, at in part) for part in split)

    @cached_property
    def saved_kinds(self) -> tuple[tuple[str, ...], ...]:
        def kind(name: str, at: Any) -> str:
            if name == "value":
                return f"value:{at}"
            if name == "intermediates":
                return str(self.intermediates[at])
            return name if name in ("none", "empty") else "tensor"

        return tuple(tuple(kind(*source) for source in part) for part in self.sources)

    @cached_property
    def intermediates_spans(self) -> tuple[slice, ...]:
        ends = [0, *accumulate(tensor_count(kind) for kind in self.intermediates)]
        return tuple(slice(a, b) for a, b in pairwise(ends))


def is_users(stage: Any) -> bool:
    """Return whether a config is that of a user's operation, not of one of Octavo's layers."""
    return isinstance(stage, UserConfig)


def settings_of(stage: Any) -> Any:
    """Return what conditions and functions see of an operation's config: a user's settings are those of op_config."""
    return stage.settings if is_users(stage) else stage


def with_constants(stage: Any, inputs: Any) -> Any:
    """Return an operation's inputs as its functions see them: with the keywords that are not tensors."""
    return inputs._replace(**dict(stage.constants)) if is_users(stage) and stage.constants else inputs


@lru_cache(maxsize=4096)
def fields_of(names: tuple[str, ...]) -> Any:
    return namedtuple("Inputs", names)


class UserLayer(Layer):
    """Run a user's operation, and check how many values its functions return, of which kinds, and in whose memory."""

    def __init__(
        self, name: str, title: str, functions: Functions, where: Functions, inputs: Any, outputs: int = 1
    ) -> None:
        """Take the names of the functions in `where`, for messages, and in `outputs` the number of y and the extra
        outputs."""
        super().__init__(register(name)(type("Config", (UserConfig,), {"__qualname__": name})), inputs)
        self.title, self.where, self.number = title, where, outputs
        self.functions = functions._replace(abstract=functions.abstract or functions.compute)
        otherwise = ", or define op_abstract, which is asked for shapes in its place" if where.abstract else ""
        self.asked = (where.compute, otherwise) if functions.abstract is None else (where.abstract,)

    def outputs(self, config: UserConfig) -> int:
        return self.number

    def wants(self, config: UserConfig) -> tuple[bool, ...]:
        return config.wanted

    def has_backward(self, config: UserConfig) -> bool:
        return any(config.wanted)

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, config: Any, inputs: Any, function: Any = None) -> ForwardResult:
        """Run compute, or `function` in its place, and check what it returns."""
        where = self.where.compute
        y, extra, parts = self._computed(config, inputs, function or self.functions.compute)
        intermediates = list(chained.from_iterable(parts))
        kinds = tuple([kind_of(value, where) for value in intermediates])
        if kinds != config.intermediates:
            raise Miscounted(
                f"{where} handed over {list(kinds)}, and {list(config.intermediates)} when the run was planned. Which "
                "there are, and what numbers among them are, follows from op_config and keywords alone: return what "
                "follows from data or sizes as a tensor."
            )
        given = [t for field in inputs for t in (field if isinstance(field, tuple) else (field,)) if t is not None]
        away = extra
        if extra and extra[0] is inputs[0] and config.unfused.forks[0]:  # the first operation returns x itself
            layer, stage = config.unfused.pairs[0]
            away, extra = extra[1:], [layer.forward(stage, layer.Inputs(inputs[0])).outputs[1], *extra[1:]]
        returned.refuse_inputs(where, (y, *away), given)
        outputs = without_aliases((y, *extra), ())
        tensors = list(chained.from_iterable(map(packed, intermediates)))
        return ForwardResult(outputs, (), without_aliases(tensors, (*given, *outputs)))

    def abstract(self, config: Any, inputs: Any) -> ForwardResult:
        with without_data(), tried(*self.asked):
            fields = self.Inputs._make(stand_in(tuple(inputs)))
            return ForwardResult(*(abstract(group) for group in self.forward(config, fields, self.functions.abstract)))

    def _computed(self, config: Any, inputs: Any, function: Callable[..., Any]) -> tuple[Any, list[Any], list[Any]]:
        """Return y, the extra outputs that leave this layer, and the intermediates of each operation, after a check of
        their numbers."""
        where, count = self.where.compute, len(config.unfused.stages)
        made = function(config.all_settings, self.split(config, inputs))
        if not isinstance(made, tuple) or len(made) != 3:
            raise Miscounted(f"{where} returns y, extra outputs and intermediates, got {described(made)}.")
        if not isinstance(made[0], Tensor):
            raise Miscounted(f"{where} returns a tensor first, got {described(made[0])}.")
        extra = returned.entries(where, "extra outputs", made[1], count)
        sides: list[Any] = []
        for i, (want, values) in enumerate(zip(config.unfused.side_counts, extra, strict=True)):
            if len(values) != want:
                what = plural(want, "extra output") + of_operation(i, count)
                raise Miscounted(f"{where} returns {what}, got {len(values)}.")
            for value in [values[k] for k in config.unfused.chain_outputs[i]]:
                if value is None:
                    raise Miscounted(
                        f"{where} leaves out an extra output{of_operation(i, count)} that is public, or taken by an "
                        "operation outside its forward fusion. Return it."
                    )
                if not isinstance(value, Tensor):
                    what = described(value) + of_operation(i, count)
                    raise Miscounted(f"{where} returns tensors as extra outputs, got {what}.")
                sides.append(value)
        return made[0], sides, returned.entries(where, "intermediates", made[2], count)

    def split(self, config: Any, inputs: Any) -> Sequence[Any]:
        """Return the inputs of each operation."""
        return (with_constants(config, inputs),)

    def save(self, config: Any, inputs: Any, made: ForwardResult) -> tuple[Any, ...]:
        found: list[Any] = []
        for name, at in chained.from_iterable(config.sources):
            if name == "intermediates":
                found += made.intermediates[config.intermediates_spans[at]]
            elif name not in ("none", "value"):
                found.append(None if name == "empty" else (inputs if name == "input" else made.outputs)[at])
        return tuple(found)

    # -- backward ------------------------------------------------------------------------------------------------------

    def abstract_gradients(self, config: Any, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        with without_data(), tried(self.where.backward):
            return abstract(self.backward(config, stand_in(tuple(saved)), (), stand_in(grads)))

    def backward(self, config: Any, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        where, wants = self.where.backward, config.wants
        kept = self.unpacked(config, saved)
        found = self.functions.backward(config.all_settings, kept, self.widened(config, grads), wants)
        found = returned.placed(where, found, [wanted._fields for wanted in wants])
        flat = (found[0][0], *[t for part in found for t in part[1:]])
        given, chosen = self.given(config, kept), list[Any]()
        for i, (g, want, (name, like)) in enumerate(zip(flat, self.wants(config), config.gradients, strict=True)):
            if want and g is None:
                raise Miscounted(f"{where} returned no gradient of {name}, which is wanted.")
            if want:
                returned.check_gradient(where, name, g, like, given.get(i), grads[0])
            chosen.append(g if want else None)
        return without_aliases(chosen, (*grads, *saved))

    def widened(self, config: Any, grads: Tensors) -> Tensors:
        """Return the gradient of y, and of every extra output of every operation."""
        return grads

    def unpacked(self, config: Any, saved: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the values that `select` chose, for each operation."""
        rest = iter(saved)
        return [
            tuple([returned.unpacked(kind, list(islice(rest, tensor_count(kind)))) for kind in kinds])
            for kinds in config.saved_kinds
        ]

    def given(self, config: Any, kept: Sequence[Any]) -> dict[int, Any]:
        """Return the inputs that were saved, by their places."""
        return {
            at: t for part, values in zip(config.sources, kept, strict=True)
            for (name, at), t in zip(part, values, strict=True) if name == "input"
        }  # fmt: skip

    # -- counts --------------------------------------------------------------------------------------------------------

    def intermediates_size(self, config: Any) -> int:
        return sum(tensor_count(kind) for kind in config.intermediates)

    def saved_size(self, config: Any) -> int:
        return sum(tensor_count(kind) for part in config.saved_kinds for kind in part)

    def decided_by_layout(self, config: Any, side: str) -> bool:
        return False

    # -- planning ------------------------------------------------------------------------------------------------------

    def probe(self, config: Any, inputs: Sequence[Any]) -> "Probed":
        """Run compute and select on inputs without data, and return the config with what planning finds."""
        with without_data():
            fields = self.Inputs._make(stand_in(tuple(inputs)))
            with tried(*self.asked):
                y, extra, parts = self._computed(config, fields, self.functions.abstract)
            outputs, intermediates = (y, *extra), list(chained.from_iterable(parts))
            with tried(self.where.select):
                chosen = self.functions.select(config.all_settings, self.split(config, fields), outputs, parts)
            chosen = returned.entries(self.where.select, "what is saved", chosen, len(parts), TypeError)
            kinds = tuple(kind_of(value, self.where.compute) for value in intermediates)
            places = {"input": fields, "output": outputs, "intermediates": intermediates}
            saved = tuple(
                tuple(self._source(value, places, "none" if is_users(stage) else "empty") for value in part)
                for stage, part in zip(config.unfused.stages, chosen, strict=True)
            )
            return Probed(replace(config, intermediates=kinds, saved=saved), outputs, chosen)

    def _source(self, value: Any, places: dict[str, Sequence[Any]], if_missing: str) -> str:
        """Return where `select` found a value. Octavo's own layers keep a place for a value that is missing."""
        if value is None:
            return if_missing
        kind = kind_of(value, self.where.select)
        if kind.startswith("value:"):
            return kind
        for name, there in places.items():
            for i, place in enumerate(there):
                if place is value:
                    return f"{name}:{i}"
        raise TypeError(
            f"{self.where.select} made {described(value)}. It only selects, among inputs, outputs and what compute "
            "hands it, since it does not run at every step. Make the tensor in compute and hand it over."
        )


class Probed(NamedTuple):
    config: Any
    outputs: tuple[Tensor, ...]  # without data
    chosen: list[tuple[Any, ...]]  # the saved values of each operation, without data


# -- fused operations --------------------------------------------------------------------------------------------------


class Inputs(chain.Fields):
    """The inputs of a fused operation: x, then those of each operation but for its x."""

    @property
    def x(self) -> Any:
        return self[0]

    def _replace(self, x: Any) -> "Inputs":
        return Inputs((x, *self[1:]))


def _by_chain(name: str, *sides: str) -> Any:
    """Make a member that the chain of the stages serves if the operation's side is one of these; otherwise UserLayer
    does."""

    def answer(self: Any, config: UserConfig, *arguments: Any) -> Any:
        if config.side in sides:
            return getattr(chain.layer, name)(config.unfused, *arguments)
        return getattr(UserLayer, name)(self, config, *arguments)

    return answer


class UserFusion(UserLayer):
    """A user's fused operation."""

    forward, abstract, save, intermediates_size, saved_size, auxiliary, flat_places = (
        _by_chain(name, "backward")
        for name in ("forward", "abstract", "save", "intermediates_size", "saved_size", "auxiliary", "flat_places")
    )
    backward, abstract_gradients, gradient_aliases = (
        _by_chain(name, "forward") for name in ("backward", "abstract_gradients", "gradient_aliases")
    )
    wants, has_backward, buffers_size, graph_buffers = (
        _by_chain(name, "forward", "backward", "both")
        for name in ("wants", "has_backward", "buffers_size", "graph_buffers")
    )

    def __init__(self, name: str, title: str, functions: Functions, where: Functions) -> None:
        super().__init__(name, title, functions, where, Inputs)
        self.Buffers = chain.Fields

    def outputs(self, config: UserConfig) -> int:
        return 1 + sum(config.unfused.chain_output_counts)

    def split(self, config: UserConfig, inputs: Sequence[Any]) -> Sequence[Any]:
        own = chain.stage_inputs(config.unfused, inputs)
        own[0] = own[0]._replace(x=inputs[0])
        return tuple([with_constants(stage, part) for stage, part in zip(config.unfused.stages, own, strict=True)])

    def widened(self, config: UserConfig, grads: Tensors) -> Tensors:
        rest = iter(grads[1:])
        made = enumerate(config.unfused.side_counts)
        return (
            grads[0],
            *[next(rest) if k in config.unfused.chain_outputs[i] else None for i, n in made for k in range(n)],
        )

    def unpacked(self, config: UserConfig, saved: Sequence[Any]) -> list[tuple[Any, ...]]:
        if config.side != "backward":
            return super().unpacked(config, saved)
        parts = zip(config.unfused.pairs, config.unfused.saved_spans, strict=True)
        return [
            layer.unpacked(stage, saved[span])[0] if is_users(stage) else tuple(saved[span])
            for (layer, stage), span in parts
        ]

    def given(self, config: UserConfig, kept: Sequence[Any]) -> dict[int, Any]:
        if config.side != "backward":
            return super().given(config, kept)
        found: dict[int, Any] = {}
        for i, (layer, stage) in enumerate(config.unfused.pairs):
            own = layer.given(stage, kept[i : i + 1]) if is_users(stage) else {}
            before = config.unfused.input_spans[i].start - 1
            found |= {before + at: t for at, t in own.items() if at > 0 or i == 0}
        return found

    # -- planning ------------------------------------------------------------------------------------------------------

    def probe(self, config: UserConfig, inputs: Sequence[Any]) -> Probed:
        if config.side == "backward":
            return Probed(config, (), [])
        with without_data():
            found = super().probe(config, inputs)
            like = abstract(tuple(inputs))
            saves_theirs = config.side == "forward" and any(self.wants(config))
            try:
                made = chain.layer.abstract(config.unfused, like)
            except (RuntimeError, ValueError):  # sizes that were made up for a graph do not fit these operations
                if saves_theirs:
                    raise
                return found
            for i, (t, want) in enumerate(zip(found.outputs, made.outputs, strict=True)):
                if _unlike(t, want):  # the next stage and the caller rely on them
                    raise TypeError(
                        f"{self.where.compute} returned {described(t)} as {f'extra output {i - 1}' if i else 'y'}, and "
                        f"the operations by themselves make {described(want)}. Return one like theirs."
                    )
            if saves_theirs:
                self._check_saved_alike(config, chain.layer.save(config.unfused, like, made), found.chosen)
        return found

    def _check_saved_alike(self, config: UserConfig, want: Sequence[Any], chosen: Sequence[Sequence[Any]]) -> None:
        """Refuse saved values that are unlike the operations' own: after a forward fusion, their own backward takes
        them."""
        for i, (stage, span, part) in enumerate(zip(config.stages, config.unfused.saved_spans, chosen, strict=True)):
            missing: list[Any] = [] if is_users(stage) else [None]
            ours = [t for value in part for t in (missing if value is None else packed(value))]
            theirs = want[span]
            if len(ours) != len(theirs) or any(_unlike(a, b) for a, b in zip(ours, theirs, strict=True)):
                raise TypeError(
                    f"{self.title} is a forward fusion and saves {_listed(ours)} for operation {i}, whose own backward "
                    f"takes {_listed(theirs)}. Save the same, or define fuser_backward too and register it for both."
                )


def _unlike(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is not b
    return (tuple(a.shape), a.dtype) != (tuple(b.shape), b.dtype)


def _listed(values: Sequence[Any]) -> str:
    return "[" + ", ".join("nothing" if t is None else f"{t.dtype} {tuple(t.shape)}" for t in values) + "]"
