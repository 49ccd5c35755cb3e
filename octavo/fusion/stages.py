"""The operations of a call as steps, and a run of them as the stages of a chain, with its plan."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.fakes import FakeTensor
from octavo.fusion.plan import Hidden, Planned, Routes, planned, planned_now, sketched, takes_foreign
from octavo.fusion.saved_tensor_report import KeptMemory
from octavo.ops.operation import Edge
from octavo.runtime.call import Stage, takes_nodes
from octavo.runtime.dry_run import Miscounted


class Wire(NamedTuple):
    """An extra input that comes from a channel."""

    channel: str


class Step(NamedTuple):
    """One operation in one call."""

    op: Any
    extra_inputs: tuple[Any, ...]  # tensors, or Wires
    kwargs: dict[str, Any]
    number: int  # its index in the Sequential
    drains: tuple[tuple[str, bool], ...]  # per extra output: its channel, whether it leaves the group


class Record(NamedTuple):
    """How operations ran in a call, for explain and require."""

    steps: Sequence[Step]
    plan: Planned | str  # of their run; or why an operation ran by itself
    saved_tensors: Sequence[KeptMemory] = ()


def connected(step: Step, channels: dict[str, Any]) -> Step:
    """Return the step with filled channels in place of its Wires. A Wire from within the same run stays."""
    if not any([isinstance(t, Wire) for t in step.extra_inputs]):
        return step
    found = [channels.get(t.channel, t) if isinstance(t, Wire) else t for t in step.extra_inputs]
    return step._replace(extra_inputs=tuple(found))


def run_takes_nodes(steps: Sequence[Step], x: Tensor) -> bool:
    """Return whether the steps run as nodes of a graph. Groups of meta and fake tensors do, unless backward needs
    Python objects: their sizes have no values."""
    ops = [step.op for step in steps]
    if takes_nodes(ops):
        return True
    if not (x.is_meta or isinstance(x, FakeTensor)) or any([op.op_holds_objects() for op in ops]):
        return False
    return any([op.op_has_groups for op in ops])


def planned_run(
    steps: Sequence[Step], x: Tensor, rules: int, later: Collection[str], as_nodes: bool, fuser: Any
) -> tuple[list[Stage], Hidden, tuple[Any, ...], Planned]:
    """Return the stages of a run, its hidden outputs, x and the stages' inputs, and its plan, which `fuser` logs if it
    has one. `later` are the channels that steps after the run read."""
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
    # the index that messages of users' functions name; 0 in other runs, so that equal runs share a plan
    # a number again where a compiler has made it a symbol, behind a graph break
    first = len(range(steps[0].number)) if any([key.startswith("custom.") for key in keys]) else 0
    fields = (x, *[t for stage in stages for t in stage.inputs])
    if torch.compiler.is_compiling():
        sketches = [sketched(t, x.shape[-1]) for t in fields] if x.dim() and takes_foreign(rules) else []
        plan = Planned(*planned_now(keys, routes, hidden, rules, first, sketches))
        if fuser is not None:
            fuser._log_traced(names_of(steps), keys, routes, hidden, rules, first)
    else:
        plan = planned(keys, routes, hidden, rules, first, fields)
        if fuser is not None and fuser._has_news(plan):
            fuser._log(names_of(steps), plan)
    return stages, hidden, fields, plan


def names_of(steps: Sequence[Step]) -> tuple[str, ...]:
    return tuple([type(step.op).__name__ for step in steps])


def _stages(steps: Sequence[Step], x: Edge, as_nodes: bool) -> tuple[list[Stage], Routes]:
    stages: list[Stage] = []
    routes: list[tuple[int, int, int, int]] = []
    filled: dict[str, tuple[int, int, Edge]] = {}  # channel -> the operation that fills it, its extra output, its Edge
    for i, step in enumerate(steps):
        wires = [t for t in step.extra_inputs if isinstance(t, Wire)]
        if wires:
            known = tuple([filled[t.channel][2] if isinstance(t, Wire) else t for t in step.extra_inputs])
            stage = _stage(step._replace(extra_inputs=known), x, as_nodes)
            for t, edge in zip(step.extra_inputs, known, strict=True):
                if isinstance(t, Wire):
                    at = [
                        n
                        for n, given in enumerate(stage.inputs, 1)
                        if given is edge and (i, n) not in [r[:2] for r in routes]
                    ]
                    routes.append((i, at[0], *filled[t.channel][:2]))
            stage = stage._replace(inputs=tuple([None if isinstance(t, Edge) else t for t in stage.inputs]))
        else:
            stage = _stage(step, x, as_nodes)
        for k, (name, _) in enumerate(step.drains):
            if name:
                filled[name] = (i, k, stage.outputs[1 + k])
        stages.append(stage)
        if i + 1 < len(steps):
            x = stage.outputs[0] if stage.outputs else x.after(stage)
    return stages, tuple(routes)


def _stage(step: Step, x: Edge, as_nodes: bool) -> Stage:
    try:
        stage: Stage = step.op.op_stage(x, step.extra_inputs, step.kwargs, as_nodes)
    except Miscounted as error:
        raise RuntimeError(f"Operation {step.number}: {error}") from error
    return stage
