"""The layer contract as nodes of a compiled graph: one differentiable forward node, one backward node, for any layer.

    octavo::run     (Tensor[] tensors, str call) -> Tensor[]              outputs, auxiliary outputs, intermediates
    octavo::run_bwd (Tensor[] tensors, str call, str mask, bool copies) -> Tensor[]    the gradients that were asked for

The tensors of `run` are inputs, then buffers, in reverse: autograd adds the gradients of a tensor that is passed twice
in this order, as it does for layers called one by one.

The call is `layer|presence|buffers|config`: which of the layer's inputs are in the list, which buffers follow them,
and the config's string, led by a digest of this package's sources. A compiler's disk cache keys on the graph, and a
graph that calls the same op with the same string looks the same after `backward` was edited: hence the digest.

A forward that writes y to the caller's memory is two nodes, since an operator that mutates has no gradient:

    octavo::run_into (Tensor[] tensors, Tensor(a!) out, str call) -> (Tensor, ...)    auxiliary outputs and
    intermediates, in as many
                                                                                      places as INTO says
    octavo::attach   (Tensor[] tensors, str call) -> Tensor                           one element that looks like y, and
                                                                                      carries its gradient to run_bwd

Codes leave a node as bytes and scales flat (`layer.flat_places`): bytes have no gradient by dtype, and a flat scale's
size is not specialised for small batches. Writes to buffers are not declared to the compiler: an operator that mutates
has no gradient, and a buffer that passed through forward cannot be mutated by a declared op once two microbatches are
in flight. The backward node writes under a preserved version counter, and is marked to have effects. The forward node
is not: a partitioner would run it in backward too, where its inputs are kept. It raises running amaxes, if it runs a
second time to the same numbers. Other nodes that read or write amaxes declare it (`octavo.scaling.update_operators`),
which keeps them in order. A forward whose results nothing uses does not run in a graph, and raises none.

A gradient in the caller's memory (`dgrad_out`) is therefore no result of the backward node, and a compiler may read it
before the node has run: a partitioner moves a product of such a gradient into the forward graph, where the memory holds
the gradient of an earlier step. So the node returns a copy of it too, and operations of the graph read the copy. So
does the caller, if x is an input of the graph: AOTAutograd gives inputs a grad_fn while it traces.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from octavo._torch.autograd import current_graph_task, preserve_version_counter, saved_tensors_hooks
from octavo._torch.inductor import DIRECT_CALLS, call_directly, is_loaded
from octavo._torch.operators import counts_flops
from octavo._torch.tracing import moves_saved_tensors, while_tracing
from octavo.errors import UnsupportedConfig
from octavo.memory import refuse_shared_memory, span
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Join
from octavo.runtime import call_cache, chain
from octavo.runtime.adapter import Adapter
from octavo.runtime.caller_memory import begin_write, begin_write_at, keep, refuse_overlap
from octavo.runtime.contract import LAYERS, ForwardResult, Layer, pack, packing
from octavo.runtime.digest import DIGEST
from octavo.runtime.modified import explain_modified, title_of
from octavo.runtime.split_backward import KeptGradients, kept, of_pass
from octavo.runtime.stage import Stage
from octavo.runtime.transforms import why_active
from octavo.runtime.written_buffers import leave_in_place

_CODES = torch.float8_e4m3fn, torch.float8_e5m2


class _Crossing(Adapter):
    """A layer as a node runs it: codes leave forward as bytes, and scales flat."""

    def forward(self, config: Any, inputs: Any) -> ForwardResult:
        return _crossing(self.flat_places(config), self.layer.forward(config, inputs))


def _crossing(flat: tuple[int, ...], made: ForwardResult) -> ForwardResult:
    """Convert forward's results to the form in which they leave a node. `flat` are the places of scales among the fresh
    tensors."""
    intermediates = [
        t.as_strided((t.numel(),), (1,)) if t is not None and i in flat else t for i, t in enumerate(made.intermediates)
    ]
    return ForwardResult(*(
        tuple([t.view(torch.uint8) if t is not None and t.dtype in _CODES else t for t in group])
        for group in (made.outputs, made.auxiliary, intermediates)
    ))  # fmt: skip


@cache
def _node(name: str) -> Layer:
    return _Crossing(LAYERS[name])


class NodeCall:
    """A node's call string, parsed, and what its operators do."""

    def __init__(self, text: str) -> None:
        _, name, presence, buffers, key = text.split("|", 4)
        self.is_chain = name == "chain"
        self.layer = _node(name)
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
        return _listed(self.layer.forward(self.config, self.inputs(tensors[::-1])))

    def run_backward(self, mask: str, copies: bool, tensors: list[Tensor]) -> list[Tensor]:
        """Run backward, as it is written, on the tensors of `octavo::run_bwd`. The list is emptied, so that the layer
        can free what was saved."""
        (saved, dys), buffers = self.split(tensors, mask), self.buffers_of(tensors)
        copied = [tensors[at] for at in self.gradient_buffers.values()] if copies else []
        tensors.clear()
        found = self.returned(self.layer.backward(self.config, saved, buffers, dys))
        return [*found, *[t.clone() for t in copied]]

    def refuse(self, tensors: Sequence[Tensor]) -> None:
        """Refuse calls whose backward would write to the wrong memory; `tensors` lists inputs, then buffers."""
        if self.writes:
            if moves_saved_tensors():
                self.leave_in_place(tensors)
            _refuse_recomputation(self)
            self.refuse_overlaps(tensors)

    def leave_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Keep hooks on saved tensors away from the buffers, to which they would hand backward copies. Tensors that
        forward makes and backward fills are no buffers."""
        if self.fills:
            raise UnsupportedConfig(
                "In a graph, saved_tensors_hooks (save_on_cpu) cannot be used with delay_wgrad_compute=True: backward "
                "would leave the operands of dw in a copy. Leave one of the two out, or run the layer in eager mode, "
                "where both work."
            )
        leave_in_place(tensors[self.count : self.count + self.written])

    def begin_writes(self, tensors: Sequence[Tensor]) -> None:
        """Note that this backward writes gradients to buffers of the caller's."""
        for at in self.gradient_buffers.values():
            task = current_graph_task()
            begin_write(tensors[at], task)
            keep(tensors[at], None, task)

    def written_by_backward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of `octavo::run_bwd` that it may write to."""
        return tuple(tensors if self.fills else tensors[: self.written])

    def split(self, tensors: Sequence[Tensor], mask: str) -> tuple[list[Tensor | None], tuple[Tensor, ...]]:
        """Split the tensors after the buffers: those that `save` chose, and a gradient for each output."""
        rest, kept = tensors[self.written :], packing(mask)
        return list(kept.unpack(rest)), tuple(rest[kept.count :])

    def inputs(self, tensors: Sequence[Any]) -> Any:
        """The layer's inputs, from the head of the list."""
        return self.layer.Inputs._make(self.presence.unpack(tensors))

    def inputs_into(self, tensors: Sequence[Any], out: Tensor) -> Any:
        """The layer's inputs, with the caller's memory for y."""
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
            if start < first + nbytes and first < end:
                refuse_shared_memory("out", f"{t.dtype} {tuple(t.shape)}, which an operation of the run takes")

    def refuse_overlaps(self, tensors: Sequence[Tensor]) -> None:
        """Refuse gradient buffers that overlap inputs; `tensors` lists both."""
        for at in self.gradient_buffers.values():
            refuse_overlap(tensors[self.count + at], tensors[: self.count])

    def returned(self, grads: Sequence[Any]) -> list[Any]:
        """The gradients that backward's node returns: none that is another's, or lies in a buffer."""
        return [g for g, theirs in zip(grads, self.theirs, strict=False) if g is not None and not theirs]

    def buffers_of(self, tensors: Sequence[Tensor]) -> Any:
        """The layer's buffers, from the head of the list."""
        return self.layer.graph_buffers(self.config, *self.buffers.unpack(tensors)) if self.written else self.no_buffers

    @cached_property
    def no_buffers(self) -> Any:
        return self.layer.graph_buffers(self.config, *self.buffers.unpack(()))


@lru_cache(maxsize=4096)
def node_call(text: str) -> NodeCall:
    return NodeCall(text)


def _cached(
    parsed: NodeCall, side: str, tensors: list[Tensor], work: Callable[..., list[Tensor]], *decided: Any
) -> list[Tensor]:
    """Run a node through the call cache, or as it is written."""
    own = list(tensors)  # which the work may empty
    if not parsed.is_cached[side]:
        return work(own)
    return list(call_cache.run((parsed, side, *decided), own, lambda tensors: (None, tuple(work(tensors))))[1])


def _listed(made: ForwardResult) -> list[Tensor]:
    """Return outputs, auxiliary outputs and intermediates in a row."""
    return [t for group in made for t in group if t is not None]


@torch.library.custom_op("octavo::run", mutates_args=())
def _run(tensors: list[Tensor], call: str) -> list[Tensor]:
    parsed = node_call(call)
    parsed.refuse(tensors[::-1])
    return _cached(parsed, "forward", tensors, parsed.run)


def _refuse_recomputation(parsed: NodeCall) -> None:
    """Refuse to run forward again where it makes tensors that backward fills: they would be lost."""
    if parsed.fills and saved_tensors_hooks(True):
        raise UnsupportedConfig(
            "In a graph, delay_wgrad_compute=True cannot be used inside torch.utils.checkpoint: the forward that runs "
            "again would take the operands of dw. Leave one of the two out, or run the layer in eager mode."
        )


@_run.register_fake
def _(tensors: list[Tensor], call: str) -> list[Tensor]:
    if is_loaded() and DIRECT_CALLS.is_on():
        _call_directly()
    return _listed(_fakes(node_call(call), tensors[::-1]))


@cache
def _call_directly() -> None:
    """Make Inductor's code call the functions of `octavo.runtime.direct_calls` in place of the two operators. Inductor
    is not imported for this: it was, if it is to compile the graph whose tensors are made up here."""
    call_directly(torch.ops.octavo.run.default, "octavo.runtime.direct_calls.forward", _makes_intermediates)
    call_directly(torch.ops.octavo.run_bwd.default, "octavo.runtime.direct_calls.backward", _makes_fresh_gradients)


def _makes_intermediates(call: str) -> bool:
    """Whether no result of a forward node is a part of other memory, as a user's operation may return one."""
    return node_call(call).is_cached["forward"]


def _makes_fresh_gradients(call: str, mask: str, copies: bool) -> bool:
    return node_call(call).is_cached["backward"]


def _fakes(parsed: NodeCall, tensors: list[Tensor]) -> ForwardResult:
    said = parsed.layer.abstract(parsed.config, parsed.inputs([TensorProto.of(t) for t in tensors]))
    made = ForwardResult(*(tuple(None if p is None else p.empty() for p in group) for group in said))
    return _crossing(parsed.layer.flat_places(parsed.config), made)


@torch.library.custom_op("octavo::run_bwd", mutates_args=())
def _run_bwd(tensors: list[Tensor], call: str, mask: str, copies: bool) -> list[Tensor]:
    parsed = node_call(call)
    parsed.begin_writes(tensors)
    with preserve_version_counter(parsed.written_by_backward(tensors)):
        return _cached(parsed, "backward", tensors, partial(parsed.run_backward, mask, copies), mask, copies)


@_run_bwd.register_fake
def _(tensors: list[Tensor], call: str, mask: str, copies: bool) -> list[Tensor]:
    parsed = node_call(call)
    saved, dys = parsed.split(tensors, mask)
    found = [p.empty() for p in parsed.returned(parsed.layer.abstract_gradients(parsed.config, saved, *dys))]
    return [*found, *[torch.empty_like(tensors[at]) for at in parsed.gradient_buffers.values()]] if copies else found


has_side_effect(torch.ops.octavo.run_bwd.default)


def _set_up(ctx: Any, inputs: tuple[list[Tensor], str], output: list[Tensor]) -> None:
    tensors, call = inputs
    outputs = _save(ctx, tensors[::-1], call, output)
    ctx.mark_non_differentiable(*output[outputs:])


def _save(ctx: Any, tensors: list[Tensor], call: str, made: list[Tensor]) -> int:
    """Save what the layer's `save` chooses out of the inputs and forward's results. Returns the number of outputs."""
    parsed = node_call(call)
    said = parsed.layer.abstract(parsed.config, parsed.inputs([TensorProto.of(t) for t in tensors]))
    rest = iter(made)
    found = ForwardResult(*(tuple(None if p is None else next(rest) for p in group) for group in said))
    saved = parsed.layer.save(parsed.config, parsed.inputs(tensors), found)
    kept = tensors[parsed.count : parsed.count + parsed.written]
    ctx.mask = pack(saved, kept)
    ctx.save_for_backward(*kept)
    ctx.call, ctx.total, ctx.outputs = call, len(tensors), said.outputs
    # without a grad_fn no operation of a graph made x, and none reads its gradient
    ctx.copies = any(tensors[parsed.presence.starts[i]].grad_fn is not None for i in parsed.gradient_buffers)
    ctx.set_materialize_grads(False)
    return len(said.outputs)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    found: list[Tensor | None] = [None] * ctx.total
    if all(g is None for g in grads[: len(ctx.outputs)]):
        return found, None
    parsed = node_call(ctx.call)
    try:
        kept = ctx.saved_tensors
    except RuntimeError as error:
        explain_modified(error, title_of(None, parsed.layer), ctx.call)
        raise
    dys = [_zeros(p) if g is None else g for p, g in zip(ctx.outputs, grads, strict=False)]
    made = torch.ops.octavo.run_bwd([*kept, *dys], ctx.call, ctx.mask, ctx.copies)
    results, copies = iter(made), iter(made[len(made) - len(parsed.gradient_buffers) :])
    places = parsed.presence.starts  # of each input among the tensors
    for i, wanted in enumerate(parsed.layer.wants(parsed.config)):
        if i in parsed.gradient_buffers:
            found[places[i]] = next(copies) if ctx.copies else kept[parsed.gradient_buffers[i]]
        elif wanted and i not in parsed.passed:
            found[places[i]] = next(results)
    for i, other in parsed.passed.items():
        found[places[i]] = found[places[other]] if other >= 0 else dys[-1 - other]
    return found, None


def _zeros(p: TensorProto) -> Tensor:
    return torch.zeros(p.shape, dtype=p.dtype, device=p.device)


def _run_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    """Run backward once, though it may be split in two passes: the node has one operator, which computes all
    gradients. (A graph that is compiled is such a node as a whole.)"""
    dys = tuple(grads[: len(ctx.outputs)])
    if any([t is not None and type(t) is not Tensor for t in dys]):  # a compiler traces
        return _backward(ctx, grads)[0][::-1], None
    wanted, unwanted = of_pass([edge for edge, _ in ctx.next_functions], range(ctx.total))
    earlier: KeptGradients | None = getattr(ctx, "kept_gradients", None)
    if unwanted and earlier is not None and earlier.serve(dys, wanted):
        return list(earlier.take(wanted, ctx.total, "")), None
    found = _backward(ctx, grads)[0][::-1]
    if unwanted:
        ctx.kept_gradients = kept(dys, found, unwanted, {})
    return found, None


_run.register_autograd(_run_backward, setup_context=_set_up)


@counts_flops(torch.ops.octavo.run)
def _(tensors: list[Tensor], call: str, **_: Any) -> int:
    parsed = node_call(call)
    return int(parsed.layer.flops(parsed.config, parsed.inputs(tensors[::-1])))


@counts_flops(torch.ops.octavo.run_bwd)
def _(tensors: list[Tensor], call: str, mask: str, copies: bool, **_: Any) -> int:
    parsed = node_call(call)
    saved, dys = parsed.split(tensors, mask)
    return int(parsed.layer.gradient_flops(parsed.config, saved, *dys))


# -- y in memory of the caller's -----------------------------------------------------------------------------------

# places of each: an operator that mutates returns a fixed number of tensors
INTO = {"run_into": 20, "run_into_chain": 48, "run_into_long_chain": 192}


def _define_into(name: str, places: int) -> Any:
    """Define the operator of this name, which returns as many tensors as it has places."""

    @torch.library.custom_op(
        f"octavo::{name}",
        mutates_args=("out",),
        schema=f"(Tensor[] tensors, Tensor(a!) out, str call) -> ({', '.join(['Tensor'] * places)})",
    )
    def operator(tensors: list[Tensor], out: Tensor, call: str) -> tuple[Tensor, ...]:
        parsed = node_call(call)
        parsed.refuse(tensors)
        parsed.refuse_out(tensors, out.nbytes)
        begin_write_at(tensors[-1], out.nbytes)
        begin_write(out)
        made = parsed.layer.forward(parsed.config, parsed.inputs_into(tensors, out))
        keep(out, out)  # y will be a view of it
        return _in_places(made, out, places)

    @operator.register_fake
    def _(tensors: list[Tensor], out: Tensor, call: str) -> tuple[Tensor, ...]:
        return _in_places(_fakes(node_call(call), tensors), out, places)

    @counts_flops(getattr(torch.ops.octavo, name))
    def _(tensors: list[Tensor], out: Tensor, call: str, **_: Any) -> int:
        parsed = node_call(call)
        return int(parsed.layer.flops(parsed.config, parsed.inputs(tensors)))

    return operator


def _in_places(made: ForwardResult, out: Tensor, places: int) -> tuple[Tensor, ...]:
    """Auxiliary outputs and intermediates, with empty tensors in the places that are left."""
    found = _listed(made._replace(outputs=()))
    return (*found, *[out.new_empty(0) for _ in range(places - len(found))])


for _name, _places in INTO.items():
    _define_into(_name, _places)

# all operators whose schema does not tell everything that they write; docs/compile.md lists what, and why
UNDECLARED_WRITES = [getattr(torch.ops.octavo, name).default for name in ("run", "run_bwd", *INTO)]


@torch.library.custom_op("octavo::attach", mutates_args=())
def _attach(tensors: list[Tensor], call: str) -> Tensor:
    return _anchor(node_call(call), tensors)


@_attach.register_fake
def _(tensors: list[Tensor], call: str) -> Tensor:
    return _anchor(node_call(call), tensors)


def _anchor(parsed: NodeCall, tensors: list[Tensor]) -> Tensor:
    y = parsed.layer.abstract(parsed.config, parsed.inputs([TensorProto.of(t) for t in tensors])).outputs[0]
    return torch.zeros(1, dtype=y.dtype, device=y.device).expand(y.shape)


def _set_up_anchor(ctx: Any, inputs: tuple[list[Tensor], str], output: Tensor) -> None:
    tensors, call = inputs
    parsed = node_call(call)
    _save(ctx, tensors, call, [output, *tensors[parsed.count + parsed.written :]])


_attach.register_autograd(lambda ctx, dy: _backward(ctx, [dy]), setup_context=_set_up_anchor)


# -- calls -----------------------------------------------------------------------------------------------------------


def _call_string(stage: Stage, x: Any, tensors: list[Tensor]) -> str:
    """The string of a call, whose inputs and buffers are added to `tensors`."""
    presence = pack((x, *stage.inputs), tensors)
    call = DIGEST + "|" + stage.name + "|" + presence + "|" + pack(stage.buffers, tensors) + "|" + stage.key
    if why := _unsupported_reason():
        raise UnsupportedConfig(why)
    return call


def run(stage: Stage, x: Any) -> list[Tensor]:
    """Run one call as one node of the graph being traced. Returns outputs, auxiliary outputs and intermediates."""
    tensors: list[Tensor] = []
    call = _call_string(stage, x, tensors)
    found: list[Tensor] = torch.ops.octavo.run(tensors[::-1], call)
    return found


def forward_node(stage: Stage, inputs: Sequence[Any]) -> list[Tensor]:
    """Run the forward of one call as a node of the graph being traced, whose backward the caller runs himself."""
    return run(stage._replace(inputs=tuple(inputs[1:])), inputs[0])


def backward_node(stage: Stage, inputs: Sequence[Any], saved: tuple[Any, ...], grads: Sequence[Tensor]) -> list[Any]:
    """Run the backward of one call as a node of the graph being traced. Return a gradient for each input, None where
    there is none."""
    tensors: list[Tensor] = []
    call = _call_string(stage._replace(inputs=tuple(inputs[1:])), inputs[0], tensors)
    kept: list[Tensor] = []
    pack(stage.buffers, kept)
    mask = pack(saved, kept)
    made = iter(torch.ops.octavo.run_bwd([*kept, *grads], call, mask, False))
    from_node, passed = _gradients(call)
    found = [next(made) if one else None for one in from_node]
    for i, other in passed:
        found[i] = found[other] if other >= 0 else grads[-1 - other]
    return found


@while_tracing
def _gradients(call: str) -> tuple[tuple[bool, ...], tuple[tuple[int, int], ...]]:
    """Return which gradients a backward node returns, and those that are another's."""
    parsed = node_call(call)
    wants = parsed.layer.wants(parsed.config)
    from_node = [wanted and not theirs for wanted, theirs in zip(wants, parsed.theirs, strict=True)]
    return tuple(from_node), tuple(parsed.passed.items())


def run_into(stage: Stage, x: Any, out: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """Run one call as `run` does, with y in `out`. The first result is `out` itself in this shape, as part of the
    graph."""
    tensors: list[Tensor] = []
    call = _call_string(stage, x, tensors)
    name = "run_into" if stage.name != "chain" else _into_chain(stage.key)
    operator = getattr(torch.ops.octavo, name)
    with torch.no_grad():
        # an empty view that tells where `out` is: a compiler may pass a copy of a tensor that is written to
        place = out.detach()[:0]
        made = list(operator([*[t.detach() for t in tensors], place], out, call))
    anchor = torch.ops.octavo.attach([*tensors, *made], call)
    # viewed before it is joined: the compiler would make a later view a leaf, and lose its gradient
    return [Join.apply(out.view(shape), anchor.view(shape)), *made]  # type: ignore[no-untyped-call]


@while_tracing
def _into_chain(key: str) -> str:
    """The operator that has a place for each tensor that this chain makes."""
    config = chain.layer.config(key)
    count = chain.layer.auxiliary(config) + chain.layer.intermediates_size(config)
    found = next((name for name, places in INTO.items() if count <= places), None)
    if found is None:
        raise UnsupportedConfig(
            f"In a graph, a run with memory for y hands at most {max(INTO.values())} tensors to backward, and this run "
            f"of {len(config.stages)} operations {count}. Cut the Sequential into two, or pass no out."
        )
    return found


def sac_save_ops() -> tuple[Callable[..., Any], ...]:
    """Return the operators that a selective activation checkpoint should save.

    A policy that saves them keeps the outputs and codes of Octavo's layers, so that backward does not run their forward
    again.

    Returns:
        The forward operators of all layers, as a checkpoint's policy receives them.

    Example:
        >>> from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
        >>> def policy(context, op, *args, **kwargs):
        ...     saves = op in octavo.sac_save_ops()
        ...     return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE
        >>> layer = octavo.Linear(16, 8, recipe="fp8-block")
        >>> contexts = lambda: create_selective_checkpoint_contexts(policy)
        >>> checkpoint(layer, torch.ones(4, 16), use_reentrant=False, context_fn=contexts).shape
        torch.Size([4, 8])
    """
    return torch.ops.octavo.run.default, *[getattr(torch.ops.octavo, name).default for name in INTO]


@while_tracing
def _unsupported_reason() -> str:
    """The reason why this tracer cannot record a layer; empty if it can."""
    if torch.onnx.is_in_onnx_export():
        return (
            "torch.onnx.export has no operators for Octavo's layers: ONNX knows neither their codes nor their scales. "
            "Call octavo.revert(model) first, which brings torch's own layers back, and export that."
        )
    return why_active()
