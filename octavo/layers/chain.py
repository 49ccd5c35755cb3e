"""Layers one after the other, as one layer: what the output of each is, the next takes as x.

A run of operations that the fuser found is such a chain, so that it is one node forward and one backward, saves once,
and is served by the driver as any layer is. A chain's inputs are x, then each stage's own but for its x; its buffers
are the stages' buffers; its outputs the last y, then what stages give away besides (`octavo.layers.fork`). What a fork
gives away may also be added again later in the same chain: a residual.

A *step* is one stage, or several at once: a fused operation (`Fused`). Forward and backward are cut into steps
independently. A fused forward makes what each of its stages would have made, but for values between them that nobody
keeps; a fused backward takes what each stage has saved and returns what each would have returned. Where both sides are
fused together, the stages' own configs say what is saved instead.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from octavo.layers.contract import LAYERS, Layer, Made, Tensors
from octavo.layers.dry_run import Miscounted
from octavo.quant.proto import TensorProto
from octavo.values import Value, register
from octavo.wgrad.targets import Writes


class Fused(Protocol):
    """What runs several stages at once; one of the two functions may be missing (None)."""

    forward: Callable[[Sequence[Any], Sequence[Any]], list[Made]] | None  # configs, inputs (x but of the first: None)
    backward: Callable[..., list[Tensors]] | None  # configs, saved, buffers, grads of each stage; writes


FUSED: dict[str, Fused] = {}  # by name, filled by who defines them


class Step(NamedTuple):
    """Stages first … last - 1."""

    name: str  # of a fused operation; empty for a single stage
    first: int
    last: int


@register("chain")
class Config(Value):
    stages: tuple[Value, ...] = ()  # the stages' configs
    forward: tuple[tuple[str, int, int], ...] = ()  # fused steps; stages between them are steps of their own
    backward: tuple[tuple[str, int, int], ...] = ()
    routes: tuple[tuple[int, int, int, int], ...] = ()  # (stage, its input, producer, which of what it gives away)
    hidden: tuple[tuple[int, int], ...] = ()  # (stage, which of what it gives away): nobody outside has it
    begin: int = 0  # which operation its first stage is, for messages

    @cached_property
    def layers(self) -> tuple[Any, ...]:
        return tuple(LAYERS[stage.registered_name] for stage in self.stages)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return _steps(self.forward, len(self.stages))

    @cached_property
    def back_steps(self) -> tuple[Step, ...]:
        """In the order in which backward takes them, as far as anything wants a gradient."""
        return tuple(
            step for step in reversed(_steps(self.backward, len(self.stages)))
            if any(self.active[step.first : step.last])
        )  # fmt: skip

    @cached_property
    def active(self) -> tuple[bool, ...]:
        """Which stages have a backward: one whose only gradient goes to a buffer returns none, and has one."""
        return tuple(layer.has_backward(stage) for layer, stage in zip(self.layers, self.stages, strict=True))

    @cached_property
    def wanted(self) -> tuple[tuple[bool, ...], ...]:
        return tuple(layer.wants(stage) for layer, stage in zip(self.layers, self.stages, strict=True))

    @cached_property
    def extras_sizes(self) -> tuple[int, ...]:
        """How many extras each stage makes, and so on."""
        return tuple(layer.extras(stage) for layer, stage in zip(self.layers, self.stages, strict=True))

    @cached_property
    def fresh_sizes(self) -> tuple[int, ...]:
        return tuple(layer.fresh_size(stage) for layer, stage in zip(self.layers, self.stages, strict=True))

    @cached_property
    def saved_sizes(self) -> tuple[int, ...]:
        return tuple(layer.saved_size(stage) for layer, stage in zip(self.layers, self.stages, strict=True))

    @cached_property
    def buffers_sizes(self) -> tuple[int, ...]:
        return tuple(layer.buffers_size(stage) for layer, stage in zip(self.layers, self.stages, strict=True))

    @cached_property
    def fields(self) -> tuple[int, ...]:
        """How many inputs each stage has besides x."""
        return tuple(len(wants) - 1 for wants in self.wanted)

    @cached_property
    def made(self) -> tuple[int, ...]:
        """How many values each stage gives away."""
        return tuple(layer.outputs(stage) - 1 for layer, stage in zip(self.layers, self.stages, strict=True))

    @cached_property
    def shown(self) -> tuple[tuple[int, ...], ...]:
        """Which of them are outputs of the chain."""
        return tuple(tuple(k for k in range(n) if (i, k) not in self.hidden) for i, n in enumerate(self.made))

    @cached_property
    def given(self) -> tuple[int, ...]:
        """How many of them are."""
        return tuple(len(own) for own in self.shown)

    @cached_property
    def input_spans(self) -> list[slice]:
        """Where each stage's own inputs are, and so on for the rest."""
        return _spans(self.fields, 1)

    @cached_property
    def given_spans(self) -> list[slice]:
        return _spans(self.given, 1)

    @cached_property
    def extras_spans(self) -> list[slice]:
        return _spans(self.extras_sizes)

    @cached_property
    def fresh_spans(self) -> list[slice]:
        return _spans(self.fresh_sizes, _kept_count(self))

    @cached_property
    def saved_spans(self) -> list[slice]:
        return _spans(self.saved_sizes)

    @cached_property
    def buffer_spans(self) -> list[slice]:
        return _spans(self.buffers_sizes)

    @cached_property
    def named_inputs(self) -> tuple[Callable[..., Any], ...]:
        """What makes each stage's inputs of x and the rest."""
        return tuple(partial(layer.inputs_of, stage) for layer, stage in zip(self.layers, self.stages, strict=True))

    @cached_property
    def inside(self) -> frozenset[tuple[int, int]]:
        """(stage, input): inputs that come from within."""
        return frozenset((consumer, field) for consumer, field, _, _ in self.routes)

    @cached_property
    def sums(self) -> tuple[tuple[int, int, int, int], ...]:
        """Routes in the order in which their gradients are added: the last consumer's first, as autograd adds those of
        operations that are called one by one."""
        return tuple(sorted(self.routes, reverse=True))

    @cached_property
    def decided_by_layout(self) -> bool:
        return all(
            layer.decided_by_layout(stage, side) for layer, stage in zip(self.layers, self.stages, strict=True)
            for side in ("forward", "backward")
        )  # fmt: skip

    @cached_property
    def loose(self) -> tuple[tuple[int, int], ...]:
        """Values that are given away within the chain alone, and that a stage made for that."""
        return tuple((i, k) for i, k in self.hidden if not self.layers[i].forks)


@lru_cache(maxsize=4096)
def _steps(fused: tuple[tuple[str, int, int], ...], count: int) -> tuple[Step, ...]:
    found: list[Step] = []
    for name, first, last in fused:
        found += [Step("", i, i + 1) for i in range(found[-1].last if found else 0, first)]
        found.append(Step(name, first, last))
    return (*found, *[Step("", i, i + 1) for i in range(found[-1].last if found else 0, count)])


class Fields(tuple[Any, ...]):
    """Inputs or buffers of a chain: x, then each stage's own. As many as the stages need."""

    @classmethod
    def _make(cls, fields: Any) -> Self:
        return cls(fields)


def _spans(sizes: Sequence[int], start: int = 0) -> list[slice]:
    found = []
    for size in sizes:
        found.append(slice(start, start + size))
        start += size
    return found


def stage_inputs(config: Config, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of each stage, without its x."""
    return [make((None, *inputs[span])) for make, span in zip(config.named_inputs, config.input_spans, strict=True)]


class ChainLayer(Layer):
    """Layers one after the other, as one."""

    def has_backward(self, config: Config) -> bool:
        return any(config.active)

    def extras(self, config: Config) -> int:
        return sum(config.extras_sizes)

    def fresh_size(self, config: Config) -> int:
        return _kept_count(config) + sum(config.fresh_sizes)

    def saved_size(self, config: Config) -> int:
        return sum(config.saved_sizes)

    def buffers_size(self, config: Config) -> int:
        return sum(config.buffers_sizes)

    def graph_buffers(self, config: Config, *fields: Any) -> tuple[Any, ...]:
        found: list[Any] = []
        for layer, stage, span in zip(config.layers, config.stages, config.buffer_spans, strict=True):
            found += layer.graph_buffers(stage, *fields[span])
        return tuple(found)

    def decided_by_layout(self, config: Config, side: str) -> bool:
        return config.decided_by_layout

    def fills(self, config: Config) -> bool:
        return any(layer.fills(stage) for layer, stage in zip(config.layers, config.stages, strict=True))

    def flat_places(self, config: Config) -> tuple[int, ...]:
        starts = config.fresh_spans
        return tuple(
            span.start + i
            for layer, stage, span in zip(config.layers, config.stages, starts, strict=True)
            for i in layer.flat_places(stage)
        )

    def forward(self, config: Config, inputs: Sequence[Any]) -> Made:
        return _gathered(config, *_run(config, inputs))

    def forward_and_save(self, config: Config, inputs: Sequence[Any], saving: bool) -> tuple[Made, Tensors]:
        """A value that nothing keeps is let go as soon as the next stage has taken it."""
        own, made = stage_inputs(config, inputs), list[Any]()
        x, kept = inputs[0], {producer for _, _, producer, _ in config.routes}
        away: list[Any] = []
        extras: list[Any] = []
        saved: list[Any] = []
        for step in config.steps:
            first, last = step.first, step.last
            own[first] = own[first]._replace(x=x)
            del x
            made += _stepped(config, step, own, made)
            for i in range(first, last):
                named = own[i] if i == first else own[i]._replace(x=made[i - 1].outputs[0])
                away += [made[i].outputs[1 + k] for k in config.shown[i]]
                extras += made[i].extras
                saved += config.layers[i].save(config.stages[i], named, made[i])
            x = made[-1].outputs[0]
            for i in range(first, last):
                own[i] = None
                if i not in kept:
                    made[i] = None
        return Made((x, *away), tuple(extras), ()), tuple(saved)

    def abstract(self, config: Config, inputs: Sequence[Any]) -> Made:
        return _gathered(config, *abstract_stages(config, inputs))

    def save(self, config: Config, inputs: Sequence[Any], made: Made) -> Tensors:
        own = stage_inputs(config, inputs)
        values = _values(config, inputs[0], made)
        away = _all_away(config, made)
        for consumer, field, producer, k in config.routes:
            value = values[producer] if config.layers[producer].forks else away[producer][k]
            own[consumer] = _with(own[consumer], field, value)
        extras, fresh = config.extras_spans, config.fresh_spans
        found: list[Tensor | None] = []
        for i, (layer, stage) in enumerate(zip(config.layers, config.stages, strict=True)):
            part = Made((values[i + 1], *away[i]), made.extras[extras[i]], made.fresh[fresh[i]])
            found += layer.save(stage, own[i]._replace(x=values[i]), part)
        return tuple(found)

    def wants(self, config: Config) -> tuple[bool, ...]:
        return (
            config.wanted[0][0],
            *[
                w and (i, at) not in config.inside
                for i, stage in enumerate(config.wanted)
                for at, w in enumerate(stage[1:], 1)
            ],
        )

    def passed(self, config: Config) -> dict[int, int]:
        """Those of the values that are added to the run's, and of x, where nothing lies between."""
        # the holder of the gradient that arrives at a stage: an output (-1), an input, or none yet
        holder: int | None = -1
        found: dict[int, int] = {}
        for i in reversed(range(len(config.stages))):
            layer, wanted, before = config.layers[i], config.wanted[i], config.input_spans[i].start - 1
            if not any(wanted):
                return found
            own = layer.passed(config.stages[i])
            # who has the gradient that the stage calls -1, and those of its inputs that are returned
            holders = {j: before + j for j in range(1, len(wanted)) if (i, j) not in config.inside} | {-1: holder}
            for j, other in sorted(own.items()):
                if j == 0 or (i, j) in config.inside:
                    continue
                has = holders.get(other)
                if has is None:
                    holders[other] = before + j
                else:
                    found[before + j] = has
            holder = holders.get(own[0]) if 0 in own else None
        if config.wanted[0][0] and holder is not None:
            found[0] = holder
        return found

    def abstract_gradients(self, config: Config, saved: Any, *grads: Any) -> tuple[TensorProto | None, ...]:
        found: list[tuple[Any, ...]] = [(None,) * (1 + n) for n in config.fields]
        for i, own, dys in _dry_backward(config, saved, grads, found):
            with _named(config.begin + i):
                found[i] = config.layers[i].abstract_gradients(config.stages[i], own, *dys)
        return _returned(config, found)

    def backward(
        self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Writes | None = None
    ) -> Tensors:
        """Stages put off their writes to buffers until all of them are through, or until those of an outer chain are,
        of which this is a stage, and which brings `writes`."""
        outer, writes = writes, Writes() if writes is None else writes
        found: list[tuple[Any, ...]] = [(None,) * (1 + n) for n in config.fields]
        spans, own, given = config.saved_spans, _stage_buffers(config, buffers), config.given_spans
        g = grads[0]
        for name, first, last in config.back_steps:
            parts = [saved[span] for span in spans[first:last]]
            dys = [(None, *_away(config, grads[span], i, found)) for i, span in enumerate(given[first:last], first)]
            dys[-1] = (g, *dys[-1][1:])
            if not any([t is not None for own_dys in dys for t in own_dys]):
                continue  # nothing that depends on these stages has a gradient, and neither have they
            if name:
                fused = FUSED[name].backward
                assert fused is not None
                found[first:last] = fused(config.stages[first:last], parts, own[first:last], dys, writes)
            else:
                with _named(config.begin + first):
                    layer, stage = config.layers[first], config.stages[first]
                    found[first] = layer.backward(stage, parts[0], own[first], dys[0], writes)
            g = found[first][0]
            if first:
                found[first] = (None, *found[first][1:])  # the stages before have it, and let it go
        returned = _returned(config, found)
        if outer is None:
            writes.do()
        return returned

    def flops(self, config: Config, inputs: Sequence[Any]) -> int:
        own, x, total = stage_inputs(config, inputs), inputs[0], 0
        for i, (layer, stage) in enumerate(zip(config.layers, config.stages, strict=True)):
            with_x = own[i]._replace(x=x)
            total += layer.flops(stage, with_x)
            x = layer.abstract(stage, with_x).outputs[0]
        return total

    def gradient_flops(self, config: Config, saved: Any, *grads: Any) -> int:
        found: list[tuple[Any, ...]] = [(None,) * (1 + n) for n in config.fields]
        total = 0
        for i, own, dys in _dry_backward(config, saved, grads, found):
            layer, stage = config.layers[i], config.stages[i]
            total += layer.gradient_flops(stage, own, *dys)
            found[i] = layer.abstract_gradients(stage, own, *dys)
        return total


layer = ChainLayer(Config, Fields, buffers=Fields)


# -- forward ---------------------------------------------------------------------------------------------------------


def _stepped(config: Config, step: Step, own: list[Any], made: list[Any]) -> list[Made]:
    """What the stages of one step make."""
    name, first, last = step
    _connect(config, own, made, first, last)
    if name:
        fused = FUSED[name].forward
        assert fused is not None
        return fused(config.stages[first:last], own[first:last])
    with _named(config.begin + first):
        return [config.layers[first].forward(config.stages[first], own[first])]


def _run(config: Config, inputs: Sequence[Any]) -> tuple[list[Any], list[Made]]:
    """Inputs of each stage, and what it made."""
    own, made = stage_inputs(config, inputs), list[Made]()
    x = inputs[0]
    for step in config.steps:
        own[step.first] = own[step.first]._replace(x=x)
        made += _stepped(config, step, own, made)
        x = made[-1].outputs[0]
    return own, made


def abstract_stages(config: Config, inputs: Sequence[Any]) -> tuple[list[Any], list[Made]]:
    """Inputs of each stage, and what it would make."""
    own, made = stage_inputs(config, inputs), list[Made]()
    x = inputs[0]
    for i, (layer, stage) in enumerate(zip(config.layers, config.stages, strict=True)):
        own[i] = own[i]._replace(x=x)
        _connect(config, own, made, i, i + 1)
        with _named(config.begin + i):
            made.append(layer.abstract(stage, own[i]))
        x = made[-1].outputs[0]
    return own, made


class _named:
    """Say which stage it was that returned a wrong number of things."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if kind is Miscounted:
            raise RuntimeError(f"Operation {self.stage}: {error}") from error


def _connect(config: Config, own: list[Any], made: list[Made], first: int, last: int) -> None:
    """Give stages what others have given away."""
    for consumer, field, producer, k in config.routes:
        if first <= consumer < last and producer < first:
            own[consumer] = _with(own[consumer], field, away_from(config, made[producer].outputs, producer, k))


def away_from(config: Config, outputs: Sequence[Any], stage: int, k: int) -> Any:
    """What a stage gave away. A fork's is its x."""
    return outputs[0] if config.layers[stage].forks else outputs[1 + k]


def _with(inputs: Any, field: int, value: Any) -> Any:
    return inputs._make((*inputs[:field], value, *inputs[field + 1 :]))


def _gathered(config: Config, own: list[Any], made: list[Made]) -> Made:
    """All that the stages made, as one: y and what stages give away; extras; values between stages that one of them
    keeps, then what is fresh."""
    for i in range(1, len(own)):
        own[i] = own[i]._replace(x=made[i - 1].outputs[0])
    away = [[m.outputs[1 + k] for k in own_shown] for m, own_shown in zip(made, config.shown, strict=True)]
    outputs = (made[-1].outputs[0], *[t for group in away for t in group])
    saved = [
        t for layer, stage, i, m in zip(config.layers, config.stages, own, made, strict=True)
        for t in layer.save(stage, i, m) if t is not None
    ]  # fmt: skip
    between = [None if config.layers[i].forks else made[i].outputs[0] for i in range(len(made) - 1)]
    between += [made[i].outputs[1 + k] for i, k in config.loose]
    kept = [
        t if t is not None and any(t is s for s in saved) and not any(t is o for o in outputs) else None
        for t in between
    ]
    return Made(
        outputs,
        tuple([t for m in made for t in m.extras]),
        (*kept, *[t for m in made for t in m.fresh]),
    )


def _kept_count(config: Config) -> int:
    return len(config.stages) - 1 + len(config.loose)


def _all_away(config: Config, made: Made) -> list[list[Any]]:
    """What each stage gave away, to whomever."""
    loose = dict(zip(config.loose, made.fresh[len(config.stages) - 1 :], strict=False))
    found = []
    for i, span in enumerate(config.given_spans):
        shown = dict(zip(config.shown[i], made.outputs[span], strict=True))
        found.append([shown[k] if k in shown else loose.get((i, k)) for k in range(config.made[i])])
    return found


def _values(config: Config, x: Any, made: Made) -> list[Any]:
    """x of each stage, and then y: None where it was not kept."""
    given = config.given_spans
    found = [x]
    for i in range(len(config.stages) - 1):
        if config.layers[i].forks:
            found.append(found[-1])
        else:
            kept, after = made.fresh[i], made.outputs[given[i + 1]]
            away = config.layers[i + 1].forks and len(after) > 0  # then it is among the outputs
            found.append(after[0] if kept is None and away else kept)
    return [*found, made.outputs[0]]


# -- backward --------------------------------------------------------------------------------------------------------


def _dry_backward(config: Config, saved: Any, grads: Any, found: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Each stage that backward comes to, what it saved, and what its gradients are like. What the stage's own gradients
    are like is put into `found` before the next is asked for."""
    spans, given, g = config.saved_spans, config.given_spans, grads[0]
    for i in reversed(range(len(config.stages))):
        if not config.active[i]:
            return
        away = [next((t for t in parts if t is not None), None) for parts in _parts(config, grads[given[i]], i, found)]
        if g is not None or any(t is not None for t in away):
            yield i, saved[spans[i]], (g, *away)
        g = found[i][0]


def _returned(config: Config, found: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """One gradient for each input of the chain."""
    for consumer, field in config.inside:
        own = found[consumer]
        found[consumer] = (*own[:field], None, *own[field + 1 :])
    return (found[0][0], *[t for stage in found for t in stage[1:]])


def _away(config: Config, grads: Sequence[Any], stage: int, found: list[tuple[Any, ...]]) -> list[Any]:
    """Gradients of what a stage gave away."""
    sums = []
    for parts in _parts(config, grads, stage, found):
        here = [g for g in parts if g is not None]
        sums.append(None if not here else here[0] if len(here) == 1 else sum(here[1:], here[0]))
    return sums


def _parts(config: Config, grads: Sequence[Any], stage: int, found: list[tuple[Any, ...]]) -> list[list[Any]]:
    """Gradients of each value that a stage gave away: the one from outside, then those from inside."""
    shown = dict(zip(config.shown[stage], grads, strict=True))
    return [
        [shown.get(k), *[found[c][field] for c, field, p, which in config.sums if (p, which) == (stage, k)]]
        for k in range(config.made[stage])
    ]


# -- arithmetic, counted -----------------------------------------------------------------------------------------------


def _stage_buffers(config: Config, buffers: Sequence[Any]) -> list[Any]:
    spans = config.buffer_spans
    return [layer.Buffers._make(buffers[span]) for layer, span in zip(config.layers, spans, strict=True)]
