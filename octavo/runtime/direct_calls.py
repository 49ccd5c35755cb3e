"""The nodes of a graph as Inductor's code calls them: plain functions in place of operators, with the same results.

Each node of a graph has a function of its own, which records and replays the calls of that node. Where the graph is for
one layout of its tensors, the key of a call has their alignment and nothing else. A mode that watches operators sees
one here too: the function then calls the operator.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo._torch.dispatcher import dispatch_depth
from octavo.runtime.graph_nodes import node_call
from octavo.runtime.replay.calls import Results, call, fixed_key_of, key_of, latest

Work = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Node = Callable[[list[Tensor]], Sequence[Tensor]]


def forward(text: str, *, fixed: bool) -> Node:
    """Return the function of a forward node. `text` is its call string; `fixed` says whether its tensors have the same
    layout at every call."""
    parsed = node_call(text)
    run = _Replays(lambda tensors: parsed.run(parsed.unreplayed, tensors), fixed)
    work: Work = run if parsed.layer.decided_by_layout(parsed.config, "forward") else run.work

    def node(tensors: list[Tensor]) -> Sequence[Tensor]:
        if dispatch_depth() > 0:
            made: list[Tensor] = torch.ops.octavo.run(tensors, text)
            return made
        if parsed.writes:
            parsed.refuse(tensors[::-1])
        found = latest(run.head, tensors)
        return work(tensors) if found is None else found.replay(*tensors)[1]

    return node


def backward(text: str, mask: str, copies: bool, *, fixed: bool) -> Node:
    """Return the function of a backward node. `mask` says which tensors forward has saved, `copies` whether the node
    also returns copies of the gradients that it writes to buffers of the caller's."""
    parsed = node_call(text)
    run = _Replays(lambda tensors: parsed.run_backward(parsed.unreplayed, tensors, mask, copies), fixed)
    work: Work = run if parsed.layer.decided_by_layout(parsed.config, "backward") else run.work

    def node(tensors: list[Tensor]) -> Sequence[Tensor]:
        if dispatch_depth() > 0:
            made: list[Tensor] = torch.ops.octavo.run_bwd(tensors, text, mask, copies)
            return made
        if parsed.elsewhere:
            parsed.begin_writes(tensors)
        found = latest(run.head, tensors)
        if found is not None and not found.replay.mutates:  # type: ignore[attr-defined]
            return found.replay(*tensors)[1]
        written = parsed.written_by_backward(tensors)
        with preserve_version_counter(written) if written else nullcontext():
            return work(tensors) if found is None else found.replay(*tensors)[1]

    return node


class _Replays:
    """A node's work, recorded at its second call and replayed from then on."""

    def __init__(self, work: Work, fixed: bool) -> None:
        self.work, self._key_of = work, fixed_key_of if fixed else key_of
        self.head = (self,)  # of its keys

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        key = self._key_of(self.head, tensors)
        if key is None:
            return self.work(tensors)
        found: Sequence[Tensor] = call(key, tensors, self._results, self.head)[1]  # type: ignore[assignment]
        return found

    def _results(self, tensors: Sequence[Tensor]) -> Results:
        return None, tuple(self.work(tensors))
