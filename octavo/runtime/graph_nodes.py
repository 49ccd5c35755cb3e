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
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from octavo._torch.autograd import preserve_version_counter
from octavo._torch.inductor import DIRECT_CALLS, call_directly, is_loaded
from octavo._torch.operators import counts_flops
from octavo._torch.tracing import while_tracing
from octavo.errors import UnsupportedConfig
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Join
from octavo.runtime import chain
from octavo.runtime.caller_memory import begin_write, begin_write_at, keep
from octavo.runtime.contract import ForwardResult, pack
from octavo.runtime.digest import DIGEST
from octavo.runtime.eager import DY_CODES
from octavo.runtime.modified import explain_modified, title_of
from octavo.runtime.node_call import NodeCall, cached, fakes, listed, node_call
from octavo.runtime.split_backward import KeptGradients, kept, of_pass
from octavo.runtime.stage import Stage
from octavo.runtime.transforms import why_active


@torch.library.custom_op("octavo::run", mutates_args=())
def _run(tensors: list[Tensor], call: str) -> list[Tensor]:
    parsed = node_call(call)
    # at run time: hooks and memory are those of the call, not of the trace
    parsed.refuse(tensors[::-1])
    return cached(parsed, "forward", tensors, parsed.run)


@_run.register_fake
def _(tensors: list[Tensor], call: str) -> list[Tensor]:
    if is_loaded() and DIRECT_CALLS.is_on():
        _call_directly()
    return listed(fakes(node_call(call), tensors[::-1]))


@cache
def _call_directly() -> None:
    """Make Inductor's code call the functions of `octavo.runtime.direct_calls` in place of the two operators. Inductor
    is not imported for this: it was, if it is to compile the graph whose tensors are made up here."""
    forward, backward = torch.ops.octavo.run.default, torch.ops.octavo.run_bwd.default
    # calls of which no result is a part of other memory, as a user's operation may return one
    call_directly(forward, "octavo.runtime.direct_calls.forward", lambda call: node_call(call).is_cached["forward"])
    call_directly(
        backward, "octavo.runtime.direct_calls.backward",
        lambda call, mask, copies: node_call(call).is_cached["backward"],
    )  # fmt: skip


@torch.library.custom_op("octavo::run_bwd", mutates_args=())
def _run_bwd(tensors: list[Tensor], call: str, mask: str, copies: bool) -> list[Tensor]:
    parsed = node_call(call)
    parsed.begin_writes(tensors)
    # a forward that is in flight may have saved the same buffers, and would refuse to go on
    with preserve_version_counter(parsed.written_by_backward(tensors)):
        return cached(parsed, "backward", tensors, partial(parsed.run_backward, mask, copies), mask, copies)


@_run_bwd.register_fake
def _(tensors: list[Tensor], call: str, mask: str, copies: bool) -> list[Tensor]:
    parsed = node_call(call)
    saved, dys = parsed.split(tensors, mask)
    found = [p.empty() for p in parsed.returned(parsed.layer.abstract_gradients(parsed.config, saved, *dys))]
    return [*found, *[torch.empty_like(tensors[at]) for at in parsed.gradient_buffers.values()]] if copies else found


# a backward whose gradients nothing uses still writes to main_grad and the running amax
has_side_effect(torch.ops.octavo.run_bwd.default)


def _set_up(ctx: Any, inputs: tuple[list[Tensor], str], output: list[Tensor]) -> None:
    tensors, call = inputs
    outputs = _save(ctx, tensors[::-1], call, output)
    ctx.mark_non_differentiable(*output[outputs:])


def _save(ctx: Any, tensors: list[Tensor], call: str, made: list[Tensor]) -> int:
    """Save what the layer's `save` chooses out of the inputs and forward's results. Return the number of outputs."""
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
    # or autograd would allocate zeros for every output without a gradient
    ctx.set_materialize_grads(False)
    return len(said.outputs)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    found: list[Tensor | None] = [None] * ctx.total
    # only auxiliary outputs were used, which carry no gradient
    if all(g is None for g in grads[: len(ctx.outputs)]):
        return found, None
    parsed = node_call(ctx.call)
    try:
        kept = ctx.saved_tensors
    except RuntimeError as error:
        explain_modified(error, title_of(None, parsed.layer), ctx.call)
        raise
    # a node's tensors are fixed when it is traced: an output without a gradient counts as zero
    given, mask = zip(ctx.outputs, grads, strict=False), ctx.mask
    dys = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) if g is None else g for p, g in given]
    codes = getattr(grads[0], DY_CODES, None)
    if codes is not None:  # of dy, which is then a tensor in its place
        dys, mask = [*dys, *codes.tensors()], f"{ctx.mask}|{codes.spec.key}"
    made = torch.ops.octavo.run_bwd([*kept, *dys], ctx.call, mask, ctx.copies)
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
        # a later write to this memory is an error of the program that backward must notice
        keep(out, out)  # y will be a view of it
        return _in_places(made, out, places)

    @operator.register_fake
    def _(tensors: list[Tensor], out: Tensor, call: str) -> tuple[Tensor, ...]:
        return _in_places(fakes(node_call(call), tensors), out, places)

    @counts_flops(getattr(torch.ops.octavo, name))
    def _(tensors: list[Tensor], out: Tensor, call: str, **_: Any) -> int:
        parsed = node_call(call)
        return int(parsed.layer.flops(parsed.config, parsed.inputs(tensors)))

    return operator


def _in_places(made: ForwardResult, out: Tensor, places: int) -> tuple[Tensor, ...]:
    """Return auxiliary outputs and intermediates, with empty tensors in the places that are left."""
    found = listed(made._replace(outputs=()))
    return (*found, *[out.new_empty(0) for _ in range(places - len(found))])


for _name, _places in INTO.items():
    _define_into(_name, _places)

# all operators whose schema does not tell everything that they write; docs/compile.md lists what, and why
UNDECLARED_WRITES = [getattr(torch.ops.octavo, name).default for name in ("run", "run_bwd", *INTO)]


@torch.library.custom_op("octavo::attach", mutates_args=())
def _attach(tensors: list[Tensor], call: str) -> Tensor:
    return _anchor(node_call(call), tensors)


_attach.register_fake(lambda tensors, call: _anchor(node_call(call), tensors))


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
    """Return the string of a call, whose inputs and buffers are added to `tensors`."""
    presence = pack((x, *stage.inputs), tensors)
    call = DIGEST + "|" + stage.name + "|" + presence + "|" + pack(stage.buffers, tensors) + "|" + stage.key
    if why := _unsupported_reason():
        raise UnsupportedConfig(why)
    return call


def run(stage: Stage, x: Any) -> list[Tensor]:
    """Run one call as one node of the graph being traced. Return outputs, auxiliary outputs and intermediates."""
    tensors: list[Tensor] = []
    call = _call_string(stage, x, tensors)
    return torch.ops.octavo.run(tensors[::-1], call)


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
    # an operator that mutates has no gradient: `attach` carries it
    with torch.no_grad():
        # an empty view that tells where `out` is: a compiler may pass a copy of a tensor that is written to
        place = out.detach()[:0]
        made = list(operator([*[t.detach() for t in tensors], place], out, call))
    anchor = torch.ops.octavo.attach([*tensors, *made], call)
    # viewed before it is joined: the compiler would make a later view a leaf, and lose its gradient
    return [Join.apply(out.view(shape), anchor.view(shape)), *made]  # type: ignore[no-untyped-call]


@while_tracing
def _into_chain(key: str) -> str:
    """Return the operator that has a place for each tensor that this chain makes."""
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
    """Return the reason why this tracer cannot record a layer; empty if it can."""
    if torch.onnx.is_in_onnx_export():
        return (
            "torch.onnx.export has no operators for Octavo's layers: ONNX knows neither their codes nor their scales. "
            "Call octavo.revert(model) first, which brings torch's own layers back, and export that."
        )
    return why_active()
