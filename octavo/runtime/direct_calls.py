"""The nodes of a graph as Inductor's code calls them: plain functions in place of operators, with the same results.

Each node of a graph has a function of its own, which records and replays the calls of that node. Where the graph is for
one layout of its tensors, the key of a call has their alignment and nothing else. A mode that watches operators sees
one here too: the function then calls the operator.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo._torch.dispatcher import dispatch_depth
from octavo.runtime.call_cache import Results, find, run
from octavo.runtime.node_call import node_call

Work = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Node = Callable[[list[Tensor]], Sequence[Tensor]]


def forward(text: str, *, fixed: bool) -> Node:
    """Return the function of a forward node. `text` is its call string; `fixed` says whether its tensors have the same
    layout at every call."""
    parsed = node_call(text)
    work = _NodeWork(parsed.run, parsed.is_cached["forward"], fixed)

    def node(tensors: list[Tensor]) -> Sequence[Tensor]:
        # a mode must see the operator: SAC, FLOP counters and fake tensors ask for it
        if dispatch_depth() > 0:
            return torch.ops.octavo.run(tensors, text)
        if parsed.writes:
            parsed.refuse(tensors[::-1])
        # by the node alone: its call string decided everything but the layout of its tensors
        hit = find(work.decided, tensors)
        return work(tensors) if hit is None else hit.replay(tensors)[1]

    return node


def backward(text: str, mask: str, copies: bool, *, fixed: bool) -> Node:
    """Return the function of a backward node. `mask` says which tensors forward has saved, `copies` whether the node
    also returns copies of the gradients that it writes to buffers of the caller's."""
    parsed = node_call(text)
    work = _NodeWork(partial(parsed.run_backward, mask, copies), parsed.is_cached["backward"], fixed)

    def node(tensors: list[Tensor]) -> Sequence[Tensor]:
        if dispatch_depth() > 0:
            return torch.ops.octavo.run_bwd(tensors, text, mask, copies)
        if parsed.gradient_buffers:
            parsed.begin_writes(tensors)
        hit = find(work.decided, tensors)
        # no operator counts a version, so that there is none to preserve
        if hit is not None and not hit.replay.mutates:  # type: ignore[attr-defined]
            return hit.replay(tensors)[1]
        written = parsed.written_by_backward(tensors)
        with preserve_version_counter(written) if written else nullcontext():
            return work(tensors) if hit is None else hit.replay(tensors)[1]

    return node


class _NodeWork:
    """A node's work, recorded at its second call and replayed from then on."""

    def __init__(self, work: Work, is_cached: bool, fixed: bool) -> None:
        self.work, self.is_cached, self.fixed = work, is_cached, fixed
        self.decided = (self,)

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        if not self.is_cached:
            return self.work(tensors)
        return run(self.decided, tensors, self._results, self.decided, fixed=self.fixed)[1]

    def _results(self, tensors: Sequence[Tensor]) -> Results:
        return None, tuple(self.work(tensors))
