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
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from octavo.layers import activation, add, custom, fork, linear, norm
from octavo.layers.contract import Counts, Made, reader
from octavo.layers.dry_run import Miscounted
from octavo.layers.plain import returned_elsewhere as returned_elsewhere
from octavo.layers.targets import Writes
from octavo.quant.proto import TensorProto
from octavo.values import Value, register

STAGES: dict[str, Any] = {
    "activation": activation, "add": add, "custom": custom, "fork": fork, "linear": linear, "norm": norm,
}  # fmt: skip


class Fused(Protocol):
    """What runs several stages at once; one of the two functions may be missing (None)."""

    forward: Callable[[Sequence[Any], Sequence[Any]], list[Made]] | None  # configs, inputs (x but of the first: None)
    backward: Callable[..., list[tuple[Tensor | None, ...]]] | None  # configs, saved, buffers, grads of each stage


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
        return tuple(STAGES[stage.registered_name] for stage in self.stages)

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
        return tuple(
            any(wants) or getattr(stage, "grads", "") != "" or getattr(stage, "has_backward", False)
            for stage, wants in zip(self.stages, self.wanted, strict=True)
        )

    @cached_property
    def wanted(self) -> tuple[tuple[bool, ...], ...]:
        return tuple(layer.wants(stage) for layer, stage in zip(self.layers, self.stages, strict=True))

    @cached_property
    def sizes(self) -> tuple[Counts, ...]:
        return tuple(layer.counts(stage) for layer, stage in zip(self.layers, self.stages, strict=True))

    @cached_property
    def fields(self) -> tuple[int, ...]:
        """How many inputs each stage has besides x."""
        return tuple(len(wants) - 1 for wants in self.wanted)

    @cached_property
    def made(self) -> tuple[int, ...]:
        """How many values each stage gives away."""
        return tuple(
            1 if layer is fork else layer.outputs(stage) - 1 if hasattr(layer, "outputs") else 0
            for layer, stage in zip(self.layers, self.stages, strict=True)
        )

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
        return _spans([counts.extras for counts in self.sizes])

    @cached_property
    def fresh_spans(self) -> list[slice]:
        return _spans([counts.fresh for counts in self.sizes], _kept_count(self))

    @cached_property
    def saved_spans(self) -> list[slice]:
        return _spans([counts.saved for counts in self.sizes])

    @cached_property
    def buffer_spans(self) -> list[slice]:
        return _spans([counts.buffers for counts in self.sizes])

    @cached_property
    def named_inputs(self) -> tuple[Callable[..., Any], ...]:
        """What makes each stage's inputs of x and the rest."""
        return tuple(
            partial(layer.inputs_of, stage) if hasattr(layer, "inputs_of") else layer.Inputs._make
            for layer, stage in zip(self.layers, self.stages, strict=True)
        )

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
    def replays(self) -> bool:
        return all(
            layer.replays(stage, side) for layer, stage in zip(self.layers, self.stages, strict=True)
            for side in ("forward", "backward")
        )  # fmt: skip

    @cached_property
    def loose(self) -> tuple[tuple[int, int], ...]:
        """Values that are given away within the chain alone, and that a stage made for that."""
        return tuple((i, k) for i, k in self.hidden if self.layers[i] is not fork)


@lru_cache(maxsize=4096)
def _steps(fused: tuple[tuple[str, int, int], ...], count: int) -> tuple[Step, ...]:
    found: list[Step] = []
    for name, first, last in fused:
        found += [Step("", i, i + 1) for i in range(found[-1].last if found else 0, first)]
        found.append(Step(name, first, last))
    return (*found, *[Step("", i, i + 1) for i in range(found[-1].last if found else 0, count)])


config = reader(Config)


class Inputs(tuple[Any, ...]):
    """x, then each stage's own. As long as the stages need it to be."""

    @classmethod
    def _make(cls, fields: Any) -> "Inputs":
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


def graph_buffers(config: Config, *fields: Any) -> tuple[Any, ...]:
    """The stages' buffers, one after the other."""
    found: list[Any] = []
    for layer, stage, span in zip(config.layers, config.stages, config.buffer_spans, strict=True):
        if span.stop > span.start:
            found += layer.graph_buffers(stage, *fields[span])[: span.stop - span.start]
    return tuple(found)


def replays(config: Config, side: str) -> bool:
    return config.replays


def fills(config: Config) -> bool:
    return any(layer.fills(stage) for layer, stage in zip(config.layers, config.stages, strict=True))


def flat_places(config: Config) -> tuple[int, ...]:
    starts = config.fresh_spans
    return tuple(
        span.start + i
        for layer, stage, span in zip(config.layers, config.stages, starts, strict=True)
        for i in layer.flat_places(stage)
    )


# -- forward ---------------------------------------------------------------------------------------------------------


def forward(config: Config, inputs: Sequence[Any]) -> Made:
    return _gathered(config, *_run(config, inputs))


def forward_and_save(config: Config, inputs: Sequence[Any]) -> tuple[Made, tuple[Tensor | None, ...]]:
    """Both at once, where nothing has to leave a node in between: outputs and extras, and what backward needs. A value
    that nobody keeps is let go as soon as the next stage has taken it."""
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


def protos(config: Config, inputs: Sequence[Any]) -> Made:
    return _gathered(config, *stage_protos(config, inputs))


def stage_protos(config: Config, inputs: Sequence[Any]) -> tuple[list[Any], list[Made]]:
    """Inputs of each stage, and what it would make."""
    own, made = stage_inputs(config, inputs), list[Made]()
    x = inputs[0]
    for i, (layer, stage) in enumerate(zip(config.layers, config.stages, strict=True)):
        own[i] = own[i]._replace(x=x)
        _connect(config, own, made, i, i + 1)
        with _named(config.begin + i):
            made.append(layer.protos(stage, own[i]))
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
    return outputs[0] if config.layers[stage] is fork else outputs[1 + k]


def _with(inputs: Any, field: int, value: Any) -> Any:
    if hasattr(inputs, "_fields"):
        return inputs._replace(**{inputs._fields[field]: value})
    return type(inputs)((*inputs[:field], value, *inputs[field + 1 :]))


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
    between = [None if config.layers[i] is fork else made[i].outputs[0] for i in range(len(made) - 1)]
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


def save(config: Config, inputs: Sequence[Any], made: Made) -> tuple[Tensor | None, ...]:
    own = stage_inputs(config, inputs)
    values = _values(config, inputs[0], made)
    away = _all_away(config, made)
    for consumer, field, producer, k in config.routes:
        value = values[producer] if config.layers[producer] is fork else away[producer][k]
        own[consumer] = _with(own[consumer], field, value)
    extras, fresh = config.extras_spans, config.fresh_spans
    found: list[Tensor | None] = []
    for i, (layer, stage) in enumerate(zip(config.layers, config.stages, strict=True)):
        part = Made((values[i + 1], *away[i]), made.extras[extras[i]], made.fresh[fresh[i]])
        found += layer.save(stage, own[i]._replace(x=values[i]), part)
    return tuple(found)


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
        if config.layers[i] is fork:
            found.append(found[-1])
        else:
            kept, after = made.fresh[i], made.outputs[given[i + 1]]
            away = config.layers[i + 1] is fork and len(after) > 0  # then it is among the outputs
            found.append(after[0] if kept is None and away else kept)
    return [*found, made.outputs[0]]


# -- backward --------------------------------------------------------------------------------------------------------


def wants(config: Config) -> tuple[bool, ...]:
    return (
        config.wanted[0][0],
        *[
            w and (i, at) not in config.inside
            for i, stage in enumerate(config.wanted)
            for at, w in enumerate(stage[1:], 1)
        ],
    )


def passed(config: Config) -> dict[int, int]:
    """Gradients that are another's: of the values that are added to the run's, and of x, where nothing lies between."""
    holder: int | None = -1  # what has the gradient that arrives at a stage: an output's (-1), an input's, nobody's yet
    found: dict[int, int] = {}
    for i in reversed(range(len(config.stages))):
        layer, wanted, before = config.layers[i], config.wanted[i], config.input_spans[i].start - 1
        if not any(wanted):
            return found
        own = layer.passed(config.stages[i]) if hasattr(layer, "passed") else {}
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


def gradient_protos(config: Config, saved: tuple[Tensor | None, ...], *grads: Any) -> tuple[TensorProto | None, ...]:
    found: list[tuple[Any, ...]] = [(None,) * (1 + n) for n in config.fields]
    for i, own, dys in _dry_backward(config, saved, grads, found):
        with _named(config.begin + i):
            found[i] = config.layers[i].gradient_protos(config.stages[i], own, *dys)
    return _returned(config, found)


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


def backward(
    config: Config, saved: tuple[Tensor | None, ...], buffers: Sequence[Any], grads: tuple[Tensor | None, ...],
    outer: Writes | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """One gradient for each input. What stages write besides is written when all of them are through, or when those of
    the `outer` chain are, of which this is a stage."""
    writes = Writes() if outer is None else outer
    found: list[tuple[Any, ...]] = [(None,) * (1 + n) for n in config.fields]
    spans, own, given = config.saved_spans, _stage_buffers(config, buffers, writes), config.given_spans
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
            found[first:last] = fused(config.stages[first:last], parts, own[first:last], dys)
        else:
            with _named(config.begin + first):
                found[first] = config.layers[first].backward(config.stages[first], parts[0], own[first], dys[0])
        g = found[first][0]
        if first:
            found[first] = (None, *found[first][1:])  # the stages before have it, and let it go
    returned = _returned(config, found)
    if outer is None:
        writes.do()
    return returned


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


class Inner(NamedTuple):
    """Buffers of a stage that is a chain itself."""

    buffers: tuple[Any, ...]
    writes: Writes


def _stage_buffers(config: Config, buffers: Sequence[Any], writes: Writes) -> list[Any]:
    return [
        linear.Buffers._make((*buffers[span], writes)) if layer is linear else Inner(tuple(buffers[span]), writes)
        for layer, span in zip(config.layers, config.buffer_spans, strict=True)
    ]


def counts(config: Config) -> Counts:
    own = config.sizes
    return Counts(
        sum(c.extras for c in own),
        _kept_count(config) + sum(c.fresh for c in own),
        sum(c.saved for c in own),
        sum(c.buffers for c in own),
    )  # fmt: skip


# -- arithmetic, counted -----------------------------------------------------------------------------------------------


def flops(config: Config, inputs: Sequence[Any]) -> int:
    own, x, total = stage_inputs(config, inputs), inputs[0], 0
    for i, (layer, stage) in enumerate(zip(config.layers, config.stages, strict=True)):
        with_x = own[i]._replace(x=x)
        total += layer.flops(stage, with_x)
        x = layer.protos(stage, with_x).outputs[0]
    return total


def gradient_flops(config: Config, saved: tuple[Tensor | None, ...], *grads: Any) -> int:
    found: list[tuple[Any, ...]] = [(None,) * (1 + n) for n in config.fields]
    total = 0
    for i, own, dys in _dry_backward(config, saved, grads, found):
        layer, stage = config.layers[i], config.stages[i]
        total += layer.gradient_flops(stage, own, *dys)
        found[i] = layer.gradient_protos(stage, own, *dys)
    return total
