"""`OperationFuser`: run consecutive operations. It cuts them into runs; each run is one chain
(`octavo.runtime.chain`), with one forward node and one backward node. Parameters are read at every call."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo._torch.modules import GLOBAL_HOOKS, see_operations
from octavo._torch.tracing import while_tracing
from octavo.communication.tensor_parallel import COLUMN_BLOCKS
from octavo.errors import UnsupportedConfig
from octavo.fusion import rule as pattern
from octavo.fusion.custom.basic_operation import BasicOperation
from octavo.fusion.custom.legacy import find_fused, outside, run_fused, run_legacy, unsupported_if_fused
from octavo.fusion.plan import Hidden, Planned, has_rules, known_plan, tell
from octavo.fusion.saved_tensor_report import saved_tensor_report
from octavo.fusion.stages import Record, Step, Wire, connected, names_of, planned_run, run_takes_nodes
from octavo.ops.inputs import arrived, check_layout
from octavo.ops.operation import HOOKS_OF_ALL, FusibleOperation, check_columns, has_hooks
from octavo.quant import QTensor
from octavo.quant.qtensor import Join
from octavo.runtime import call_cache
from octavo.runtime.call import Stage, call, run_hit
from octavo.text import plural


class OperationFuser:
    """Run consecutive operations together: each run of them is one node forward and one backward.

    `octavo.Sequential` makes one for each group of operations between ordinary modules; `Sequential.groups` shows them.
    Use one directly if you have a list of operations and need no module around it.

    Args:
        ops: the operations, at least one. They keep their parameters, which are read at every call.
        rules: rules that are tried before the registered ones, each by `Forward`, `Backward` or `Joint`; None disables
            all rules.

    Raises:
        UnsupportedConfig: there is no operation.

    Example:
        >>> fuser = octavo.ops.OperationFuser([octavo.ops.ConstantScale(2.0), octavo.ops.AddExtraInput()])
        >>> fuser(torch.ones(2), torch.ones(2))
        tensor([3., 3.])
    """

    def __init__(self, ops: Sequence[FusibleOperation], rules: tuple[pattern.Rule, ...] | None = ()) -> None:
        if not ops:
            raise UnsupportedConfig("An OperationFuser takes at least one operation, got none.")
        self.ops, self.rules = tuple(ops), rules
        self._logged: dict[str, Planned] = {}  # plans that were logged, by their keys
        self.is_quiet = False  # whether no plan is logged, as `explain` needs
        self._known: tuple[Any, ...] = (None,)  # the global rules at the last lookup, and its result

    def op_describe(self) -> str:
        """Return a description of the run for messages."""
        return f"A run of {', '.join([type(op).__name__ for op in self.ops])}"

    @while_tracing
    def _rules_in_force(self, edition: str) -> tuple[int, bool]:
        """Return the number that identifies the rules in force, and whether one of them is a legacy rule. A tracer
        guards on `edition`, which the caller reads: it changes with the global rules."""
        shared = pattern.global_rules()
        if self._known[0] is not shared:
            groups = ((), ()) if self.rules is None else (self.rules, shared)
            legacy = any(rule.op.op_is_legacy for group in groups for rule in group)
            self._known = shared, (pattern.rule_set(groups), legacy)
        return self._known[1]

    def _has_news(self, plan: Planned) -> bool:
        """Return whether a plan has not been logged yet."""
        return plan.key not in self._logged and not self.is_quiet

    def _log(self, names: Sequence[str], plan: Planned) -> None:
        self._logged[plan.key] = plan
        tell(names, plan)

    @while_tracing
    def _log_traced(self, names: Sequence[str], *at: Any) -> None:
        """Log a plan that was made while tracing, unless it was logged before."""
        plan = known_plan(*at)
        if self._has_news(plan):
            self._log(names, plan)

    def _around(
        self, found: tuple[int, int, pattern.Rule], x: Any, steps: list[Step], channels: dict[str, Any],
        records: list[Any] | None,
    ) -> tuple[Any, list[tuple[Any, ...]]]:  # fmt: skip
        """Run the operations before a legacy fused operation, the fused operation, and the operations after it."""
        first, last, rule = found
        before: list[tuple[Any, ...]] = []
        after: list[tuple[Any, ...]] = []
        if first:
            read = {t.channel for step in steps[first:] for t in step.extra_inputs if isinstance(t, Wire)}
            own = [
                s._replace(drains=tuple([(n, leaves or n in read) for n, leaves in s.drains])) for s in steps[:first]
            ]
            x, before = OperationFuser(self.ops[:first], self.rules)._run_steps(x, own, channels, records)
        fused = [connected(step, channels) for step in steps[first:last]]
        for step in fused:
            if inside := [t.channel for t in step.extra_inputs if isinstance(t, Wire)]:
                raise UnsupportedConfig(
                    f"{rule.name!r} is a legacy fused operation (fuser_forward), and the channel {inside[0]!r} joins "
                    "two operations of its pattern. Define fuser_forward_compute, fuser_forward_save_ctx and "
                    "fuser_backward, which take channels inside, or give the Sequential rules=None."
                )
        x, made = run_fused(rule, self.ops[first:last], x, [step.extra_inputs for step in fused])
        for step, outputs in zip(fused, made, strict=True):
            channels.update({name: t for (name, _), t in zip(step.drains, outputs, strict=True) if name})
        if records is not None:
            records.append(Record(steps[first:last], Planned("", (), (rule.name,), ())))
        if last < len(steps):
            x, after = OperationFuser(self.ops[last:], self.rules)._run_steps(x, steps[last:], channels, records)
        return x, [*before, *made, *after]

    def __call__(self, x: Tensor | QTensor, *extra_inputs: Tensor) -> Tensor | QTensor | tuple[Tensor | QTensor, ...]:
        """Run all operations.

        Args:
            x: the input of the first operation.
            *extra_inputs: the extra inputs of all operations, in order. Channels are not followed.

        Returns:
            y, or y and the extra outputs of all operations, in order.

        Raises:
            UnsupportedConfig: there are more or fewer extra inputs.
        """
        count = sum(op.num_extra_inputs for op in self.ops)
        if len(extra_inputs) != count:
            raise UnsupportedConfig(
                f"These operations take {plural(count, 'extra input')} besides x, got {len(extra_inputs)}."
            )
        steps, rest = [], iter(extra_inputs)
        for i, op in enumerate(self.ops):
            own = tuple(next(rest) for _ in range(op.num_extra_inputs))
            steps.append(Step(op, own, {}, i, (("", True),) * op.num_extra_outputs))
        y, given = self._run_steps(x, steps, {}, None)
        away = [t for group in given for t in group]
        return (y, *away) if away else y

    def _run_steps(
        self, x: Any, steps: list[Step], channels: dict[str, Any], records: list[Any] | None
    ) -> tuple[Any, list[tuple[Any, ...]]]:
        """Return y and the extra outputs of each operation, None for those used only inside their run. `channels` are
        those filled so far; this call fills more. If `records` is a list, runs are appended to it, for explain and
        require."""
        x = x if type(x) is Tensor else arrived(x)
        number, legacy = self._rules_in_force(pattern.edition())
        if legacy and (found := find_fused(self.ops, (*(self.rules or ()), *pattern.global_rules()))) is not None:
            if not torch.compiler.is_compiling():
                return self._around(found, x, steps, channels, records)
            first, last, rule = found
            why = unsupported_if_fused(rule)
            torch._dynamo.graph_break(msg=why)  # under fullgraph=True this is the error
            if not all([getattr(op, "strict", True) for op in self.ops[first:last]]):
                why = ""
            return outside.call(why, self._around, found, x, steps, channels, records)
        given: list[tuple[Any, ...]] = []
        at = 0
        settings: tuple[Any, ...] | None = None
        if steps[0].op.op_is_elementwise and not torch.compiler.is_compiling():
            check_columns(self.ops, getattr(x, COLUMN_BLOCKS, 0))
        looks_up = len(steps) > 1 and not self.is_quiet and type(x) is Tensor and not torch.compiler.is_compiling()
        if looks_up and x.device.type in call_cache.DEVICES:
            settings, y = self._cached(x, steps, number, records)
            if y is not None:
                return y, [()] * len(steps)
        while at < len(steps):
            end = _run_end(steps, at, x)
            if steps[at].op.parallel is not None:
                check_columns(self.ops[at:], 0)
            if any([step.kwargs for step in steps[at:end]]) and (cut := _memory_cut(steps[at:end])):
                _refuse_across(cut, [connected(step, channels) for step in steps[at:end]], x, number)
                end = at + cut
            if end > at + 1 and torch.compiler.is_compiling():
                end = _without_refused_memory(steps, at, end)
            if end <= at + 1 and not (end > at and isinstance(steps[at].op, BasicOperation)):
                step = connected(steps[at], channels)
                if records is not None:
                    records.append(Record(steps[at : at + 1], _why_alone(steps[at].op, x) if end == at else ""))
                x, own = _alone(step, x)
                given.append(own)
                end = at + 1
            else:
                part = [connected(step, channels) if step.extra_inputs else step for step in steps[at:end]]
                later = {t.channel for step in steps[end:] for t in step.extra_inputs if isinstance(t, Wire)}
                if steps[at].op.parallel is not None:
                    x = steps[at].op.op_begin(x)
                whole = settings if len(part) == len(steps) else None
                x, made_by_each = _run(part, x, number, records, later, self, whole)
                if steps[end - 1].op.parallel is not None:
                    x = steps[end - 1].op.op_finish(x)
                given += made_by_each
            for i in range(at, end):
                for (name, _), t in zip(steps[i].drains, given[i], strict=True):
                    if name:
                        channels[name] = t
            at = end
        return x, given

    def _cached(
        self, x: Tensor, steps: list[Step], rules: int, records: list[Any] | None
    ) -> tuple[tuple[Any, ...] | None, Tensor | None]:
        """Return y of a call that is a hit of the call cache, in which all steps were one run. Of another call: the
        settings by which a later one may be a hit; None if there are none."""
        lookups, needs = [], x.requires_grad and torch.is_grad_enabled()
        for op, extra_inputs, kwargs, _, drains in steps:
            alone = kwargs or drains or has_hooks(op) or op.op_hooked or op.op_runs_its_forward
            lookup = None if alone or "forward" in op.__dict__ else op._call_lookup(needs, extra_inputs)
            if lookup is None:
                return None, None
            lookups.append(lookup)
            needs = lookup.needs
        settings = (rules, x.shape, x.requires_grad, *[lookup.settings for lookup in lookups])
        tensors = [x, *[t for lookup in lookups for t in lookup.tensors]]
        hit = call_cache.find(settings, tensors)
        plan = None if hit is None else self._logged.get(hit.context[0].key)
        if hit is None or plan is None:  # each fuser logs a plan once
            return settings, None
        if records is not None:
            records.append(Record(steps, plan))
        for step, lookup in zip(steps, lookups, strict=True):
            if lookup.trains or lookup.observes:
                step.op._note_hit(lookup)
        return settings, run_hit(hit, tensors, [t for lookup in lookups for t in lookup.buffers], self)[0]


def _run_end(steps: list[Step], at: int, x: Any) -> int:
    """Return the end of the run that begins at `at`; `at` itself if this operation joins no run."""
    if isinstance(x, QTensor) or not isinstance(x, Tensor) or _recast(x):
        return at
    if any(GLOBAL_HOOKS) and see_operations():
        return at
    end = at
    while end < len(steps) and not _why_not(steps[end].op, x):
        if end > at and steps[end].op.op_forks and steps[end - 1].op.op_forks:
            break  # a node would return one value twice
        if steps[end].op.op_needs_shape and any([isinstance(step.op, BasicOperation) for step in steps[at:end]]):
            break  # the shape of a user's output is not known inside a run
        if steps[end].op.parallel is not None and end > at and steps[end].op.op_starts_run():
            break  # a collective stands before it
        end += 1
        if steps[end - 1].op.parallel is not None and steps[end - 1].op.op_ends_run():
            break  # or after it
        if steps[end - 1].op.op_inner_outputs:
            break  # the rest of it is plain torch
    while end > at and steps[end - 1].op.op_forks:  # a fork at the end only aliases y
        end -= 1
    if end > at and steps[at].op.op_forks and not (x.requires_grad and torch.is_grad_enabled()):
        return at
    return end


def _memory(step: Step) -> tuple[bool, bool]:
    """Return whether a step has memory of the caller's for dx, and for y."""
    keywords: tuple[str, str] | None = step.op.op_memory
    if keywords is None:
        return False, False
    return step.kwargs.get(keywords[0]) is not None, step.kwargs.get(keywords[1]) is not None


def _memory_cut(steps: Sequence[Step]) -> int:
    """Return where a run must be cut, for the caller's memory; 0 if nowhere. Memory for dx is that of a run's first
    operation, and memory for y that of its last, in a run without side outputs."""
    for i, step in enumerate(steps):
        dx, y = _memory(step)
        if i and (dx or (y and any([before.op.num_extra_outputs for before in steps[:i]]))):
            return i
        if y and i + 1 < len(steps):
            return i + 1
    return 0


def _refuse_across(cut: int, steps: Sequence[Step], x: Tensor, rules: int) -> None:
    """Raise if a rule would fuse operations on both sides of a cut: the fused operation writes no value between."""
    if not has_rules(rules):
        return
    bare = []
    for step in steps:
        left_out = (*(step.op.op_memory or ()), "is_first_microbatch")
        kwargs = {k: v for k, v in step.kwargs.items() if k not in left_out}
        if "seed" in step.op.op_keywords:  # or its stage would draw one, and change what is drawn after
            kwargs["seed"] = torch.zeros(2, dtype=torch.int64, device=x.device)
        bare.append(step._replace(kwargs=kwargs))
    *_, plan = planned_run(bare, x, rules, (), run_takes_nodes(steps, x), None)
    for name, (first, last) in zip(plan.fired, plan.spans, strict=True):
        if first < cut < last:
            raise UnsupportedConfig(
                f"{name!r} runs operations {steps[first].number} to {steps[last - 1].number} as one: its first takes "
                "memory for dx and its last memory for y, and the call has memory for a value between them, which is "
                "not written. Pass it to these, or give the Sequential rules=None."
            )


def _without_refused_memory(steps: Sequence[Step], at: int, end: int) -> int:
    """Return the end of a run of steps whose memory the graph being traced can write to. Any other step is called by
    itself, and says why."""
    # the last one first: the question takes a buffer for this graph, and a step called by itself asks once more
    if any(_memory(steps[end - 1])) and steps[end - 1].op.op_refuses_memory(steps[end - 1].kwargs):
        end -= 1
    if end > at + 1 and any(_memory(steps[at])) and steps[at].op.op_refuses_memory(steps[at].kwargs):
        return at + 1
    return end


RECAST = "torch.autocast casts what layers take"


def _why_alone(op: Any, x: Any) -> str:
    """Return why an operation joins no run in a call with x."""
    if not isinstance(x, Tensor):
        return "x is codes"
    if _recast(x):
        return RECAST
    if any(GLOBAL_HOOKS) and see_operations():
        return HOOKS_OF_ALL
    return _why_not(op, x) or "it only aliases its input here"


def _why_not(op: Any, x: Any) -> str:
    """Return why an operation is called by itself, like any module; empty if it may join a run."""
    if op.op_hooked or has_hooks(op):
        return "it has hooks"
    if op.op_runs_its_forward or "forward" in op.__dict__:
        return "its forward is not Octavo's"
    return op.why_not_fusible(x)


def _recast(x: Tensor) -> bool:
    """Return whether torch.autocast makes layers cast x. Each layer is then called by itself."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype


def _alone(step: Step, x: Any) -> tuple[Any, tuple[Tensor, ...]]:
    op = step.op
    if op.op_is_legacy:
        made = run_legacy(op, x, step.extra_inputs, step.kwargs)
    else:
        made = op.op_call(x, step.extra_inputs, step.kwargs)
    if op.num_extra_outputs:
        return made[0], tuple(made[1:])
    return made, ()


def _run(
    steps: list[Step],
    x: Tensor,
    rules: int,
    records: list[Any] | None = None,
    later: Collection[str] = (),
    fuser: OperationFuser | None = None,
    settings: tuple[Any, ...] | None = None,
) -> tuple[Tensor, list[tuple[Any, ...]]]:
    """Run the steps as one chain. `later` are the channels that steps after it read; `settings` those by which the
    call cache did not find it."""
    check_layout(type(steps[0].op).__name__, x)
    as_nodes = run_takes_nodes(steps, x)
    stages, hidden, fields, plan = planned_run(steps, x, rules, later, as_nodes, fuser)
    if records is not None:
        explains = fuser is not None and fuser.is_quiet
        records.append(Record(steps, plan, saved_tensor_report(names_of(steps), plan.key, fields) if explains else ()))
    buffers = tuple([t for stage in stages for t in stage.buffers])
    needs = any([stage.needs for stage in stages])
    writes = any([stage.writes_in_backward for stage in stages])
    whole = Stage(
        "chain", plan.key, fields[1:], buffers, needs, writes_in_backward=writes,
        unchanged=[t for stage in stages for t in stage.unchanged], out=stages[-1].out, settings=settings,
    )  # fmt: skip
    made = call(whole, x, as_nodes, fuser)
    for stage, (start, stop) in zip(stages, plan.auxiliary, strict=True):
        if stage.after is not None:
            stage.after(made[start:stop])
    given = _given(steps, x, made, hidden)
    op = steps[-1].op
    if not op.op_inner_outputs:
        return made[0], given
    end = 1 + sum([t is not None for own in given for t in own])
    return op.op_inside(made[0], *made[end : end + op.op_inner_outputs]), given


def _given(steps: list[Step], x: Tensor, made: Sequence[Tensor], hidden: Hidden) -> list[tuple[Any, ...]]:
    """Return the extra outputs of each operation, from the outputs after y; None for those hidden in the run."""
    found: list[tuple[Any, ...]] = []
    at = 1
    for i, step in enumerate(steps):
        own: list[Any] = []
        for k in range(step.op.num_extra_outputs):
            if (i, k) in hidden:
                own.append(None)
            else:
                t = made[at]
                own.append(Join.apply(x, t) if i == 0 and step.op.op_forks else t)  # type: ignore[no-untyped-call]
                at += 1
        found.append(tuple(own))
    return found


def run_alone(op: BasicOperation, x: Any, extra_inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation by itself."""
    if op.op_is_legacy:
        return run_legacy(op, x, extra_inputs, kwargs)
    unknown = [name for name in kwargs if name not in op.op_keywords]
    if unknown:
        raise TypeError(f"{type(op).__name__} takes the keywords {op.op_keywords}, got {unknown[0]!r}.")
    x = x.dequantize() if isinstance(x, QTensor) else x
    y, given = _run([Step(op, extra_inputs, kwargs, 0, (("", True),) * op.num_extra_outputs)], x, 0)
    return (y, *given[0]) if given[0] else y
