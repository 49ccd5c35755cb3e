"""`Sequential.explain`: a call on a copy, recorded, and reported as runs, rules and saved tensors."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo._torch.tensors import tree_map
from octavo.fusion.custom.legacy import run_legacy
from octavo.fusion.layout import inputs_of, is_container, passed_on, through
from octavo.fusion.plan import Planned, Run, steps_of
from octavo.fusion.rule import NotFired
from octavo.fusion.saved_tensor_report import SavedTensorReport
from octavo.fusion.stages import Record, Step, names_of
from octavo.ops.operation import FusibleOperation, has_hooks
from octavo.runtime import chain

NO_OPERATION = "it is no operation of Octavo's, and is called as it is"


class Explanation(NamedTuple):
    """The result of `Sequential.explain`: how a call runs. It prints as text.

    Attributes:
        runs: groups of operations that run together, in order. Each is one node of autograd's graph.
        fired: names of the fusion rules that apply.
        refused: rules whose pattern is present and that do not apply, and why.
        alone: modules and operations that join no run, and why.
        saved_tensors: the memory that the operations of runs keep for backward; it prints as a table of its own.
    """

    runs: tuple[Run, ...]
    fired: tuple[str, ...]
    refused: tuple[NotFired, ...]
    alone: tuple[str, ...] = ()  # operations that join no run, and why
    saved_tensors: SavedTensorReport = SavedTensorReport()

    def __str__(self) -> str:
        lines = []
        for run in self.runs:
            lines.append(f"run of {', '.join(run.ops)}")
            lines.append(f"  forward   {' | '.join(run.forward)}")
            lines.append(f"  backward  {' | '.join(run.backward) or 'nothing'}")
        lines += [f"refused: {r.rule} on {', '.join(r.ops)}: {r.sentence} ({r.condition})" for r in self.refused]
        return "\n".join([*lines, *[f"by itself: {text}" for text in self.alone]])


def explained(
    sequential: Any, inputs: Sequence[Any], op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None
) -> Explanation:
    """Run forward on a copy of a Sequential, without its hooks and logs, and return how it ran."""
    subject = copy.deepcopy(sequential)
    args = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in inputs]
    pairs = dict(zip(sequential._layout().leaves, subject._layout().leaves, strict=True))
    given = {
        pairs.get(k, k) if isinstance(k, nn.Module) else k:
            tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, v)
        for k, v in (op_kwargs or {}).items()
    }  # fmt: skip
    for module in filter(has_hooks, subject.modules()):
        module.__dict__["op_hooked"] = True
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            getattr(module, kind).clear()
    for container in filter(is_container, subject.modules()):
        for part in container._layout().parts:
            if part.fuser is not None:
                part.fuser.is_quiet = True
    records: list[Record] = []
    gpus = {t.device for t in args if isinstance(t, Tensor) and t.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(gpus)):
        _run_recorded(subject, args[0], tuple(args[1:]), given or None, records)
    plans = [plan for _, plan, _ in records if isinstance(plan, Planned)]
    return Explanation(
        tuple(
            _run_of(steps, plan)
            for steps, plan, _ in records
            if isinstance(plan, Planned) or (isinstance(steps[0].op, FusibleOperation) and steps[0].op.op_makes_node())
        ),
        tuple(dict.fromkeys(name for plan in plans for name in plan.fired)),
        tuple(dict.fromkeys(r for plan in plans for r in plan.refused)),
        tuple(f"{name}: {why}" for name, why in run_by_themselves(records)),
        SavedTensorReport(entry for record in records for entry in record.saved_tensors),
    )


def _run_recorded(sequential: Any, x: Any, extra_inputs: tuple[Any, ...], op_kwargs: Any, records: list[Record]) -> Any:
    """Run forward and record everything that is called, also in Sequentials inside."""
    call = sequential._begun(extra_inputs, op_kwargs, records)
    for part in call.layout.parts:
        if part.legacy is not None:
            records.append(Record([Step(part.legacy, (), {}, part.first, ())], part.legacy.why_not_fusible(x)))
            made = run_legacy(part.legacy, x, inputs_of(part, call), call.kwargs[part.first])
            x = passed_on(part, call, made)
        elif is_container(part.module):
            made = _run_recorded(part.module, x, inputs_of(part, call), call.kwargs[part.first] or None, records)
            x = passed_on(part, call, made)
        else:
            if part.fuser is None:
                records.append(Record([Step(part.module, (), {}, part.first, ())], NO_OPERATION))
            x = through(part, call, x)
    return (x, *call.public) if call.public else x


def run_by_themselves(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the names of the operations that joined no run, and why."""
    return [(type(steps[0].op).__name__, why) for steps, why, _ in records if isinstance(why, str) and why]


def _run_of(steps: Sequence[Step], plan: Planned | str) -> Run:
    """Return a recorded run as the names of its operations and steps."""
    names = names_of(steps)
    if isinstance(plan, str):
        return Run(names, names, names)
    if not plan.key:
        return Run(names, plan.fired, plan.fired)
    _, forward, backward = steps_of(chain.layer.config(plan.key))
    return Run(names, forward, backward)
