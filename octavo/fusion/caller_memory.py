"""The caller's memory for y and dx of single operations: where it cuts a run, and where it is refused."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig
from octavo.fusion.plan import has_rules
from octavo.fusion.stages import Step, planned_run, run_takes_nodes


def _memory(step: Step) -> tuple[bool, bool]:
    """Return whether a step has memory of the caller's for dx, and for y."""
    keywords: tuple[str, str] | None = step.op.op_memory
    if keywords is None:
        return False, False
    return step.kwargs.get(keywords[0]) is not None, step.kwargs.get(keywords[1]) is not None


def memory_cut(steps: Sequence[Step]) -> int:
    """Return where a run must be cut, for the caller's memory; 0 if nowhere. Memory for dx is that of a run's first
    operation, and memory for y that of its last, in a run without side outputs."""
    for i, step in enumerate(steps):
        dx, y = _memory(step)
        if i and (dx or (y and any([before.op.num_extra_outputs for before in steps[:i]]))):
            return i
        if y and i + 1 < len(steps):
            return i + 1
    return 0


def refuse_across(cut: int, steps: Sequence[Step], x: Tensor, rules: int) -> None:
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
    plan = planned_run(bare, x, rules, (), run_takes_nodes(steps, x), None).plan
    for name, (first, last) in zip(plan.fired, plan.spans, strict=True):
        if first < cut < last:
            raise UnsupportedConfig(
                f"{name!r} runs operations {steps[first].number} to {steps[last - 1].number} as one: its first takes "
                "memory for dx and its last memory for y, and the call has memory for a value between them, which is "
                "not written. Pass it to these, or give the Sequential rules=None."
            )


def without_refused_memory(steps: Sequence[Step], at: int, end: int) -> int:
    """Return the end of a run of steps whose memory the graph being traced can write to. Any other step is called by
    itself, and says why."""
    # the last one first: the question takes a buffer for this graph, and a step called by itself asks once more
    if any(_memory(steps[end - 1])) and steps[end - 1].op.op_refuses_memory(steps[end - 1].kwargs):
        end -= 1
    if end > at + 1 and any(_memory(steps[at])) and steps[at].op.op_refuses_memory(steps[at].kwargs):
        return at + 1
    return end
