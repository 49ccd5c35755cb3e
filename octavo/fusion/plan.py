"""Plans of runs, as values: a plan says which fused steps compute the stages of a run.

A plan follows from the configs of the stages, which hold the recipe, the dtypes and the wanted gradients, and from the
rules in force. Plans are cached by these, and a change of one of them makes a new plan.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from octavo._torch.tracing import while_tracing
from octavo.fusion import rule as pattern
from octavo.fusion.custom.custom_plan import as_it_is, sketch
from octavo.fusion.rule import NotFired
from octavo.quant.proto import TensorProto
from octavo.runtime import chain
from octavo.runtime.contract import LAYERS
from octavo.runtime.dry_run import abstract, without_data
from octavo.values import parse

log = logging.getLogger("octavo.fusion")


class Planned(NamedTuple):
    """The plan of a run."""

    key: str  # of the chain's config
    extras: tuple[tuple[int, int], ...]  # the span of each stage's extras in the result of a call
    fired: tuple[str, ...]
    refused: tuple[NotFired, ...]
    spans: tuple[tuple[int, int], ...] = ()  # the operations first … last - 1 of each rule that fired


class Run(NamedTuple):
    """Operations that run together, as `Sequential.explain` reports them.

    Attributes:
        ops: the names of the operations.
        forward: the names of the steps of forward, in order; a fused step stands for several operations.
        backward: the names of the steps of backward, in order.
    """

    ops: tuple[str, ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]


Routes = tuple[tuple[int, int, int, int], ...]  # like a chain's routes, but numbered by the operations of the run
Hidden = tuple[tuple[int, int], ...]
_plans: dict[tuple[Any, ...], Planned] = {}


def planned(
    keys: tuple[str, ...], routes: Routes, hidden: Hidden, rules: int, first: int, fields: Sequence[Any]
) -> Planned:
    """Return the plan of stages with these configs. Users' fused operations are dry-run on tensors without data, like
    `fields`, the inputs of the first call; nothing else in the plan depends on `fields`."""
    at = (keys, routes, hidden, rules, first)
    if at not in _plans:
        _plans[at] = _plan(keys, routes, hidden, pattern.rules_of(rules), first, abstract(tuple(fields)))
    return _plans[at]


def _plan(
    keys: tuple[str, ...], routes: Routes, hidden: Hidden, rules: pattern.Groups, begin: int, fields: Sequence[Any]
) -> Planned:
    configs: list[Any] = [parse(key) for key in keys]

    def tried(rule: pattern.Rule, first: int, last: int) -> Any:
        inside = tuple((c - first, f, p - first, k) for c, f, p, k in routes if first <= min(c, p) and max(c, p) < last)
        own = {(p, k) for c, f, p, k in routes if not (first <= c < last)}
        away = tuple((i - first, k) for i, k in hidden if first <= i < last and (i, k) not in own)
        layer = LAYERS[rule.op.op_name]
        config = layer.Config(side=rule.side, stages=tuple(configs[first:last]), routes=inside, hidden=away)
        if any(LAYERS[stage.registered_name].keeps_state(stage) for stage in config.stages):
            return (
                "its Linear has a weight that is codes, writes main_grad or remembers amaxes: only Octavo's own rules "
                "take it"
            )
        return layer.probe(config, _inputs_at(configs, routes, fields, first, last)).config

    matches, refused = pattern.match(configs, rules, tried)
    config, place = _placed(configs, matches, routes, hidden, begin)
    fired = tuple(match.rule.name for match in matches)
    spans = tuple((match.first, match.last) for match in matches)
    return Planned(config.key, _extras(config, place), fired, tuple(refused), spans)


def tell(names: Sequence[str], plan: Planned) -> None:
    log.info("run of %s: %s", ", ".join(names), ", ".join(plan.fired) or "no fusion")
    for r in plan.refused:
        log.info("%s on %s was refused: %s (%s)", r.rule, ", ".join(r.ops), r.sentence, r.condition)


def _inputs_at(configs: list[Any], routes: Routes, fields: Sequence[Any], first: int, last: int) -> tuple[Any, ...]:
    """Return the inputs of stages first … last - 1, as inputs of one layer, without data."""
    whole = chain.Config(tuple(configs[:last]), routes=tuple(r for r in routes if r[0] < last))
    count = sum(whole.fields)
    if first == 0:
        return tuple(fields[: 1 + count])
    before = chain.Config(tuple(configs[:first]), routes=tuple(r for r in routes if r[0] < first))
    skipped = sum(before.fields)
    with without_data():
        _, made = chain.abstract_stages(before, fields[: 1 + skipped])
    own = [made[-1].outputs[0], *fields[1 + skipped : 1 + count]]
    for consumer, field, producer, k in whole.routes:
        if producer < first <= consumer:
            at = whole.input_spans[consumer].start - skipped + field - 1
            own[at] = chain.side_output(before, made[producer].outputs, producer, k)
    return tuple(own)


def _extras(config: chain.Config, place: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the span of each operation's extras. If one layer replaces several, the first operation has them."""
    at, spans = 1 + sum(config.shown_counts), [config.auxiliary_spans[stage] for stage in place]
    leads = [i == 0 or place[i - 1] != stage for i, stage in enumerate(place)]
    return tuple((at + s.start, at + (s.stop if first else s.start)) for s, first in zip(spans, leads, strict=True))


def _placed(
    configs: list[Any], matches: Sequence[pattern.Match], routes: Routes, hidden: Hidden, begin: int
) -> tuple[chain.Config, list[int]]:
    """Return the chain's config, with its fused steps and with the layers that replace matched operations; and the
    index of each operation's stage."""
    theirs = {m.first: m for m in matches if m.config is not None}
    stages: list[Any] = []
    place: list[int] = []
    start: list[int] = []  # per operation: the index of its first input among the stage's, less one
    shift: list[dict[int, int]] = []  # per operation: its extra output -> the stage's extra output
    while len(place) < len(configs):
        match = theirs.get(len(place))
        unfused = chain.Config((configs[len(place)],)) if match is None else match.config.unfused
        given = 0
        for j, shown in enumerate(unfused.shown):
            place.append(len(stages))
            start.append(sum(unfused.fields[:j]))
            shift.append({k: given + n for n, k in enumerate(shown)})
            given += len(shown)
        stages.append(unfused.stages[0] if match is None else match.config)
    place.append(len(stages))
    moved = [
        tuple((name, place[a], place[b]) for name, a, b in pattern.steps_on(side, matches))
        for side in ("forward", "backward")
    ]
    outer = [route for route in routes if place[route[0]] != place[route[2]]]
    config = chain.Config(
        tuple(stages), moved[0], moved[1],
        tuple((place[c], start[c] + f, place[p], shift[p][k]) for c, f, p, k in outer),
        tuple((place[i], shift[i][k]) for i, k in hidden if k in shift[i]), begin,
    )  # fmt: skip
    return config, place[:-1]


@while_tracing
def planned_now(
    keys: tuple[str, ...], routes: Routes, hidden: Hidden, rules: int, first: int, fields: list[Any]
) -> tuple[Any, ...]:
    return tuple(planned(keys, routes, hidden, rules, first, [_of_sketch(field) for field in fields]))


def known_plan(keys: tuple[str, ...], routes: Routes, hidden: Hidden, rules: int, first: int) -> Planned:
    """Return a plan that `planned` has made."""
    return _plans[keys, routes, hidden, rules, first]


@while_tracing
def has_rules(rules: int) -> bool:
    """Whether there are any of these rules."""
    return any(pattern.rules_of(rules))


@while_tracing
def takes_foreign(rules: int) -> bool:
    """Whether any of these rules needs a dry run, because its operation is no step."""
    return any(not rule.op.op_is_step for group in pattern.rules_of(rules) for rule in group)


def sketched(field: Any, width: int) -> Any:
    if isinstance(field, tuple):
        return [as_it_is(t) for t in field]
    return as_it_is(field) if isinstance(field, nn.Parameter) else sketch(field, width)


def _of_sketch(said: Any) -> Any:
    if isinstance(said, list):
        return tuple(TensorProto(*t) for t in said)
    return None if said is None else TensorProto(*said)


def steps_of(config: chain.Config) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the names of the stages, of the forward steps and of the backward steps."""

    titles = tuple(layer.title_of(stage) for layer, stage in config.pairs)
    steps = [
        tuple(LAYERS[step.name].title if step.name else titles[step.first] for step in own)
        for own in (config.steps, config.back_steps)
    ]
    return titles, steps[0], steps[1]


def unsupported_reasons_of(key: str) -> tuple[NotFired, ...]:
    """Return the refusals of a cached plan by its key; empty if there is none."""
    return next((plan.refused for plan in _plans.values() if plan.key == key), ())
