"""A call of a node, from the string that names it: what its operators run, on which of their tensors.

The operators themselves, their gradients and how a compiler sees them are in `octavo.runtime.graph_nodes`.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from octavo import values
from octavo._torch.autograd import current_graph_task, saved_tensors_hooks
from octavo._torch.tracing import moves_saved_tensors
from octavo.errors import UnsupportedConfig
from octavo.memory import refuse_shared_memory, span
from octavo.quant.proto import TensorProto
from octavo.runtime import call_cache
from octavo.runtime.adapter import Adapter
from octavo.runtime.caller_memory import begin_write, keep, refuse_overlap
from octavo.runtime.contract import LAYERS, ForwardResult, Layer, packing
from octavo.runtime.written_buffers import leave_in_place

_CODES = torch.float8_e4m3fn, torch.float8_e5m2


class _Crossing(Adapter):
    """A layer as a node runs it: codes leave forward as bytes, and scales flat."""

    def forward(self, config: Any, inputs: Any) -> ForwardResult:
        return crossing(self.flat_places(config), self.layer.forward(config, inputs))


def crossing(flat: tuple[int, ...], made: ForwardResult) -> ForwardResult:
    """Convert forward's results to the form in which they leave a node. `flat` are the places of scales among the
    intermediates."""
    intermediates = [
        t.as_strided((t.numel(),), (1,)) if t is not None and i in flat else t for i, t in enumerate(made.intermediates)
    ]
    return ForwardResult(*(
        tuple([t.view(torch.uint8) if t is not None and t.dtype in _CODES else t for t in group])
        for group in (made.outputs, made.auxiliary, intermediates)
    ))  # fmt: skip


@cache
def layer_of_node(name: str) -> Layer:
    return _Crossing(LAYERS[name])


@lru_cache(maxsize=256)
def _quantizer(key: str) -> Any:
    return values.parse(key)


class NodeCall:
    """A node's call string, parsed, and what its operators do."""

    def __init__(self, text: str) -> None:
        _, name, presence, buffers, key = text.split("|", 4)
        self.is_chain = name == "chain"
        self.layer = layer_of_node(name)
        self.config = self.layer.config(key)
        # whether the layout of the tensors decides the launches, so that the call cache takes them
        self.is_cached = {side: self.layer.decided_by_layout(self.config, side) for side in ("forward", "backward")}
        self.presence, self.buffers = packing(presence), packing(buffers)  # of the layer's inputs, and of its buffers
        self.count, self.written = self.presence.count, self.buffers.count
        self.fills = self.layer.fills(self.config)
        self.writes = self.written > 0 or self.fills  # whether backward writes to saved tensors
        # inputs whose gradient is a buffer of the caller's, and where among the buffers it is
        self.gradient_buffers = {
            i: self.buffers.starts[at] for i, at in self.layer.gradients_in_buffers(self.config).items()
        }
        self.passed = self.layer.gradient_aliases(self.config)  # inputs whose gradient is another's
        # whether the gradient of an input is one of these, which backward's node does not return
        self.theirs = [i in self.gradient_buffers or i in self.passed for i in range(len(self.presence.starts))]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run forward, as it is written, on the tensors of `octavo::run`."""
        return listed(self.layer.forward(self.config, self.inputs(tensors[::-1])))

    def run_backward(self, mask: str, copies: bool, tensors: list[Tensor]) -> list[Tensor]:
        """Run backward, as it is written, on the tensors of `octavo::run_bwd`. The list is emptied, so that the layer
        can free what was saved."""
        # taken before the list is emptied
        saved, dys = self.split(tensors, mask)
        own = self.layer.graph_buffers(self.config, *self.buffers.unpack(tensors)) if self.written else self.no_buffers
        copied = [tensors[at] for at in self.gradient_buffers.values()] if copies else []
        given = self.codes_of_dy(tensors, mask, dys)
        tensors.clear()
        found = self.returned(self.layer.backward(self.config, saved, own, dys, **given))
        return [*found, *[t.clone() for t in copied]]

    def refuse(self, tensors: Sequence[Tensor]) -> None:
        """Refuse calls whose backward would write to the wrong memory; `tensors` lists inputs, then buffers."""
        if self.writes:
            if moves_saved_tensors():
                # hooks would hand backward copies of the buffers; tensors that forward makes are theirs in any case
                if self.fills:
                    raise UnsupportedConfig(
                        "In a graph, saved_tensors_hooks (save_on_cpu) cannot be used with delay_wgrad_compute=True: "
                        "backward would leave the operands of dw in a copy. Leave one of the two out, or run the layer "
                        "in eager mode, where both work."
                    )
                leave_in_place(tensors[self.count : self.count + self.written])
            if self.fills and saved_tensors_hooks(True):
                raise UnsupportedConfig(
                    "In a graph, delay_wgrad_compute=True cannot be used inside torch.utils.checkpoint: the forward "
                    "that runs again would take the operands of dw. Leave one of the two out, or run the layer in "
                    "eager mode."
                )
            for at in self.gradient_buffers.values():
                refuse_overlap(tensors[self.count + at], tensors[: self.count])

    def begin_writes(self, tensors: Sequence[Tensor]) -> None:
        """Note that this backward writes gradients to buffers of the caller's."""
        for at in self.gradient_buffers.values():
            task = current_graph_task()
            begin_write(tensors[at], task)
            keep(tensors[at], None, task)

    def written_by_backward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors of `octavo::run_bwd` that it may write to."""
        return tuple(tensors if self.fills else tensors[: self.written])

    def split(self, tensors: Sequence[Tensor], mask: str) -> tuple[list[Tensor | None], tuple[Tensor, ...]]:
        """Split the tensors after the buffers: those that `save` chose, and a gradient for each output."""
        marks, _, spec = mask.partition("|")
        rest, kept = tensors[self.written :], packing(marks)
        return list(kept.unpack(rest)), tuple(rest[kept.count : len(rest) - (2 if spec else 0)])

    def codes_of_dy(self, tensors: Sequence[Tensor], mask: str, dys: Sequence[Tensor]) -> dict[str, Any]:
        """Return the codes of dy by row and by column, for a backward that takes them: with one scale, which are the
        last two tensors. The mask then ends with their quantizer."""
        key = mask.partition("|")[2]
        if not key:
            return {}
        q = _quantizer(key).assemble(tensors[-2:], tuple(dys[0].shape), dys[0].dtype)
        return {"codes": (q, q.transpose() if self.config.wants_dw else None)}

    def inputs(self, tensors: Sequence[Any]) -> Any:
        """Return the layer's inputs, from the head of the list."""
        return self.layer.Inputs._make(self.presence.unpack(tensors))

    def inputs_into(self, tensors: Sequence[Any], out: Tensor) -> Any:
        """Return the layer's inputs, with the caller's memory for y."""
        fields = list(self.presence.unpack(tensors))
        at = self.layer.out_place(self.config)
        assert at is not None
        fields[at] = out
        return self.layer.Inputs._make(fields)

    def refuse_out(self, tensors: Sequence[Tensor], nbytes: int) -> None:
        """Refuse memory for y, `nbytes` bytes from where the last tensor begins, that overlaps an input of a chain: any
        stage may keep its inputs for backward. A single layer knows what it keeps."""
        place = tensors[-1]
        first = place.untyped_storage().data_ptr() + int(place.storage_offset()) * place.element_size()
        for t in tensors[: self.count] if self.is_chain else ():
            start, end = span(t)
            # the last tensor is an empty view: it tells where the memory begins, also if a compiler passes a copy of it
            if start < first + nbytes and first < end:
                refuse_shared_memory("out", f"{t.dtype} {tuple(t.shape)}, which an operation of the run takes")

    def returned(self, grads: Sequence[Any]) -> list[Any]:
        """Return the gradients that backward's node returns: none that is another's, or lies in a buffer."""
        return [g for g, theirs in zip(grads, self.theirs, strict=False) if g is not None and not theirs]

    @cached_property
    def no_buffers(self) -> Any:
        return self.layer.graph_buffers(self.config, *self.buffers.unpack(()))


@lru_cache(maxsize=4096)
def node_call(text: str) -> NodeCall:
    return NodeCall(text)


def cached(
    parsed: NodeCall, side: str, tensors: list[Tensor], work: Callable[..., list[Tensor]], *decided: Any
) -> list[Tensor]:
    """Run a node through the call cache, or as it is written."""
    own = list(tensors)  # which the work may empty
    if not parsed.is_cached[side]:
        return work(own)
    return list(call_cache.run((parsed, side, *decided), own, lambda tensors: (None, tuple(work(tensors))))[1])


def listed(made: ForwardResult) -> list[Tensor]:
    """Return outputs, auxiliary outputs and intermediates in a row."""
    return [t for group in made for t in group if t is not None]


def fakes(parsed: NodeCall, tensors: list[Tensor]) -> ForwardResult:
    said = parsed.layer.abstract(parsed.config, parsed.inputs([TensorProto.of(t) for t in tensors]))
    made = ForwardResult(*(tuple(None if p is None else p.empty() for p in group) for group in said))
    return crossing(parsed.layer.flat_places(parsed.config), made)
