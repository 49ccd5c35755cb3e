"""A layer that somebody else wrote (`octavo.fuser.basic`), as a stage of a chain.

    compute (settings, inputs)                   -> y, extra outputs, fresh
    select  (settings, inputs, outputs, fresh)   -> which of these backward needs
    backward(settings, saved, grads, wants)      -> one gradient for each input

Functions are found by name, since a graph holds strings. What `select` chose, and what each fresh value is, was found
out when the run was planned, on tensors without data (`probe`), and is part of the config: it is not asked again.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from octavo.errors import UnsupportedConfig
from octavo.layers.contract import Layer, Made, Tensors
from octavo.layers.dry_run import Miscounted, fake, stand_in, tried, without_data
from octavo.layers.gradient_check import check_gradient, given_among
from octavo.layers.saved_values import kind_of, packed, slots_of, unpacked_all
from octavo.quant.proto import TensorProto
from octavo.values import Value, register


class Functions(NamedTuple):
    title: str  # for messages
    fields: tuple[str, ...]  # x, then what else it takes
    compute: Callable[[Any, Any], Any]
    select: Callable[[Any, Any, Any, Any], Any]
    backward: Callable[[Any, Any, Any, Any], Any]
    outputs: int  # y and the extra ones
    abstract: Callable[[Any, Any], Any] | None = None


FUNCTIONS: dict[str, Functions] = {}


@register("custom")
class Config(Value):
    name: str = ""  # of its functions, with a digest of their text: a graph on disk must not outlive them
    settings: Value | None = None
    wanted: tuple[bool, ...] = ()  # which inputs want a gradient
    fresh: tuple[str, ...] = ()  # the kind of each (`octavo.layers.saved_values`)
    saved: tuple[str, ...] = ()  # where each comes from: "none", "input:0", "output:0", "fresh:0"
    likes: tuple[tuple[str, tuple[int, ...], bool], ...] = ()  # of each gradient (`octavo.layers.gradient_check`)

    @cached_property
    def functions(self) -> Functions:
        return FUNCTIONS[self.name]

    @cached_property
    def fresh_slots(self) -> tuple[int, ...]:
        return tuple(slots_of(kind) for kind in self.fresh)

    @cached_property
    def saved_kinds(self) -> tuple[str, ...]:
        """What each saved value is."""
        return tuple(
            self.fresh[int(s[6:])] if s.startswith("fresh:") else "none" if s == "none" else "tensor"
            for s in self.saved
        )


@lru_cache(maxsize=4096)
def fields_of(names: tuple[str, ...]) -> Any:
    return namedtuple("Inputs", names)


class CustomLayer(Layer):
    """A user's operation."""

    def fresh_size(self, config: Config) -> int:
        return sum(config.fresh_slots)

    def saved_size(self, config: Config) -> int:
        return sum(slots_of(kind) for kind in config.saved_kinds)

    def has_backward(self, config: Config) -> bool:
        return any(config.wanted)

    def inputs_of(self, config: Config, values: Sequence[Any]) -> Any:
        return fields_of(config.functions.fields)(*values)

    def outputs(self, config: Config) -> int:
        return config.functions.outputs

    def forward(self, config: Config, inputs: Any) -> Made:
        functions = config.functions
        y, extra, fresh = checked(functions, functions.compute(config.settings, inputs))
        check_kinds(f"{functions.title}'s compute", fresh, config.fresh)
        given = [t for t in inputs if isinstance(t, Tensor)]
        refuse_inputs(functions.title, (y, *extra), given)
        outputs = without_aliases((y, *extra), ())
        slots = [t for value in fresh for t in packed(value)]
        return Made(outputs, (), without_aliases(slots, (*given, *outputs)))

    def abstract(self, config: Config, inputs: Any) -> Made:
        functions = config.functions
        with without_data():
            fakes = fields_of(functions.fields)(*[None if p is None else p.empty() for p in inputs])
            y, extra, fresh = _said(functions, config.settings, fakes)
            slots = [t for value in fresh for t in packed(value)]
            return Made(
                tuple(TensorProto.of(t) for t in (y, *extra)), (),
                tuple(None if t is None else TensorProto.of(t) for t in slots),
            )  # fmt: skip

    def decided_by_layout(self, config: Config, side: str) -> bool:
        return False

    def wants(self, config: Config) -> tuple[bool, ...]:
        return config.wanted

    def save(self, config: Config, inputs: Any, made: Made) -> tuple[Any, ...]:
        found: list[Any] = []
        starts = [sum(config.fresh_slots[:i]) for i in range(len(config.fresh) + 1)]
        for source in config.saved:
            name, _, at = source.partition(":")
            if name == "input":
                found.append(inputs[int(at)])
            elif name == "output":
                found.append(made.outputs[int(at)])
            elif name == "fresh":
                found += made.fresh[starts[int(at)] : starts[int(at) + 1]]
        return tuple(found)

    def abstract_gradients(self, config: Config, saved: tuple[Any, ...], *grads: Any) -> tuple[TensorProto | None, ...]:
        with without_data():
            values, dys = (tuple(stand_in(t) for t in given) for given in (saved, grads))
            with tried(f"{config.functions.title}'s backward"):
                found = gradients(config, values, dys)
            return tuple(None if t is None else TensorProto.of(t) for t in found)

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        if all(g is None for g in grads):
            return (None,) * len(config.wanted)
        found = gradients(config, saved, grads)
        return without_aliases(found, (*grads, *saved))


layer = CustomLayer(Config, None)


# -- planning ----------------------------------------------------------------------------------------------------------


class Probed(NamedTuple):
    """What functions do, found on tensors without data."""

    fresh: tuple[str, ...]  # kinds
    saved: tuple[str, ...]  # sources
    outputs: tuple[TensorProto, ...]


def probe(functions: Functions, settings: Value | None, inputs: Sequence[Any]) -> Probed:
    with without_data():
        fakes = [None if t is None else fake(t) for t in inputs]
        named = fields_of(functions.fields)(*fakes)
        y, extra, fresh = _said(functions, settings, named)
        outputs = (y, *extra)
        with tried(f"{functions.title}'s save_ctx"):
            chosen = functions.select(settings, named, outputs, fresh)
    if not isinstance(chosen, tuple | list):
        raise TypeError(f"{functions.title}'s save_ctx returns a tuple, got {type(chosen).__name__}.")
    kinds = tuple(kind_of(value, f"{functions.title}'s compute") for value in fresh)
    sources = tuple(_source(functions, value, fakes, outputs, fresh) for value in chosen)
    return Probed(kinds, sources, tuple(TensorProto.of(t) for t in outputs))


def _said(functions: Functions, settings: Value | None, inputs: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """What compute returns for tensors without data, or would."""
    if functions.abstract is None:
        otherwise = ", or define op_abstract, which is asked for shapes in its place"
        with tried(f"{functions.title}'s compute", otherwise):
            made = functions.compute(settings, inputs)
    else:
        with tried(f"{functions.title}'s op_abstract"):
            made = functions.abstract(settings, inputs)
    return checked(functions, made)


def _source(functions: Functions, value: Any, inputs: Sequence[Any], outputs: Sequence[Any], fresh: Any) -> str:
    if value is None:
        return "none"
    kind_of(value, f"{functions.title}'s save_ctx")
    for name, places in (("input", inputs), ("output", outputs), ("fresh", fresh)):
        for i, place in enumerate(places):
            if place is value:
                return f"{name}:{i}"
    raise TypeError(
        f"{functions.title}'s save_ctx made a tensor. It only selects, among inputs, outputs and what compute hands "
        "it, since it does not run at every step. Make the tensor in compute and hand it over."
    )


def checked(functions: Functions, made: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """What compute returned, if it is as many as it should be."""
    if not isinstance(made, tuple) or len(made) != 3:
        raise Miscounted(f"{functions.title}'s compute returns outputs and a tuple of fresh tensors, got {made!r}.")
    y, extra, fresh = made
    if not isinstance(y, Tensor | TensorProto):
        raise Miscounted(f"{functions.title}'s compute returns a tensor first, got {type(y).__name__}.")
    if not isinstance(extra, tuple | list) or len(extra) != functions.outputs - 1:
        raise Miscounted(
            f"{functions.title} has {functions.outputs - 1} extra outputs, and compute returned {extra!r}."
        )
    if not isinstance(fresh, tuple | list):
        raise Miscounted(f"{functions.title}'s compute returns fresh tensors as a tuple, got {type(fresh).__name__}.")
    return y, tuple(extra), tuple(fresh)


# -- the contract ------------------------------------------------------------------------------------------------------


def check_kinds(where: str, fresh: Sequence[Any], planned: tuple[str, ...]) -> None:
    kinds = tuple(kind_of(value, where) for value in fresh)
    if kinds != planned:
        raise Miscounted(
            f"{where} handed over {list(kinds)}, and {list(planned)} when the run was planned. Which tensors there are "
            "follows from op_config alone."
        )


def refuse_inputs(where: str, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for value in outputs:
        if any(_memory(t) == _memory(value) != 0 for t in given if t.numel()):
            raise UnsupportedConfig(
                f"{where} returns one of its inputs, or a view of it. Return a fresh tensor: a node of a graph has no "
                "aliases."
            )


def _memory(t: Tensor) -> int:
    """Where it is; 0 for one without data."""
    return 0 if t.is_meta or is_fake(t) else t.untyped_storage().data_ptr()


def kept_values(config: Config, saved: Sequence[Any]) -> tuple[Any, ...]:
    """What its select chose."""
    return unpacked_all(config.saved_kinds, saved)


def wanted_fields(layer: Any, stage: Any) -> Any:
    """Which inputs of a stage want a gradient, by name."""
    if isinstance(stage, Config):
        return fields_of(stage.functions.fields)(*stage.wanted)
    return layer.Inputs._make(layer.wants(stage))


def gradients(config: Config, saved: Sequence[Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """What its backward returns, if it is as many as it should be; nothing that is not wanted."""
    functions = config.functions
    wanted = fields_of(functions.fields)(*config.wanted)
    kept = kept_values(config, saved)
    found = functions.backward(config.settings, kept, grads, wanted)
    if not isinstance(found, tuple | list) or len(found) != len(config.wanted):
        raise Miscounted(
            f"{functions.title}'s backward returns a gradient for each of {', '.join(functions.fields)}: "
            f"{len(config.wanted)}, got {len(found) if isinstance(found, tuple | list) else type(found).__name__}."
        )
    given = given_among(kept, config.saved)
    for i, (name, g, want) in enumerate(zip(functions.fields, found, config.wanted, strict=True)):
        if want and g is None:
            raise Miscounted(f"{functions.title}'s backward returned no gradient of {name}, which is wanted.")
        if want:
            check_gradient(f"{functions.title}'s backward", name, g, config.likes[i], given.get(str(i)), grads[0])
    return tuple(g if want else None for g, want in zip(found, config.wanted, strict=True))


def without_aliases(found: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...]:
    """A node of a graph returns no memory that it was given, and none twice."""
    taken = {_memory(t) for t in given if isinstance(t, Tensor)}
    fresh: list[Any] = []
    for t in found:
        if t is not None and _memory(t) in taken and _memory(t) != 0:
            t = t.clone(memory_format=torch.contiguous_format)
        if t is not None:
            taken.add(_memory(t))
        fresh.append(t)
    return tuple(fresh)
