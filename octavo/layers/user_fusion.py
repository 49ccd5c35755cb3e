"""Several stages run as one by functions that somebody else wrote (`octavo.fuser.pattern.FusedOperation`).

    forward alone     its values, saved as the stages themselves would have saved them; each stage's own backward
    backward alone    each stage's own forward; its gradients, from what the stages have saved
    both              what is saved is its own affair

As with `octavo.layers.user_op`, what is saved was found out when the run was planned.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from octavo.layers import chain, fork, user_op
from octavo.layers.contract import Layer, Made, Tensors
from octavo.layers.dry_run import Miscounted, fake, stand_in, tried, without_data
from octavo.layers.gradient_check import check_gradient, given_among
from octavo.layers.saved_values import kind_of, packed, slots_of, told, unpacked_all
from octavo.quant.proto import TensorProto
from octavo.values import Value, register


class Functions(NamedTuple):
    title: str
    compute: Callable[[Any, Any], Any] | None
    select: Callable[[Any, Any, Any, Any], Any] | None
    backward: Callable[[Any, Any, Any, Any], Any] | None


FUNCTIONS: dict[str, Functions] = {}


@register("composite")
class Config(Value):
    name: str = ""  # of its functions
    side: str = "both"  # or "forward", "backward"
    stages: tuple[Value, ...] = ()
    fresh: tuple[tuple[str, ...], ...] = ()  # for each stage, as in a custom config
    saved: tuple[tuple[str, ...], ...] = ()  # for each stage: "none", "input:stage:place", "output:place", "fresh:…"
    routes: tuple[tuple[int, int, int, int], ...] = ()  # as of a chain: channels that are its own affair
    hidden: tuple[tuple[int, int], ...] = ()

    @cached_property
    def functions(self) -> Functions:
        return FUNCTIONS[self.name]

    @cached_property
    def unfused(self) -> chain.Config:
        return chain.Config(self.stages, routes=self.routes, hidden=self.hidden)

    @cached_property
    def settings(self) -> tuple[Any, ...]:
        """What each operation is set to, as its own functions know it."""
        return tuple(stage.settings if isinstance(stage, user_op.Config) else stage for stage in self.stages)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for stage in self.fresh for kind in stage)

    @cached_property
    def saved_kinds(self) -> tuple[tuple[str, ...], ...]:
        """What each saved value is, for each stage."""
        return tuple(
            tuple(self._kind(source, isinstance(stage, user_op.Config)) for source in sources)
            for stage, sources in zip(self.stages, self.saved, strict=False)  # not yet known: nothing
        )

    def _kind(self, source: str, is_custom: bool) -> str:
        name, *at = source.split(":")
        if name == "none":
            return "none" if is_custom else "empty"  # this package's own layers have a place for what is missing
        return self.fresh[int(at[0])][int(at[1])] if name == "fresh" else "tensor"

    @cached_property
    def own(self) -> bool:
        """Whether forward is its own functions'."""
        return self.side != "backward"


class Inputs(chain.Fields):
    @property
    def x(self) -> Any:
        return self[0]

    def _replace(self, x: Any) -> "Inputs":
        return Inputs((x, *self[1:]))


class CompositeLayer(Layer):
    """A user's fused operation."""

    def fresh_size(self, config: Config) -> int:
        return sum(slots_of(kind) for kind in config.kinds) if config.own else chain.layer.fresh_size(config.unfused)

    def saved_size(self, config: Config) -> int:
        if not config.own:
            return chain.layer.saved_size(config.unfused)
        return sum(slots_of(kind) for stage in config.saved_kinds for kind in stage)

    def extras(self, config: Config) -> int:
        return 0 if config.own else chain.layer.extras(config.unfused)

    def buffers_size(self, config: Config) -> int:
        return chain.layer.buffers_size(config.unfused)

    def has_backward(self, config: Config) -> bool:
        return any(self.wants(config)) or any(config.unfused.active)

    def flat_places(self, config: Config) -> tuple[int, ...]:
        return () if config.own else chain.layer.flat_places(config.unfused)

    def graph_buffers(self, config: Config, *fields: Any) -> tuple[Any, ...]:
        return chain.layer.graph_buffers(config.unfused, *fields)

    def outputs(self, config: Config) -> int:
        return 1 + sum(config.unfused.given)

    def decided_by_layout(self, config: Config, side: str) -> bool:
        return False

    def wants(self, config: Config) -> tuple[bool, ...]:
        return chain.layer.wants(config.unfused)

    def inputs_of(self, config: Config, values: Sequence[Any]) -> Any:
        return Inputs(values)

    def forward(self, config: Config, inputs: Sequence[Any]) -> Made:
        if not config.own:
            return chain.layer.forward(config.unfused, inputs)
        y, extra, fresh = _computed(config, inputs)
        where = f"{config.functions.title}.fuser_forward_compute"
        values = [value for part in fresh for value in part]
        user_op.check_kinds(where, values, config.kinds)
        given = [t for field in inputs for t in (field if isinstance(field, tuple) else (field,)) if t is not None]
        stage, away = config.stages[0], extra
        if isinstance(stage, fork.Config) and extra and extra[0] is inputs[0]:  # x is what it gives away
            extra, away = [fork.layer.forward(stage, fork.Inputs(inputs[0])).outputs[1], *extra[1:]], extra[1:]
        user_op.refuse_inputs(where, (y, *away), given)
        slots = [t for value in values for t in packed(value)]
        outputs = user_op.without_aliases((y, *extra), ())
        return Made(outputs, (), user_op.without_aliases(slots, (*given, *outputs)))

    def abstract(self, config: Config, inputs: Sequence[Any]) -> Made:
        if not config.own:
            return chain.layer.abstract(config.unfused, inputs)
        with without_data():
            fakes = [_empty(field) for field in inputs]
            with tried(f"{config.functions.title}.fuser_forward_compute"):
                made = self.forward(config, fakes)
            return Made(*(tuple(None if t is None else TensorProto.of(t) for t in group) for group in made))

    def save(self, config: Config, inputs: Sequence[Any], made: Made) -> tuple[Any, ...]:
        if not config.own:
            return chain.layer.save(config.unfused, inputs, made)
        own = _own_inputs(config, inputs)
        starts: dict[tuple[int, int], int] = {}
        at = 0
        for i, stage in enumerate(config.fresh):
            for j, kind in enumerate(stage):
                starts[i, j] = at
                at += slots_of(kind)
        found: list[Any] = []
        for kinds, sources in zip(config.saved_kinds, config.saved, strict=True):
            for kind, source in zip(kinds, sources, strict=True):
                name, *place = source.split(":")
                if kind == "empty":
                    found.append(None)
                elif name == "input":
                    found.append(own[int(place[0])][int(place[1])])
                elif name == "output":
                    found.append(made.outputs[int(place[0])])
                elif name == "fresh":
                    i, j = int(place[0]), int(place[1])
                    found += made.fresh[starts[i, j] : starts[i, j] + slots_of(config.fresh[i][j])]
        return tuple(found)

    def passed(self, config: Config) -> dict[int, int]:
        return chain.layer.passed(config.unfused) if config.side == "forward" else {}

    def abstract_gradients(self, config: Config, saved: tuple[Any, ...], *grads: Any) -> tuple[TensorProto | None, ...]:
        if config.side == "forward":
            return chain.layer.abstract_gradients(config.unfused, saved, *grads)
        with without_data():
            values, dys = (tuple(stand_in(t) for t in given) for given in (saved, grads))
            with tried(f"{config.functions.title}.fuser_backward"):
                found = self.backward(config, values, (), dys)
            return tuple(None if t is None else TensorProto.of(t) for t in found)

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        if config.side == "forward":
            return chain.layer.backward(config.unfused, saved, buffers, grads, writes)
        functions, unfused = config.functions, config.unfused
        assert functions.backward is not None
        fields = [
            user_op.wanted_fields(layer, stage) for layer, stage in zip(unfused.layers, unfused.stages, strict=True)
        ]
        rest = iter(grads[1:])
        whole = [next(rest) if k in unfused.shown[i] else None for i, n in enumerate(unfused.made) for k in range(n)]
        where = f"{functions.title}.fuser_backward"
        kept = _saved_values(config, saved)
        found = functions.backward(config.settings, kept, (grads[0], *whole), fields)
        found = _entries(where, "gradients", found, len(config.stages))
        for i, (own, wanted) in enumerate(zip(found, unfused.wanted, strict=True)):
            if len(own) != len(wanted):
                raise Miscounted(f"{where} returns {len(wanted)} gradients for operation {i}, got {len(own)}.")
        flat = (found[0][0], *[t for own in found for t in own[1:]])
        names = [f"{i}.{field}" for i, own in enumerate(fields) for field in own._fields if i == 0 or field != "x"]
        likes = _likes(config, kept)
        for name, t, want, like in zip(names, flat, self.wants(config), likes, strict=True):
            if want and t is None:
                raise Miscounted(f"{where} returned no gradient of {name}, which is wanted.")
            if want:
                check_gradient(where, name, t, *like, grads[0])
        chosen = [t if want else None for t, want in zip(flat, self.wants(config), strict=True)]
        return user_op.without_aliases(chosen, (*grads, *saved))


layer = CompositeLayer(Config, Inputs, buffers=chain.Fields)


def _own_inputs(config: Config, inputs: Sequence[Any]) -> tuple[Any, ...]:
    own = chain.stage_inputs(config.unfused, inputs)
    own[0] = own[0]._replace(x=inputs[0])
    return tuple(own)


def _computed(config: Config, inputs: Sequence[Any]) -> tuple[Any, list[Any], list[tuple[Any, ...]]]:
    """y, all extra outputs, what is fresh for each stage."""
    functions, unfused = config.functions, config.unfused
    assert functions.compute is not None
    where = f"{functions.title}.fuser_forward_compute"
    made = functions.compute(config.settings, _own_inputs(config, inputs))
    if not isinstance(made, tuple) or len(made) != 3:
        raise Miscounted(f"{where} returns y, extra outputs and fresh tensors, got {told(made)}.")
    y, extra, fresh = made
    if not isinstance(y, Tensor):
        raise Miscounted(f"{where} returns a tensor first, got {told(y)}.")
    extra = _entries(where, "extra outputs", extra, len(config.stages))
    fresh = _entries(where, "fresh tensors", fresh, len(config.stages))
    shown: list[Any] = []
    for i, (given, want) in enumerate(zip(extra, unfused.made, strict=True)):
        if len(given) != want:
            raise Miscounted(f"{where} returns {want} extra outputs for operation {i}, got {len(given)}.")
        for k in unfused.shown[i]:
            if given[k] is None:
                raise Miscounted(
                    f"{where} leaves out an extra output of operation {i} that is public, or taken by an operation "
                    "outside its forward fusion. Return it."
                )
            if not isinstance(given[k], Tensor):
                raise Miscounted(f"{where} returns tensors as extra outputs, got {told(given[k])} for operation {i}.")
            shown.append(given[k])
    return y, shown, fresh


def _entries(
    where: str, what: str, found: Any, number: int, error: type[Exception] = Miscounted
) -> list[tuple[Any, ...]]:
    """What a function returned for each operation, if it is for all of them."""
    if not isinstance(found, tuple | list) or len(found) != number:
        raise error(f"{where} returns {what} with an entry for each of {number} operations, got {told(found)}.")
    for i, part in enumerate(found):
        if not isinstance(part, tuple | list):
            raise error(f"{where} returns a tuple of {what} for operation {i}, got {told(part)}.")
    return [tuple(part) for part in found]


def _empty(field: Any) -> Any:
    if isinstance(field, tuple):
        return tuple(t.empty() for t in field)
    return None if field is None else field.empty()


def _saved_values(config: Config, saved: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What each operation's own functions would find saved."""
    if config.own:
        found, at = [], 0
        for stage in config.saved_kinds:
            size = sum(slots_of(kind) for kind in stage)
            found.append(unpacked_all(stage, saved[at : at + size]))
            at += size
        return found
    sizes = config.unfused.saved_sizes
    parts = [saved[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    return [
        user_op.kept_values(stage, part) if isinstance(stage, user_op.Config) else tuple(part)
        for stage, part in zip(config.stages, parts, strict=True)
    ]


def _likes(config: Config, kept: Sequence[Any]) -> list[tuple[Any, Any]]:
    """For each gradient what a custom stage says of its input, and that input itself if it was saved."""
    as_y = all(isinstance(stage, user_op.Config) and stage.likes[0][2] for stage in config.stages)
    given: dict[str, Any] = {}
    for i, (stage, values) in enumerate(zip(config.stages, kept, strict=True)):
        if config.own:
            given |= given_among(values, config.saved[i])
        elif isinstance(stage, user_op.Config):
            given |= {f"{i}:{at}": t for at, t in given_among(values, stage.saved).items()}
    found: list[tuple[Any, Any]] = []
    for i, (stage, wanted) in enumerate(zip(config.stages, config.unfused.wanted, strict=True)):
        for j in range(min(i, 1), len(wanted)):
            like = stage.likes[j] if isinstance(stage, user_op.Config) else None
            found.append((like and (*like[:2], like[2] and as_y), given.get(f"{i}:{j}")))
    return found


# -- planning ----------------------------------------------------------------------------------------------------------


def probe(config: Config, inputs: Sequence[Any]) -> Config:
    """The config with what its functions keep, found on tensors without data."""
    if not config.own:
        return config
    functions = config.functions
    with without_data():
        fakes = [_fake(field) for field in inputs]
        own = _own_inputs(config, fakes)
        where, made_by = (f"{functions.title}.{name}" for name in ("fuser_forward_save_ctx", "fuser_forward_compute"))
        with tried(made_by):
            y, extra, fresh = _computed(config, fakes)
        assert functions.select is not None
        with tried(where):
            chosen = functions.select(config.settings, own, (y, *extra), fresh)
        chosen = _entries(where, "what is saved", chosen, len(config.stages), TypeError)
        kinds = tuple(tuple(kind_of(value, made_by) for value in part) for part in fresh)
        saved = tuple(tuple(_source(where, value, own, (y, *extra), fresh) for value in part) for part in chosen)
        found = replace(config, fresh=kinds, saved=saved)
        like = abstract_fields(fakes)
        saves_theirs = config.side == "forward" and any(layer.wants(config))
        try:
            made = chain.layer.abstract(config.unfused, like)
        except (RuntimeError, ValueError):  # sizes that were made up for a graph do not fit these operations
            if saves_theirs:
                raise
            return found
        _check_outputs_alike(made_by, (y, *extra), made.outputs)
        if saves_theirs:
            _check_saved_alike(found, chain.layer.save(config.unfused, like, made), chosen)
    return found


def _check_outputs_alike(where: str, outputs: Sequence[Any], theirs: Sequence[Any]) -> None:
    """What comes after, and the caller, count on what the operations would have made."""
    for i, (t, want) in enumerate(zip(outputs, theirs, strict=True)):
        if (tuple(t.shape), t.dtype) != (tuple(want.shape), want.dtype):
            raise TypeError(
                f"{where} returned {told(t)} as {f'extra output {i - 1}' if i else 'y'}, and the operations by "
                f"themselves make {told(want)}. Return one like theirs."
            )


def abstract_fields(fields: Sequence[Any]) -> tuple[Any, ...]:
    """Inputs without data."""
    return tuple(
        tuple(_proto(t) for t in field) if isinstance(field, tuple) else None if field is None else _proto(field)
        for field in fields
    )


def _proto(t: Any) -> TensorProto:
    return t if isinstance(t, TensorProto) else TensorProto.of(t)


def _fake(field: Any) -> Any:
    if isinstance(field, tuple):
        return tuple(fake(t) for t in field)
    return None if field is None else fake(field)


def _source(where: str, value: Any, own: Sequence[Any], outputs: Sequence[Any], fresh: Sequence[Any]) -> str:
    if value is None:
        return "none"
    kind_of(value, where)
    for i, fields in enumerate(own):
        for j, place in enumerate(fields):
            if place is value:
                return f"input:{i}:{j}"
    for i, place in enumerate(outputs):
        if place is value:
            return f"output:{i}"
    for i, part in enumerate(fresh):
        for j, place in enumerate(part):
            if place is value:
                return f"fresh:{i}:{j}"
    raise TypeError(
        f"{where} made {told(value)}. It only selects, among inputs, outputs and what compute hands it, since "
        "it does not run at every step. Make the tensor in compute and hand it over."
    )


def _check_saved_alike(config: Config, want: Sequence[Any], chosen: Sequence[Sequence[Any]]) -> None:
    """A forward of its own is followed by the operations' own backward, which takes what they save."""
    sizes = config.unfused.saved_sizes
    for i, part in enumerate(chosen):
        theirs: list[Any] = list(want[sum(sizes[:i]) : sum(sizes[: i + 1])])
        missing: list[Any] = [] if isinstance(config.stages[i], user_op.Config) else [None]
        ours = [t for value in part for t in (missing if value is None else packed(value))]
        same = len(ours) == len(theirs) and all(
            (a is None) == (b is None) and (a is None or (tuple(a.shape), a.dtype) == (tuple(b.shape), b.dtype))
            for a, b in zip(ours, theirs, strict=True)
        )
        if not same:
            raise TypeError(
                f"{config.functions.title} is a forward fusion and saves {_said(ours)} for operation {i}, whose own "
                f"backward takes {_said(theirs)}. Save the same, or define fuser_backward too and register it for both."
            )


def _said(values: Sequence[Any]) -> str:
    return "[" + ", ".join("nothing" if t is None else f"{t.dtype} {tuple(t.shape)}" for t in values) + "]"
