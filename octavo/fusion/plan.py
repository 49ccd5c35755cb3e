"""Plans of runs, as values: a plan says which fused steps compute the stages of a run.

A plan follows from the configs of the stages, which hold the recipe, the dtypes and the wanted gradients, and from the
rules in force. Plans are cached by these, and a change of one of them makes a new plan.

One loop matches all rules: longer patterns before shorter ones, then in order; a stage takes part in at most one fused
step of forward and one of backward. If a pattern is present and its rule does not fire, the loop records the first
condition that does not hold, for `explain` and for `require`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from octavo._torch.tracing import while_tracing
from octavo.fusion.custom.custom_plan import as_it_is, sketch
from octavo.fusion.custom.user_layer import settings_of
from octavo.fusion.rule import FREE, Condition, Groups, NotFired, Rule, rules_of
from octavo.quant.proto import TensorProto
from octavo.runtime import chain
from octavo.runtime.contract import LAYERS
from octavo.runtime.dry_run import abstract, without_data
from octavo.values import parse

log = logging.getLogger("octavo.fusion")


class Planned(NamedTuple):
    """The plan of a run."""

    key: str  # of the chain's config
    auxiliary: tuple[tuple[int, int], ...]  # the span of each stage's auxiliary outputs in the result of a call
    fired: tuple[str, ...]
    refused: tuple[NotFired, ...]
    spans: tuple[tuple[int, int], ...] = ()  # the operations first … last - 1 of each rule that fired


class Match(NamedTuple):
    rule: Rule
    first: int
    last: int
    config: Any = None  # of the layer that replaces these stages, unless the operation is a step


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
        _plans[at] = _plan(keys, routes, hidden, rules_of(rules), first, abstract(tuple(fields)))
    return _plans[at]


def _plan(
    keys: tuple[str, ...], routes: Routes, hidden: Hidden, rules: Groups, begin: int, fields: Sequence[Any]
) -> Planned:
    configs: list[Any] = [parse(key) for key in keys]

    def tried(rule: Rule, first: int, last: int) -> Any:
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

    matches, refused = match(configs, rules, tried)
    config, place = _placed(configs, matches, routes, hidden, begin)
    fired = tuple(m.rule.name for m in matches)
    spans = tuple((m.first, m.last) for m in matches)
    return Planned(config.key, _auxiliary(config, place), fired, tuple(refused), spans)


# -- matching ----------------------------------------------------------------------------------------------------------


def match(
    configs: list[Any], rules: Groups, tried: Callable[[Rule, int, int], Any]
) -> tuple[list[Match], list[NotFired]]:
    """Return the rules that fire, with their stages, and those that do not. A rule that fires and has `changes`
    replaces its entries of `configs`. `tried` returns the config of a fused operation that is no step, or a string that
    says why the operation cannot run."""
    taken: dict[str, list[str]] = {"forward": [""] * len(configs), "backward": [""] * len(configs)}  # each stage's rule
    found: list[Match] = []
    refused: list[NotFired] = []
    unchanged = list(configs)
    for rule in _in_order(rules):
        for first in range(len(configs) - len(rule.pattern) + 1):
            last = first + len(rule.pattern)
            if not rule._matches(configs[first:last]):
                continue
            spans = _spans(rule, first, last)
            names = [name for side, (a, b) in spans.items() for name in taken[side][a:b]]
            others = [name for name in names if name]
            # a rule that comes too late is not refused for what the earlier one made of the configs
            asked = (unchanged if others else configs)[first:last]
            settings = [settings_of(config) for config in asked]
            failing = next((c for c in rule.conditions if not _holds(c, settings, rule)), None)
            if failing is None and rule.name in others:
                continue  # the rule has fired here already
            if failing is None and others:
                failing = Condition(FREE, bool, f"{others[0]} has taken one of these operations")
            config = None if rule.op.op_is_step or failing is not None else tried(rule, first, last)
            if isinstance(config, str):
                failing = Condition("it can be run", rule._matches, config)
            if failing is not None:
                titles = tuple(kind.__name__ for kind in rule.pattern)
                by = names[0] if failing.name == FREE and len(set(names)) == 1 else ""
                refused.append(NotFired(rule.name, titles, failing.name, failing.sentence, by))
                continue
            for side, (a, b) in spans.items():
                taken[side][a:b] = [rule.name] * (b - a)
            if rule.changes is not None:
                configs[first:last] = rule.changes(configs[first:last])
            found.append(Match(rule, first, last, config))
    return found, refused


def _holds(condition: Condition, settings: Sequence[Any], rule: Rule) -> bool:
    try:
        return condition.holds(settings)
    except Exception as error:
        error.add_note(f"Raised by the condition {condition.name!r} of the rule {rule.name!r}, asked of {settings}.")
        raise


def _in_order(rules: Groups) -> Iterator[Rule]:
    """Yield a Sequential's own rules, then global ones; rules for both sides first; longer patterns first."""
    for group in rules:
        for side in ("both", "forward", "backward"):
            # sorted() keeps the order of rules of one length
            yield from sorted((r for r in group if r.side == side), key=lambda r: -len(r.pattern))


def _spans(rule: Rule, first: int, last: int) -> dict[str, tuple[int, int]]:
    """Return the stages that a match takes on each side. A fused operation that is no step takes both sides."""
    if not rule.op.op_is_step or rule.side == "both":
        return {"forward": (first + rule.forward_from, last), "backward": (first, last)}
    return {rule.side: (first, last)}


def steps_on(side: str, matches: Sequence[Match]) -> tuple[tuple[str, int, int], ...]:
    """Return (name, first, last) of the fused steps of one side, in order."""
    steps = [
        (m.rule.op.op_name, *_spans(m.rule, m.first, m.last)[side])
        for m in matches if m.rule.op.op_is_step and m.rule.side in (side, "both")
    ]  # fmt: skip
    return tuple(sorted(steps, key=lambda step: step[1]))


# -- the chain ---------------------------------------------------------------------------------------------------------


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


def _auxiliary(config: chain.Config, place: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the span of each operation's auxiliary outputs. If one layer replaces several, the first operation has
    them."""
    at, spans = 1 + sum(config.chain_output_counts), [config.auxiliary_spans[stage] for stage in place]
    leads = [i == 0 or place[i - 1] != stage for i, stage in enumerate(place)]
    return tuple((at + s.start, at + (s.stop if first else s.start)) for s, first in zip(spans, leads, strict=True))


def _placed(
    configs: list[Any], matches: Sequence[Match], routes: Routes, hidden: Hidden, begin: int
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
        for j, places in enumerate(unfused.chain_outputs):
            place.append(len(stages))
            start.append(sum(unfused.fields[:j]))
            shift.append({k: given + n for n, k in enumerate(places)})
            given += len(places)
        stages.append(unfused.stages[0] if match is None else match.config)
    place.append(len(stages))
    moved = [
        tuple((name, place[a], place[b]) for name, a, b in steps_on(side, matches)) for side in ("forward", "backward")
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
    """Return whether there are any of these rules."""
    return any(rules_of(rules))


@while_tracing
def takes_foreign(rules: int) -> bool:
    """Return whether any of these rules needs a dry run, because its operation is no step."""
    return any(not rule.op.op_is_step for group in rules_of(rules) for rule in group)


def sketched(field: Any, width: int) -> Any:
    if isinstance(field, tuple):
        return [as_it_is(t) for t in field]
    return as_it_is(field) if isinstance(field, nn.Parameter) else sketch(field, width)


def _of_sketch(said: Any) -> Any:
    if isinstance(said, list):
        return tuple(TensorProto(*t[:3]) for t in said)
    return said and TensorProto(*said[:3])


def steps_of(config: chain.Config) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the names of the stages, of the forward steps and of the backward steps."""

    titles = tuple(layer.title_of(stage) for layer, stage in config.pairs)
    steps = [
        tuple(LAYERS[step.name].title if step.name else titles[step.first] for step in own)
        for own in (config.steps, config.back_steps)
    ]
    return titles, steps[0], steps[1]


def unsupported_reasons_of(key: str) -> tuple[NotFired, ...]:
    """Return the rules of a cached plan that did not fire, by the plan's key; empty if there is no such plan."""
    return next((plan.refused for plan in _plans.values() if plan.key == key), ())
