"""The layer contract in eager mode: one thin autograd function, and none at all where nothing needs a gradient.

Buffers that backward writes to do not pass through `save_for_backward`: a hook that moves saved tensors away would
otherwise hand backward a copy to write to, and two forwards in flight would trip its version check.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.autograd import current_graph_task, plain_apply, preserve_version_counter
from octavo._torch.dispatcher import is_batched
from octavo.errors import UnsupportedConfig
from octavo.memory import overlap
from octavo.runtime.caller_memory import begin_write, keep, refuse_grad, refuse_overlap
from octavo.runtime.contract import LAYERS
from octavo.runtime.driven import driven
from octavo.runtime.modified import explain_modified, refuse_modified, title_of
from octavo.runtime.packing import pack, packing
from octavo.runtime.replay.calls import MOST, Latest, fits
from octavo.runtime.replay.layer import Replayed
from octavo.runtime.stage import Stage
from octavo.runtime.transforms import check_transforms, refuse_active, refuse_batched, refuse_tangents

_ANCHOR = torch.empty(0, device="cpu", dtype=torch.float32, requires_grad=True)


# One call, as autograd passes it to `_Run`: all but the tensors that may take a gradient. A plain tuple, because every
# call makes two, and NamedTuples are slower to make.
#   layer, config
#   fields      the layer's inputs
#   singles     which of them are one tensor, the last first: they may take a gradient
#   buffers     that backward writes to
#   watched     a Watched, or None
#   owner       named in messages
#   replay      of forward, where one was found, and
#   tensors     its arguments
_Call = tuple[Replayed, Any, Sequence[Any], Sequence[int], Any, "Unchanged | None", Any, Any, Sequence[Tensor]]
# The part of a call that its backward needs besides saved tensors, `ctx.call`: layer, config, singles, buffers, watched
# and owner as above, then the number of outputs, and the marks of what the layer saved, as `pack` writes them


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor | None, *given: Tensor) -> tuple[Tensor, ...]:
        layer, config, fields, singles, buffers, unchanged, owner, replay, tensors = call
        if replay is not None:
            (outputs, made, marks), results = replay(*tensors)
        else:
            own = list(fields)
            for i, t in zip(singles, given, strict=True):  # autograd may have unwrapped one
                own[i] = t
            (firsts, auxiliary, _), saved = layer.forward_and_save(config, layer.Inputs._make(own), True)
            rest: list[Any] = []
            outputs, made, marks = len(firsts), len(firsts) + len(auxiliary), pack(saved, rest)
            results = (*firsts, *auxiliary, *rest)
        ctx.save_for_backward(*results[made:])
        ctx.call = layer, config, singles, buffers, unchanged, owner, outputs, marks
        ctx.set_materialize_grads(False)
        if made > outputs:
            ctx.mark_non_differentiable(*results[outputs:made])
        found: tuple[Tensor, ...] = results[:made]
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _once(ctx, *grads) if torch.is_grad_enabled() else _backward(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_tangents()


_apply = plain_apply(_Run)


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


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    layer, config, singles, buffers, unchanged, owner, outputs, marks = ctx.call
    if unchanged is not None:
        unchanged.check(title_of(owner, layer))
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        explain_modified(error, title_of(owner, layer), str(config))
        raise
    elsewhere = layer.returned_elsewhere(config)
    latest = None if elsewhere else layer.latest_backward(config, marks, saved, buffers, grads[:outputs])
    if latest is not None:
        replay, tensors = latest
        # a graph of the same layer may be in flight, and have saved the same buffers
        written = tuple([t for t in buffers if t is not None]) if replay.mutates else ()
        if written:
            with preserve_version_counter(written):
                found = replay(*tensors)[1]
        else:
            found = replay(*tensors)[1]
        return None, None, *[found[i] for i in singles]
    if any([g is not None and is_batched(g) for g in grads[:outputs]]):
        refuse_batched()
    grads = tuple(_in_memory(grads[:outputs]))
    for place in elsewhere.values():
        begin_write(buffers[place], current_graph_task())
    written = tuple([t for t in buffers if isinstance(t, Tensor)])
    with preserve_version_counter(written) if written else nullcontext():
        found = layer.backward(config, tuple(packing(marks).unpack(saved)), layer.Buffers._make(buffers), grads)
    if elsewhere:
        whole = [buffers[place] for place in elsewhere.values() if not buffers[place]._is_view()]
        torch.autograd.graph.increment_version(whole)  # a slice's version is the whole allocation's
        found = _in_callers_memory(ctx, found, elsewhere)
    return None, None, *[found[i] for i in singles]


def _in_callers_memory(ctx: Any, found: Sequence[Any], elsewhere: dict[int, int]) -> list[Any]:
    """Return the gradients, with versions of their own for those in the caller's buffers. The node keeps these;
    otherwise autograd would make the buffer a leaf's `.grad`, and add to it the next gradient, which has just been
    written there."""
    given = list(found)
    for i in elsewhere:
        if found[i] is not None:
            given[i] = found[i].data
            keep(found[i], given[i], current_graph_task())
    ctx.kept = [given[i] for i in elsewhere]
    return given


def _in_memory(tensors: Iterable[Any]) -> list[Any]:
    """Materialise tensors for kernels: torch has zeros without memory, and tensors that are the negative of their
    memory's contents."""
    return [_resolved(t) if isinstance(t, Tensor) and (t._is_zerotensor() or t.is_neg()) else t for t in tensors]


def _resolved(t: Tensor) -> Tensor:
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if t._is_zerotensor() else t.resolve_neg()


def _once(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """Run backward under create_graph=True: differentiating its results again raises an error that says why."""
    with torch.no_grad():
        found = _backward(ctx, *grads)
    made = [t for t in found if t is not None]
    leaves = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
    links = [t for t in (*grads, *ctx.saved_tensors, *leaves) if t is not None and t.requires_grad]
    if not made or not links:
        return found
    named = iter(_Twice.apply(len(made), *made, *links))  # type: ignore[no-untyped-call]
    return tuple([None if t is None else next(named) for t in found])


class _Twice(torch.autograd.Function):
    """Returns gradients unchanged. It takes the tensors that they depend on, so that every second backward comes
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


class Known(NamedTuple):
    """A call that ran a replay. Calls that the same settings decide, on tensors of the same layout, run it too."""

    key: str  # of its config
    layer: Replayed
    config: Any
    singles: Sequence[int]
    size: int  # how many tensors it had
    found: Latest


_known: dict[tuple[Any, ...], Known] = {}  # by the settings of stages; `calls.forget` makes all of them unfit


def like(settings: tuple[Any, ...], tensors: list[Tensor]) -> Known | None:
    """Return an earlier call that these settings decided, if its tensors had the layout of these. A stage for it need
    not check anything that the layout tells, and passes it on as `Stage.like`."""
    known = _known.get(settings)
    return known if known is not None and known.size == len(tensors) and fits(known.found, tensors) else None


def _note(stage: Stage, known: Known) -> None:
    """Let `like` find this call."""
    if len(_known) >= MOST:
        _known.clear()
    assert stage.settings is not None
    _known[stage.settings] = known


def run(stage: Stage, x: Any, owner: Any = None) -> tuple[Tensor, ...]:
    """Run one call. Returns outputs, then auxiliary outputs. Messages name the `owner` by its `op_describe()`."""
    call: _Call
    if stage.like is not None:
        known, tensors = stage.like
        call = (
            known.layer, known.config, [x, *stage.inputs], known.singles, stage.buffers, None, owner,
            known.found.replay, tensors,
        )  # fmt: skip
        return _with_gradients(call, x, False) if stage.needs else _without(call)
    layer = driven(LAYERS[stage.name])
    config = layer.config(stage.key)
    fields: list[Any] = [x, *stage.inputs]
    tensors = []
    marks = pack(fields, tensors)
    out = stage.out
    found = layer.latest_forward(config, stage.needs, marks, tensors) if out is None else None
    singles = packing(marks).singles
    if found is None:
        fields = _in_memory(fields)
        if out is not None:
            at = layer.out_place(config)
            assert at is not None
            fields[at] = out
            begin_write(out)
            written = [out, x] if overlap(out, x) else [out]
            torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])  # kernels do not
            singles = packing(pack(fields, [])).singles
    elif stage.settings is not None:
        _note(stage, Known(stage.key, layer, config, singles, len(tensors), found))
    unchanged = Unchanged.now(stage.unchanged) if stage.unchanged else None
    replay = None if found is None else found.replay
    call = layer, config, fields, singles, stage.buffers, unchanged, owner, replay, tensors
    made = _with_gradients(call, x, stage.anchored) if stage.needs else _without(call)
    if out is not None:
        keep(out, made[0])
    return made


def _without(call: _Call) -> tuple[Tensor, ...]:
    """Run a call that needs no gradient."""
    layer, config, fields, _, _, _, _, replay, tensors = call
    check_transforms(fields)
    try:
        with torch.no_grad():
            if replay is not None:
                (_, made, _), results = replay(*tensors)
                found: tuple[Tensor, ...] = results[:made]
                return found
            (outputs, auxiliary, _), _ = layer.forward_and_save(config, layer.Inputs._make(fields), False)
    except RuntimeError as error:
        refuse_active(error)
        raise
    return *outputs, *auxiliary


def _with_gradients(call: _Call, x: Any, anchored: bool) -> tuple[Tensor, ...]:
    """Run a call on x as a node of autograd's graph."""
    layer, config, fields, singles, buffers, _, _, replay, _ = call
    for place in layer.returned_elsewhere(config).values():
        refuse_overlap(buffers[place], fields)
        refuse_grad(buffers[place], x)
    # the last input first: autograd adds the gradients of a tensor that is passed twice in this order, as it does
    # for layers called one by one
    given = [fields[i] for i in singles]
    apply = _Run.apply if replay is None else _apply  # a replay was looked for outside of transforms alone
    try:
        found: tuple[Tensor, ...] = apply(call, _ANCHOR if anchored else None, *given)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        refuse_active(error)
        raise
    return found
