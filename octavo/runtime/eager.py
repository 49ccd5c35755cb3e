"""The layer contract in eager mode: one thin autograd function, and none at all where nothing needs a gradient.

Each call asks the call cache (`octavo.runtime.call_cache`) first. What is no hit runs the layer's own functions, and is
recorded there if it may be. A call's tensors are listed once, by `pack`, and go through here as that list.

Buffers that backward writes to do not pass through `save_for_backward`: a hook that moves saved tensors away would
otherwise hand backward a copy to write to, and two forwards in flight would trip its version check.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.autograd import (
    FunctionNode,
    current_graph_task,
    plain_apply,
    preserve_version_counter,
    release_saved_tensors,
    will_execute,
)
from octavo._torch.dispatcher import is_batched
from octavo.errors import UnsupportedConfig
from octavo.memory import overlap
from octavo.runtime import call_cache
from octavo.runtime.call_cache import Hit, Replay, Results
from octavo.runtime.caller_memory import begin_write, keep, refuse_grad, refuse_overlap
from octavo.runtime.contract import LAYERS, Layer, Packing, Tensors, pack, packing
from octavo.runtime.gradient_targets import LazyTarget, Target
from octavo.runtime.modified import explain_modified, refuse_modified, title_of
from octavo.runtime.split_backward import KeptGradients, deferring, kept, of_pass
from octavo.runtime.stage import Stage
from octavo.runtime.transforms import check_transforms, refuse_active, refuse_batched, refuse_tangents

DY_CODES = "octavo_dy_codes"  # attribute of a tensor in the place of a dy that arrives as codes: its QTensor
_ANCHOR = torch.empty(0, device="cpu", dtype=torch.float32, requires_grad=True)


class Prepared(NamedTuple):
    """A layer and a config, with the answers of the layer that this config decides."""

    layer: Layer
    config: Any
    key: str  # of the config
    gradient_buffers: dict[int, int]  # places of the caller's buffers, by the input whose gradient lies in one
    cached_forward: bool  # whether the layout of the tensors decides the launches of forward
    cached_backward: bool


@lru_cache(maxsize=4096)
def _prepared(layer: Layer, key: str) -> Prepared:
    config = layer.config(key)
    forward, backward = (layer.decided_by_layout(config, side) for side in ("forward", "backward"))
    return Prepared(layer, config, key, layer.gradients_in_buffers(config), forward, backward)


# One call, as autograd passes it to `_Run`: all but the tensors that may take a gradient. A plain tuple, because every
# call makes two, and NamedTuples are slower to make.
#   prepared    layer and config
#   packed      the layer's inputs as places of `tensors`; those that are one tensor may take a gradient
#   tensors     the layer's inputs, flat
#   buffers     that backward writes to
#   unchanged   an Unchanged, or None
#   owner       named in messages
#   replay      of forward, if the call is a hit
#   hit_key     by which the next call may be one; None where the cache is not asked
_Call = tuple[
    Prepared, Packing, list[Any], Sequence[Any], "Unchanged | None", Any, Replay | None, tuple[Any, ...] | None
]
# The part of a call that its backward needs besides saved tensors, `ctx.call`: prepared, packed, buffers, unchanged and
# owner as above, then the number of outputs, and the marks of what the layer saved, as `pack` writes them


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor | None, *singles: Tensor) -> tuple[Tensor, ...]:
        prepared, packed, tensors, buffers, unchanged, owner, replay, hit_key = call
        if replay is not None:
            (outputs, made, marks), results = replay(tensors)
        else:
            for place, t in zip(packed.single_places, singles, strict=True):  # autograd may have unwrapped one
                tensors[place] = t
            (outputs, made, marks), results = _forward(prepared, packed, True, hit_key, tensors)
        ctx.save_for_backward(*results[made:])
        ctx.call = prepared, packed, buffers, unchanged, owner, outputs, marks
        ctx.set_materialize_grads(False)
        if made > outputs:
            ctx.mark_non_differentiable(*results[outputs:made])
        return results[:made]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return _once(ctx, *grads)
        try:
            takes_all = all(map(will_execute, [node for node, _ in ctx.next_functions if node is not None]))
        except RuntimeError:  # torch's: `_pass` asks for each
            takes_all = False
        gradients = _backward(ctx, ctx.call[2], *grads) if takes_all else _pass(ctx, *grads)
        return None, None, *[gradients[i] for i in ctx.call[1].singles]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_tangents()


_apply = plain_apply(_Run)

# -- forward -----------------------------------------------------------------------------------------------------------


def run(stage: Stage, x: Any, owner: Any = None) -> tuple[Tensor, ...]:
    """Run one call. Return outputs, then auxiliary outputs. Messages name the `owner` by its `op_describe()`."""
    prepared, out = _prepared(LAYERS[stage.name], stage.key), stage.out
    fields: list[Any] = [x, *stage.inputs]
    # a write to memory that a graph in flight has saved must be noticed: the versions say so
    if out is not None:
        at = prepared.layer.out_place(prepared.config)
        assert at is not None
        fields[at] = out
        begin_write(out)
        written = [out, x] if overlap(out, x) else [out]
        torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])  # kernels do not
    tensors: list[Any] = []
    packed = packing(pack(fields, tensors))
    hit_key, hit = None, None
    if prepared.cached_forward and out is None and tensors and tensors[0].device.type in call_cache.DEVICES:
        hit_key = stage.settings  # the operation has looked itself up by these
        if hit_key is None:
            x_and_weight = tensors[0].shape, tensors[1 % len(tensors)].shape  # which tell most kinds of calls apart
            hit_key = (prepared.layer, prepared.key, stage.needs, packed.marks, *x_and_weight)
            hit = call_cache.find(hit_key, tensors)
    if hit is None:
        tensors = [_in_memory(t) if t._is_zerotensor() or t.is_neg() else t for t in tensors]
    unchanged = Unchanged.now(stage.unchanged) if stage.unchanged else None
    replay = None if hit is None else hit.replay
    call = prepared, packed, tensors, stage.buffers, unchanged, owner, replay, hit_key
    if not stage.needs:
        made = _without_gradients(call)
    else:
        for place in prepared.gradient_buffers.values():
            refuse_overlap(stage.buffers[place], fields)
            refuse_grad(stage.buffers[place], x)
        made = _with_gradients(call, _ANCHOR if stage.writes_in_backward else None)
    if out is not None:
        keep(out, made[0])
    return made


def run_hit(hit: Hit, tensors: list[Any], buffers: Sequence[Any], owner: Any = None) -> tuple[Tensor, ...]:
    """Run a call that is a hit, as `run` does: `tensors` are x and the tensors of its `Lookup`."""
    prepared, packed, saving = hit.context
    call = prepared, packed, tensors, buffers, None, owner, hit.replay, None
    return _with_gradients(call, None) if saving else _without_gradients(call)


def _with_gradients(call: _Call, anchor: Tensor | None) -> tuple[Tensor, ...]:
    """Run a call as a node of autograd's graph."""
    # the last input first: autograd adds the gradients of a tensor that is passed twice in this order, as it does
    # for layers called one by one
    singles = [call[2][place] for place in call[1].single_places]
    apply = _Run.apply if call[6] is None else _apply  # there are no hits inside of transforms
    try:
        made: tuple[Tensor, ...] = apply(call, anchor, *singles)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        refuse_active(error)
        raise
    return made


def _without_gradients(call: _Call) -> tuple[Tensor, ...]:
    """Run a call that needs no gradient."""
    prepared, packed, tensors, _, _, _, replay, hit_key = call
    check_transforms(tensors)
    try:
        with torch.no_grad():
            if replay is None:
                (_, made, _), results = _forward(prepared, packed, False, hit_key, tensors)
            else:
                (_, made, _), results = replay(tensors)
    except RuntimeError as error:
        refuse_active(error)
        raise
    return results[:made]


def _forward(
    prepared: Prepared, packed: Packing, saving: bool, hit_key: tuple[Any, ...] | None, tensors: list[Any]
) -> Results:
    """Run forward: through the call cache if there is a `hit_key`, else as it is written. Return the number of outputs,
    that of outputs and auxiliary outputs, and the marks of what is saved; then outputs, auxiliary outputs and saved
    tensors."""
    layer, config = prepared.layer, prepared.config
    if hit_key is not None:
        decided = layer, "save" if saving else "forward", prepared.key, packed.marks
        work = partial(_forward, prepared, packed, saving, None)
        return call_cache.run(decided, tensors, work, hit_key, (prepared, packed, saving))
    row = tuple(tensors)
    inputs = layer.Inputs._make([None if place is None else row[place] for place in packed.places])
    made, saved = layer.forward_and_save(config, inputs, saving)
    results = [*made.outputs, *made.auxiliary]
    outputs, count = len(made.outputs), len(results)
    return (outputs, count, pack(saved, results) if saving else ""), tuple(results)


def _in_memory(t: Tensor) -> Tensor:
    """Materialise a tensor for kernels: torch has zeros without memory, and tensors that are the negative of their
    memory's contents."""
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if t._is_zerotensor() else t.resolve_neg()


# -- backward ----------------------------------------------------------------------------------------------------------


def _pass(ctx: Any, *grads: Tensor | None) -> Tensors:
    """Compute the gradients that the pass that runs takes: from what an earlier one kept, or anew."""
    prepared, packed, buffers, _, owner, outputs, _ = ctx.call
    inputs, nodes = packed.singles, [node for node, _ in ctx.next_functions]
    wanted, unwanted = of_pass(nodes[len(nodes) - len(inputs) :], inputs)
    if not unwanted:
        return _backward(ctx, buffers, *grads)
    earlier: KeptGradients | None = getattr(ctx, "kept_gradients", None)
    dys = grads[:outputs]
    if earlier is not None and earlier.serve(dys, wanted):
        return earlier.take(wanted, len(prepared.layer.wants(prepared.config)), title_of(owner, prepared.layer))
    given, deferred = deferring(prepared.layer, prepared.config, buffers, unwanted)
    gradients = _backward(ctx, given, *grads)
    ctx.kept_gradients = kept(dys, gradients, unwanted, deferred)
    return tuple([None if i in unwanted else g for i, g in enumerate(gradients)])


def _backward(ctx: Any, buffers: Sequence[Any], *grads: Tensor | None) -> Tensors:
    """Compute one gradient for each input of the layer, None where there is none."""
    prepared, _, _, unchanged, owner, outputs, marks = ctx.call
    if unchanged is not None:
        unchanged.check(title_of(owner, prepared.layer))
    try:
        saved = list(ctx.saved_tensors)
    except RuntimeError as error:
        explain_modified(error, title_of(owner, prepared.layer), str(prepared.config))
        raise
    if isinstance(ctx, FunctionNode) and not torch.is_grad_enabled():  # `_once` (create_graph=True) needs them again
        release_saved_tensors(ctx)
    gradient_buffers, dys, hit_key = prepared.gradient_buffers, grads[:outputs], None
    codes = getattr(dys[0], DY_CODES, None)
    if codes is not None:
        return _backward_of_codes(prepared, marks, saved, buffers, dys, codes)
    if prepared.cached_backward and not gradient_buffers:
        hit_key, hit, tensors = _found(prepared, marks, saved, buffers, dys)
        if hit is not None:
            saved.clear()
            # a graph of the same layer may be in flight, and have saved the same buffers
            mutated = tuple([t for t in buffers if t is not None]) if hit.replay.mutates else ()  # type: ignore[attr-defined]
            with preserve_version_counter(mutated) if mutated else nullcontext():
                replayed: Tensors = hit.replay(tensors)[1]
            return replayed
        del tensors
    if any([g is not None and is_batched(g) for g in dys]):
        refuse_batched()
    dys = tuple([_in_memory(g) if g is not None and (g._is_zerotensor() or g.is_neg()) else g for g in dys])
    for place in gradient_buffers.values():
        begin_write(buffers[place], current_graph_task())
    written = tuple([t for t in buffers if isinstance(t, Tensor)])
    with preserve_version_counter(written) if written else nullcontext():
        gradients = _backward_of(prepared, marks, saved, buffers, dys, hit_key)
    if gradient_buffers:
        whole = [buffers[place] for place in gradient_buffers.values() if not buffers[place]._is_view()]
        torch.autograd.graph.increment_version(whole)  # a slice's version is the whole allocation's
        gradients = tuple(_in_callers_memory(ctx, gradients, gradient_buffers))
    return gradients


def _backward_of_codes(
    prepared: Prepared, marks: str, saved: list[Tensor], buffers: Sequence[Any], dys: Tensors, codes: Any
) -> Tensors:
    """Run backward for a dy that arrived as codes, of which the transpose is dw's operand; as it is written, because a
    recording has no place for them."""
    layer: Any = prepared.layer
    written = tuple([t for t in buffers if isinstance(t, Tensor)])
    with preserve_version_counter(written) if written else nullcontext():
        fields, own = _taken(packing(marks), saved), layer.Buffers._make(buffers)
        pair = codes, codes.transpose() if prepared.config.wants_dw else None
        gradients: Tensors = layer.backward(prepared.config, fields, own, dys, codes=pair)
    return gradients


def _found(
    prepared: Prepared, marks: str, saved: Sequence[Tensor], buffers: Sequence[Any], dys: Sequence[Any]
) -> tuple[tuple[Any, ...] | None, Hit | None, list[Any]]:
    """Return the key by which this backward may be a hit, or None; the hit, or None; and all of its tensors."""
    first: Any = saved[0] if saved else dys[0]
    if first is None or first.device.type not in call_cache.DEVICES:
        return None, None, []
    tensors = [*saved, *[t for t in buffers if t is not None], *dys]
    has = tuple([t is None for t in buffers])
    shape = None if dys[-1] is None else dys[-1].shape
    hit_key = (prepared.layer, "backward", prepared.key, marks, has, len(tensors), first.shape, shape)
    # guards refuse what is no tensor: a target among the buffers, a gradient that is None
    return hit_key, call_cache.find(hit_key, tensors), tensors


def _backward_of(
    prepared: Prepared, marks: str, saved: list[Tensor], buffers: Sequence[Any], dys: Tensors,
    hit_key: tuple[Any, ...] | None,
) -> Tensors:  # fmt: skip
    """Run backward: through the call cache if there is a `hit_key`, else as it is written. The list of saved tensors is
    emptied: no frame but the layer's keeps them."""
    layer, config = prepared.layer, prepared.config
    # without a gradient of every output there may be a buffer that the layer does not write to
    opened = None if hit_key is None or any([g is None for g in dys]) else _opened(buffers)
    if opened is None:
        return layer.backward(config, _taken(packing(marks), saved), layer.Buffers._make(buffers), dys)
    places, modes = opened
    count = len(saved)
    tensors: list[Any] = [*saved]
    saved.clear()
    more = packing(pack((*places, *dys), tensors))

    def work(tensors: list[Any]) -> Results:
        fields = more.unpack(tensors[count:])
        del tensors[count:]
        named = [Target(t, mode) if mode else t for t, mode in zip(fields, modes, strict=False)]
        own, grads = layer.Buffers._make(named), tuple(fields[len(modes) :])
        # no name and no star before what was saved: either would keep it
        return None, tuple(layer.backward(config, _taken(packing(marks), tensors), own, grads))

    decided = layer, "backward", prepared.key, f"{marks},{more.marks}" if marks else more.marks, *modes
    # without a target among the buffers the recording does all that there is to do
    if not any(modes):
        return call_cache.run(decided, tensors, work, hit_key)[1]
    return _written(buffers, places, lambda: call_cache.run(decided, tensors, work)[1])


def _taken(packed: Packing, tensors: list[Any]) -> list[Any]:
    """Return the fields that the list holds, and empty it. The layer may empty the fields in turn: where torch.compile
    evaluates frames, a caller's stack keeps each argument until the call returns."""
    fields = list(packed.unpack(tensors))
    tensors.clear()
    return fields


def _opened(buffers: Sequence[Any]) -> tuple[list[Any], list[str]] | None:
    """Return the tensors of each buffer, and the mode of each that is a target. None where a buffer is something else,
    or has to be looked up when there is a gradient to write to it."""
    places, modes = list[Any](), list[str]()
    for t in buffers:
        target = t.find() if isinstance(t, LazyTarget) and t.is_there() else t
        if isinstance(target, Target):
            places.append(target.buffers)
            modes.append(target.mode)
        elif target is None or isinstance(target, Tensor):
            places.append(target)
            modes.append("")
        else:
            return None
    return places, modes


def _written(buffers: Sequence[Any], places: Sequence[Any], work: Callable[[], Tensors]) -> Tensors:
    """Call work(), preserving the targets' versions, and note that the targets were written to. The layer does both
    itself where it runs, but a recording does not contain them."""
    with preserve_version_counter(tuple([t for place in places if isinstance(place, tuple) for t in place])):
        gradients = work()
    for t in buffers:
        if isinstance(t, LazyTarget):
            t.done()
    return gradients


class Unchanged(NamedTuple):
    """Tensors that share memory with a saved tensor whose version is its own: a write to them does not advance it."""

    tensors: Sequence[Tensor]
    versions: list[int]

    @classmethod
    def now(cls, tensors: Sequence[Tensor]) -> "Unchanged":
        return cls(tensors, [t._version for t in tensors])

    def check(self, title: str) -> None:
        for t, version in zip(self.tensors, self.versions, strict=True):
            if t._version != version:
                refuse_modified(title, f"a weight of its own, {t.dtype} {tuple(t.shape)}", version, t._version)


def _in_callers_memory(ctx: Any, found: Sequence[Any], gradient_buffers: dict[int, int]) -> list[Any]:
    """Return the gradients, with versions of their own for those in the caller's buffers. The node keeps these;
    otherwise autograd would make the buffer a leaf's `.grad`, and add to it the next gradient, which has just been
    written there."""
    given = list(found)
    for i in gradient_buffers:
        if found[i] is not None:
            given[i] = found[i].data
            keep(found[i], given[i], current_graph_task())
    ctx.kept = [given[i] for i in gradient_buffers]
    return given


def _once(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """Run backward under create_graph=True: differentiating its results again raises an error that says why."""
    with torch.no_grad():
        found = _Run.backward(ctx, *grads)
    made = [t for t in found if t is not None]
    leaves = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
    links = [t for t in (*grads, *ctx.saved_tensors, *leaves) if t is not None and t.requires_grad]
    if not made or not links:
        return found
    named = iter(_Twice.apply(len(made), *made, *links))  # type: ignore[no-untyped-call]
    return tuple([None if t is None else next(named) for t in found])


class _Twice(torch.autograd.Function):
    """Return gradients unchanged. It takes the tensors that they depend on, so that every second backward comes
    here."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([t.detach() for t in tensors[:number]])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedConfig(
            "Octavo's layers are differentiated once, and this backward differentiates one of their gradients again "
            "(create_graph=True). Run the layers of such a loss in plain torch: octavo.revert(model)."
        )
