"""`OperationFuser`: operations in a row, cut into runs, each of which is one chain (`octavo.layers.chain`), one node
forward and one backward.

What a run does follows from its stages' configs, which hold the recipe, dtypes and which gradients are wanted, and from
the rules in force: its plan is remembered by those, and made again when one of them changes. Parameters are read at
every call.
"""

import logging
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig
from octavo.fuser import pattern
from octavo.fuser.legacy import find_fused, run_fused, run_legacy
from octavo.fuser.operation import BasicOperation, Edge, FusibleOperation, Stage, as_it_is, sketch
from octavo.fuser.pattern import Refused
from octavo.layers import chain, composite, custom, linear
from octavo.lower import is_watched, run, run_in_graph, saved_elsewhere, while_tracing
from octavo.quant import QTensor
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Join
from octavo.values import parse

log = logging.getLogger("octavo.fuser")


class Planned(NamedTuple):
    """A run as it is done."""

    key: str  # of the chain's config
    extras: tuple[tuple[int, int], ...]  # where each stage's extras are, among all that a call returns
    fired: tuple[str, ...]
    refused: tuple[Refused, ...]


class Run(NamedTuple):
    """A run as it is told."""

    ops: tuple[str, ...]
    forward: tuple[str, ...]  # steps
    backward: tuple[str, ...]


Routes = tuple[tuple[int, int, int, int], ...]  # as of a chain, by operations of a run
Hidden = tuple[tuple[int, int], ...]
_plans: dict[tuple[Any, ...], Planned] = {}


def planned(
    keys: tuple[str, ...], routes: Routes, hidden: Hidden, rules: int, first: int, fields: Sequence[Any]
) -> Planned:
    """The plan of stages with these configs. `fields` are the inputs of the first call, which the plan does not depend
    on but in that somebody else's fused operations are tried on tensors like them, without data."""
    at = (keys, routes, hidden, rules, first)
    if at not in _plans:
        _plans[at] = _plan(keys, routes, hidden, pattern.rules_of(rules), first, composite.protos_of(fields))
    return _plans[at]


def _plan(
    keys: tuple[str, ...], routes: Routes, hidden: Hidden, rules: pattern.Groups, begin: int, fields: Sequence[Any]
) -> Planned:
    configs: list[Any] = [parse(key) for key in keys]

    def tried(rule: pattern.Rule, first: int, last: int) -> Any:
        inside = tuple((c - first, f, p - first, k) for c, f, p, k in routes if first <= min(c, p) and max(c, p) < last)
        own = {(p, k) for c, f, p, k in routes if not (first <= c < last)}
        away = tuple((i - first, k) for i, k in hidden if first <= i < last and (i, k) not in own)
        config = composite.Config(rule.op.op_name, rule.side, tuple(configs[first:last]), routes=inside, hidden=away)
        if any(isinstance(c, linear.Config) and _writes(c) for c in config.stages):
            return (
                "its Linear holds its weight as codes, writes main_grad or remembers amaxes, which only Octavo's own do"
            )
        return composite.probe(config, _inputs_at(configs, routes, fields, first, last))

    matches, refused = pattern.match(configs, rules, tried)
    forward, backward = (pattern.own_steps(matches, side) for side in ("forward", "backward"))
    config = _with_composites(configs, matches, forward, backward, routes, hidden, begin)
    fired = tuple(match.rule.name for match in matches)
    return Planned(config.key, _extras(config, len(keys), matches), fired, tuple(refused))


def tell(names: Sequence[str], plan: Planned) -> None:
    """Once for each plan of a fuser."""
    log.info("run of %s: %s", ", ".join(names), ", ".join(plan.fired) or "no fusion")
    for r in plan.refused:
        log.info("%s on %s was refused: %s (%s)", r.rule, ", ".join(r.ops), r.sentence, r.condition)


def _writes(config: linear.Config) -> bool:
    """Whether a layer has more than its inputs and outputs."""
    return bool(config.main_grad or config.observe or config.delay or config.draws or config.weight == "held")


def _inputs_at(configs: list[Any], routes: Routes, fields: Sequence[Any], first: int, last: int) -> tuple[Any, ...]:
    """Inputs of the stages first … last - 1 as one composite, without data."""
    whole = chain.Config(tuple(configs[:last]), routes=tuple(r for r in routes if r[0] < last))
    count = sum(whole.fields)
    if first == 0:
        return tuple(fields[: 1 + count])
    before = chain.Config(tuple(configs[:first]), routes=tuple(r for r in routes if r[0] < first))
    skipped = sum(before.fields)
    with custom.without_data():
        x = chain.protos(before, fields[: 1 + skipped]).outputs[0]
    return (x, *fields[1 + skipped : 1 + count])


def _extras(config: chain.Config, count: int, matches: Sequence[pattern.Match]) -> tuple[tuple[int, int], ...]:
    """Where the extras of each operation are. What somebody else's fused operations stand for has none."""
    covered = {m.first: m.last for m in matches if not m.rule.is_own}
    at, found, sizes, i = 1 + sum(config.given), list[tuple[int, int]](), iter(config.sizes), 0
    while i < count:
        counts, end = next(sizes), covered.get(i, i + 1)
        found.append((at, at + counts.extras))
        found += [(at, at)] * (end - i - 1)
        at += counts.extras
        i = end
    return tuple(found)


_MOST_OUTPUTS = 1024  # that an operation gives away


def _with_composites(
    configs: list[Any],
    matches: Sequence[pattern.Match],
    forward: Any,
    backward: Any,
    routes: Routes,
    hidden: Hidden,
    begin: int,
) -> chain.Config:
    """The chain, somebody else's fused operations in place of what they stand for."""
    theirs = {m.first: m for m in matches if not m.rule.is_own}
    stages: list[Any] = []
    place: list[int] = []  # of each operation among the stages
    start: list[int] = []  # of each operation, the first of the stage's inputs that is its own, less one
    shift: list[dict[int, int]] = []  # of each operation, what it gives away -> what the stage gives away
    i = 0
    while i < len(configs):
        match = theirs.get(i)
        end = i + 1 if match is None else match.last
        place += [len(stages)] * (end - i)
        stages.append(configs[i] if match is None else match.config)
        given = 0
        for j in range(end - i):
            unfused = match.config.unfused if match is not None else None
            start.append(0 if unfused is None else sum(unfused.fields[:j]))
            shown = range(_MOST_OUTPUTS) if unfused is None else unfused.shown[j]
            shift.append({k: given + n for n, k in enumerate(shown)})
            given += len(shown)
        i = end
    place.append(len(stages))
    moved = [tuple((name, place[a], place[b]) for name, a, b in steps) for steps in (forward, backward)]
    outer = [route for route in routes if place[route[0]] != place[route[2]]]
    return chain.Config(
        tuple(stages), moved[0], moved[1],
        tuple((place[c], start[c] + f, place[p], shift[p][k]) for c, f, p, k in outer),
        tuple((place[i], shift[i][k]) for i, k in hidden if k in shift[i]), begin,
    )  # fmt: skip


def rules_in_force(own: tuple[pattern.Rule, ...], everybodys: bool) -> int:
    return pattern.rule_set((own, tuple(pattern.RULES) if everybodys else ()))


class Wire(NamedTuple):
    """An extra input that comes from a channel."""

    channel: str


class Step(NamedTuple):
    """One operation in one call."""

    op: Any
    extras: tuple[Any, ...]  # tensors, or Wires
    kwargs: dict[str, Any]
    number: int  # in its Sequential
    drains: tuple[
        tuple[str, bool], ...
    ]  # of each extra output: its channel, whether anybody outside of the group has it


class OperationFuser:
    """Operations that follow each other. `rules` are tried before everybody's; None: none at all."""

    def __init__(self, ops: Sequence[FusibleOperation], rules: tuple[pattern.Rule, ...] | None = ()) -> None:
        if not ops:
            raise UnsupportedConfig("An OperationFuser takes at least one operation, got none.")
        self.ops, self.rules = tuple(ops), rules
        self._logged: set[str] = set()

    def _legacy_match(self) -> tuple[int, int, pattern.Rule] | None:
        """Operations that a fused one with a forward in one piece takes."""
        rules = () if self.rules is None else (*self.rules, *pattern.RULES)
        if all([rule.is_own or not rule.op.op_is_legacy for rule in rules]):
            return None
        return find_fused(self.ops, rules)

    def _around(
        self, found: tuple[int, int, pattern.Rule], x: Any, steps: list[Step], channels: dict[str, Any],
        told: list[Any] | None,
    ) -> tuple[Any, list[tuple[Any, ...]]]:  # fmt: skip
        """What comes before those, they, and what comes after."""
        first, last, rule = found
        before: list[tuple[Any, ...]] = []
        after: list[tuple[Any, ...]] = []
        if first:
            x, before = OperationFuser(self.ops[:first], self.rules).run(x, steps[:first], channels, told)
        x = run_fused(rule, self.ops[first:last], x)
        if told is not None:
            told.append((steps[first:last], Planned("", (), (rule.name,), ())))
        if last < len(steps):
            x, after = OperationFuser(self.ops[last:], self.rules).run(x, steps[last:], channels, told)
        return x, [*before, *[()] * (last - first), *after]

    def rule_number(self) -> int:
        if torch.compiler.is_compiling():
            return self._rule_number_now()
        return rules_in_force(self.rules or (), self.rules is not None)

    @while_tracing
    def _rule_number_now(self) -> int:
        return rules_in_force(self.rules or (), self.rules is not None)

    def __call__(self, x: Any, *extras: Tensor) -> Any:
        """y, or y and extra outputs, of extra inputs in order."""
        count = sum(op.num_extra_inputs for op in self.ops)
        if len(extras) != count:
            raise UnsupportedConfig(f"These operations take {count} extra inputs besides x, got {len(extras)}.")
        steps, rest = [], iter(extras)
        for i, op in enumerate(self.ops):
            own = tuple(next(rest) for _ in range(op.num_extra_inputs))
            steps.append(Step(op, own, {}, i, (("", True),) * op.num_extra_outputs))
        y, given = self.run(x, steps, {}, None)
        away = [t for group in given for t in group]
        return (y, *away) if away else y

    def run(
        self, x: Any, steps: list[Step], channels: dict[str, Any], told: list[Any] | None
    ) -> tuple[Any, list[tuple[Any, ...]]]:
        """y, and what each operation gives away: None for what nobody outside of its run has. `channels` are those
        filled so far, and are filled further; `told` is a list to which runs are appended, while somebody asks."""
        found = self._legacy_match()
        if found is not None and len(steps) == len(self.ops):
            return self._around(found, x, steps, channels, told)
        given: list[tuple[Any, ...]] = []
        at = 0
        while at < len(steps):
            end = _run_end(steps, at, x)
            if end <= at + 1 and not (end > at and isinstance(steps[at].op, BasicOperation)):
                step = _connected(steps[at], channels)
                if told is not None:
                    told.append((steps[at : at + 1], _why_alone(steps[at].op, x) if end == at else ""))
                x, made = _alone(step, x)
                given.append(made)
                end = at + 1
            else:
                part = [_connected(step, channels) for step in steps[at:end]]
                later = {t.channel for step in steps[end:] for t in step.extras if isinstance(t, Wire)}
                x, made_by_each = _run(part, x, self.rule_number(), told, later, self._logged)
                given += made_by_each
            for i in range(at, end):
                for (name, _), t in zip(steps[i].drains, given[i], strict=True):
                    if name:
                        channels[name] = t
            at = end
        return x, given


def _connected(step: Step, channels: dict[str, Any]) -> Step:
    """With what channels have; what comes from within the same run stays a Wire."""
    if not any([isinstance(t, Wire) for t in step.extras]):
        return step
    found = [channels.get(t.channel, t) if isinstance(t, Wire) else t for t in step.extras]
    return step._replace(extras=tuple(found))


def _run_end(steps: list[Step], at: int, x: Any) -> int:
    """Where the run that begins here ends; here, if this operation joins none."""
    if isinstance(x, QTensor) or not isinstance(x, Tensor) or _recast(x):
        return at
    end = at
    while end < len(steps) and not _why_not(steps[end].op, x):
        if end > at and is_fork(steps[end].op) and is_fork(steps[end - 1].op):
            break  # a node would return one value twice
        end += 1
    while end > at and is_fork(steps[end - 1].op):  # at the end it is a name for y
        end -= 1
    if end > at and is_fork(steps[at].op) and not (x.requires_grad and torch.is_grad_enabled()):
        return at
    return end


RECAST = "torch.autocast casts what layers take"


def _why_alone(op: Any, x: Any) -> str:
    """Why an operation joins no others in a call with x."""
    if not isinstance(x, Tensor):
        return "x is codes"
    if _recast(x):
        return RECAST
    return _why_not(op, x) or "it is a name for its neighbour's value"


def _why_not(op: Any, x: Any) -> str:
    """Why an operation is called by itself, as a module is; empty if it may join others."""
    if op.op_hooked or op._forward_hooks or op._forward_pre_hooks or op._backward_hooks or op._backward_pre_hooks:
        return "it has hooks"
    if op.op_runs_its_forward or "forward" in op.__dict__:
        return "its forward is not Octavo's"
    why: str = op.op_alone(x)
    return why


def _recast(x: Tensor) -> bool:
    """Whether torch.autocast would have layers cast x: each of them then is a run of its own."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype


def is_fork(op: Any) -> bool:
    return bool(op.op_forks)


def _alone(step: Step, x: Any) -> tuple[Any, tuple[Tensor, ...]]:
    op = step.op
    if op.op_is_legacy:
        return run_legacy(op, x, step.kwargs), ()
    made = op.op_call(x, step.extras, step.kwargs)
    if op.num_extra_outputs:
        return made[0], tuple(made[1:])
    return made, ()


def _run(
    steps: list[Step],
    x: Tensor,
    rules: int,
    told: list[Any] | None = None,
    later: Collection[str] = (),
    logged: set[str] | None = None,
) -> tuple[Tensor, list[tuple[Any, ...]]]:
    """One chain. `later` are the channels that are needed after it."""
    tracing = torch.compiler.is_compiling()
    as_nodes = tracing or (is_watched() and not any(_holds_objects(s.op) for s in steps) and not saved_elsewhere())
    stages, routes = _stages(steps, Edge.of(x), as_nodes)
    inside = [(producer, k) for _, _, producer, k in routes]
    hidden = tuple(
        [
            (i, k)
            for i, s in enumerate(steps)
            for k, (name, leaves) in enumerate(s.drains)
            if (i, k) in inside and not leaves and name not in later
        ]
    )
    keys = tuple([stage.key for stage in stages])
    # for messages of functions that somebody else wrote; of others, equal runs share a plan wherever they are
    first = steps[0].number if any([key.startswith("custom(") for key in keys]) else 0
    fields = (x, *[t for stage in stages for t in stage.inputs])
    if tracing:
        sketches = [sketched(t, x.shape[-1]) for t in fields] if x.dim() and _has_foreign(rules) else []
        key, places, fired, refused = _planned_now(keys, routes, hidden, rules, first, sketches)
    else:
        plan = planned(keys, routes, hidden, rules, first, fields)
        key, places, fired, refused = plan
        if logged is not None and key not in logged:
            logged.add(key)
            tell([type(step.op).__name__ for step in steps], plan)
    if told is not None:
        told.append((steps, Planned(key, places, fired, refused)))
    buffers = tuple([t for stage in stages for t in stage.buffers])
    if as_nodes:
        made = run_in_graph("chain", key, fields, buffers or (None,))
    else:
        needs, anchored = any([stage.needs for stage in stages]), any([stage.anchored for stage in stages])
        config: Any = chain
        made = list(
            run(config, chain.config(key), chain.Inputs(fields), buffers, differentiable=needs, anchored=anchored)
        )
    for stage, (start, stop) in zip(stages, places, strict=True):
        if stage.after is not None:
            stage.after(made[start:stop])
    return made[0], _given(steps, x, made, hidden)


def _stages(steps: list[Step], x: Edge, as_nodes: bool) -> tuple[list[Stage], Routes]:
    stages: list[Stage] = []
    routes: list[tuple[int, int, int, int]] = []
    filled: dict[str, tuple[int, int, Edge]] = {}  # channel -> the operation that fills it, its output, what it is
    for i, step in enumerate(steps):
        wires = [t for t in step.extras if isinstance(t, Wire)]
        if wires:
            known = tuple([filled[t.channel][2] if isinstance(t, Wire) else t for t in step.extras])
            stage = _stage(step._replace(extras=known), x, leads=i == 0, as_nodes=as_nodes)
            for t, edge in zip(step.extras, known, strict=True):
                if isinstance(t, Wire):
                    at = [
                        n
                        for n, given in enumerate(stage.inputs, 1)
                        if given is edge and (i, n) not in [r[:2] for r in routes]
                    ]
                    routes.append((i, at[0], *filled[t.channel][:2]))
            stage = stage._replace(inputs=tuple([None if isinstance(t, Edge) else t for t in stage.inputs]))
        else:
            stage = _stage(step, x, leads=i == 0, as_nodes=as_nodes)
        for k, (name, _) in enumerate(step.drains):
            if name:
                filled[name] = (i, k, x if is_fork(step.op) else stage.away[k])
        stages.append(stage)
        x = stage.y
    return stages, tuple(routes)


@while_tracing
def _planned_now(
    keys: tuple[str, ...], routes: Routes, hidden: Hidden, rules: int, first: int, fields: list[Any]
) -> tuple[Any, ...]:
    return tuple(planned(keys, routes, hidden, rules, first, [_of_sketch(field) for field in fields]))


@while_tracing
def _has_foreign(rules: int) -> bool:
    """Whether any of these rules is somebody else's, and has to be tried."""
    return any(not rule.is_own for group in pattern.rules_of(rules) for rule in group)


def sketched(field: Any, width: int) -> Any:
    if isinstance(field, tuple):
        return [as_it_is(t) for t in field]
    return as_it_is(field) if isinstance(field, nn.Parameter) else sketch(field, width)


def _of_sketch(said: Any) -> Any:
    if isinstance(said, list):
        return tuple(TensorProto(*t) for t in said)
    return None if said is None else TensorProto(*said)


def _holds_objects(op: Any) -> bool:
    """Whether its backward needs Python objects, which an operator cannot take."""
    return bool(op.delay_wgrad_compute or op.fuse_wgrad_accumulation)


def _stage(step: Step, x: Edge, *, leads: bool, as_nodes: bool) -> Stage:
    op = step.op
    if is_fork(op):
        grads = "x" if x.needs else ""
        return Stage(f"fork(leads={leads},grads='{grads}')", (), (), x, x.needs)
    try:
        found: Stage = op.op_stage(x, step.extras, step.kwargs, as_nodes)
    except custom.Miscounted as error:
        raise RuntimeError(f"Operation {step.number}: {error}") from error
    return found


def _given(steps: list[Step], x: Tensor, made: list[Tensor], hidden: Hidden) -> list[tuple[Any, ...]]:
    """What each operation gives away, out of the outputs after the first; None where nobody outside has it."""
    found: list[tuple[Any, ...]] = []
    at = 1
    for i, step in enumerate(steps):
        own: list[Any] = []
        for k in range(step.op.num_extra_outputs):
            if (i, k) in hidden:
                own.append(None)
            else:
                t = made[at]
                own.append(Join.apply(x, t) if i == 0 and is_fork(step.op) else t)  # type: ignore[no-untyped-call]
                at += 1
        found.append(tuple(own))
    return found


def run_alone(op: BasicOperation, x: Any, extras: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
    """One operation by itself."""
    if op.op_is_legacy:
        return run_legacy(op, x, kwargs)
    unknown = [name for name in kwargs if name not in op.op_keywords]
    if unknown:
        raise TypeError(f"{type(op).__name__} takes the keywords {op.op_keywords}, got {unknown[0]!r}.")
    x = x.dequantize() if isinstance(x, QTensor) else x
    y, given = _run([Step(op, extras, kwargs, 0, (("", True),) * op.num_extra_outputs)], x, 0)
    return (y, *given[0]) if given[0] else y


def told_run(steps: Sequence[Step], plan: Planned | str) -> Run:
    """A recorded run in words."""
    names = tuple(type(step.op).__name__ for step in steps)
    if isinstance(plan, str):
        return Run(names, names, names)
    if not plan.key:
        return Run(names, plan.fired, plan.fired)
    _, forward, backward = steps_of(chain.config(plan.key))
    return Run(names, forward, backward)


def steps_of(config: chain.Config) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Names of the stages, of forward's steps and of backward's."""

    def title(stage: Any) -> str:
        return stage.functions.title if isinstance(stage, custom.Config | composite.Config) else stage.registered_name

    def name(step: chain.Step) -> str:
        return step.name or title(config.stages[step.first])

    steps = [tuple(name(step) for step in own) for own in (config.steps, config.back_steps)]
    return tuple(title(stage) for stage in config.stages), steps[0], steps[1]


def refusals_of(key: str) -> tuple[Refused, ...]:
    """Of a run that was planned here."""
    return next((plan.refused for plan in _plans.values() if plan.key == key), ())
