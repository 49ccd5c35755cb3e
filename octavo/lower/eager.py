"""The layer contract in eager mode: one thin autograd function, and none at all where nothing needs a gradient.

What backward writes besides its results does not pass through `save_for_backward`: a hook that moves saved tensors
away would otherwise hand backward a copy to write to, and two forwards in flight would trip its version check.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.autograd import current_graph_task, preserve_version_counter
from octavo._torch.dispatch import is_batched
from octavo.errors import UnsupportedConfig
from octavo.layers.contract import Layer
from octavo.lower.caller_memory import begin_write, keep, refuse_grad, refuse_overlap
from octavo.lower.modified import explain_modified, refuse_modified, title_of
from octavo.lower.replay import calls as tape
from octavo.lower.transforms import check_transforms, refuse_active, refuse_batched, refuse_tangents
from octavo.memory import overlap
from octavo.wgrad.targets import LazyTarget, Target

_ANCHOR = torch.empty(0, requires_grad=True)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: Layer, config: Any, buffers: Any, anchor: Tensor | None, watched: Any, owner: Any, *inputs: Any
    ) -> tuple[Tensor, ...]:
        outputs, extras, saved, made = _forward(layer, config, layer.Inputs._make(inputs[::-1]), True)
        ctx.save_for_backward(*saved)
        ctx.call = layer, config, buffers, len(outputs), made, watched, owner
        ctx.set_materialize_grads(False)
        if extras:
            ctx.mark_non_differentiable(*extras)
        return *outputs, *extras

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _once(ctx, *grads) if torch.is_grad_enabled() else _backward(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_tangents()


Tensors = Sequence[Tensor | None]


class Watched(NamedTuple):
    """Tensors in whose memory a saved one lies that has a version of its own: a write to them is not seen by its."""

    tensors: Sequence[Tensor]
    versions: list[int]

    @classmethod
    def now(cls, tensors: Sequence[Tensor]) -> "Watched":
        return cls(tensors, [t._version for t in tensors])

    def check(self, title: str) -> None:
        for t, version in zip(self.tensors, self.versions, strict=True):
            if t._version != version:
                refuse_modified(title, f"a weight of its own, {t.dtype} {tuple(t.shape)}", version, t._version)


class _Made(NamedTuple):
    """How what forward saved lies: tensors that it made follow from the kind of call. Those that it was given are their
    owners', who may give them other memory until backward."""

    kind: int | None
    known: int  # how many of the saved tensors forward made
    order: tuple[int, ...]  # all of them, those first
    places: tuple[Any, ...]  # where those are

    def still(self, saved: Tensors) -> bool:
        """Whether they are where they were: hooks on what is saved may bring others back."""
        return _places(saved, self.order[: self.known]) == self.places


def _places(saved: Tensors, order: tuple[int, ...]) -> tuple[Any, ...]:
    found = [saved[i] for i in order]
    return tuple([None if t is None else (t.data_ptr(), t.stride()) for t in found])


def _unknown(saved: Tensors) -> _Made:
    return _Made(None, 0, tuple(range(len(saved))), ())


def _forward(layer: Layer, config: Any, inputs: Any, saving: bool) -> tuple[Any, Any, Any, _Made]:
    """Outputs, extras, and what backward needs if it is `saving`: from a tape, if there is one."""
    if not layer.replays(config, "forward") or (layer.takes_memory and inputs.out is not None):
        now = _forward_now(layer, config, inputs, saving)
        return *now, _unknown(now[2])
    tensors, sizes = list[Tensor | None](), list[int]()
    for field in inputs:
        if isinstance(field, tuple):
            sizes.append(len(field))
            tensors += field
        else:
            sizes.append(-1)
            tensors.append(field)

    def work(tensors: Tensors) -> tuple[Any, Tensors]:
        rest = iter(tensors)
        fields = [next(rest) if n < 0 else tuple([next(rest) for _ in range(n)]) for n in sizes]
        outputs, extras, saved = _forward_now(layer, config, layer.Inputs._make(fields), saving)
        given = {id(t) for t in tensors}
        own = [i for i, t in enumerate(saved) if t is not None and id(t) not in given]
        order = (*own, *[i for i in range(len(saved)) if i not in own])
        return (len(outputs), len(outputs) + len(extras), len(own), order), (*outputs, *extras, *saved)

    (first, second, known, order), found, kind = tape.call((config.key, saving, *sizes), tensors, work)
    saved = found[second:]
    known = 0 if kind is None else known
    return found[:first], found[first:second], saved, _Made(kind, known, order, _places(saved, order[:known]))


def _forward_now(layer: Layer, config: Any, inputs: Any, saving: bool) -> tuple[Any, Any, Any]:
    made, saved = layer.forward_and_save(config, inputs, saving)
    return made.outputs, made.extras, saved if saving else ()


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    layer, config, buffers, outputs, made, watched, owner = ctx.call
    if watched is not None:
        watched.check(title_of(owner, layer))
    if any([g is not None and is_batched(g) for g in grads[:outputs]]):
        refuse_batched()
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        explain_modified(error, title_of(owner, layer))
        raise
    grads = tuple([None if g is None else _in_memory(g) for g in grads[:outputs]])
    elsewhere = layer.returned_elsewhere(config)
    for place in elsewhere.values():
        begin_write(buffers[place], current_graph_task())
    # a graph of the same layer may be in flight, and have the same buffers among what it saved
    written = tuple([t for t in buffers if isinstance(t, Tensor)])
    with preserve_version_counter(written) if written else nullcontext():
        if layer.replays(config, "backward") and _are_tensors(buffers) and not any([g is None for g in grads]):
            made = made if made.still(saved) else _unknown(saved)
            found = _replayed(layer, config, saved, buffers, grads, made)
        else:
            found = layer.backward(config, saved, buffers, grads)
    if elsewhere:
        whole = [buffers[place] for place in elsewhere.values() if not buffers[place]._is_view()]
        torch.autograd.graph.increment_version(whole)  # a slice's version is the whole allocation's
        found = _in_callers_memory(ctx, found, elsewhere)
    return None, None, None, None, None, None, *found[::-1]


def _in_callers_memory(ctx: Any, found: Sequence[Any], elsewhere: dict[int, int]) -> list[Any]:
    """Gradients, those in buffers of the caller's with versions of their own. The node keeps these, or autograd would
    make the buffer a leaf's `.grad`, and add the next gradient to it where that one has just been written."""
    given = list(found)
    for i in elsewhere:
        if found[i] is not None:
            given[i] = found[i].data
            keep(found[i], given[i], current_graph_task())
    ctx.kept = [given[i] for i in elsewhere]
    return given


def _in_memory(t: Tensor) -> Tensor:
    """A kernel reads memory: torch has zeros that have none, and tensors that are the negative of what is in theirs."""
    if t._is_zerotensor():
        return torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    return t.resolve_neg() if t.is_neg() else t


def _are_tensors(buffers: Any) -> bool:
    """Or can be, before there is anything to write to them."""
    return all([t is None or isinstance(t, Tensor) or (isinstance(t, LazyTarget) and t.is_there()) for t in buffers])


def _replayed(layer: Layer, config: Any, saved: Tensors, buffers: Any, grads: Tensors, made: _Made) -> Tensors:
    """What the layer's backward returns, with a gradient for each output: from a tape, if there is one."""
    modes = [t.mode if isinstance(t, LazyTarget) else "" for t in buffers]
    # of one weight: where there are several, nothing replays
    written = [t.find().buffers[0] if isinstance(t, LazyTarget) else t for t in buffers]
    end = len(saved) + len(written)

    def work(tensors: Tensors) -> tuple[None, Tensors]:
        own: list[Tensor | None] = [None] * len(saved)
        for i, t in zip(made.order, tensors, strict=False):
            own[i] = t
        named = map(_target, tensors[len(saved) : end], modes)
        return None, layer.backward(config, tuple(own), layer.Buffers._make(named), tuple(tensors[end:]))

    tensors = [*[saved[i] for i in made.order], *written, *grads]
    into = [t for t, mode in zip(written, modes, strict=True) if mode]
    with preserve_version_counter(tuple(into)) if into else nullcontext():
        found = tape.call((config.key, "backward", made.kind, *modes), tensors, work, made.known).found
    for t in buffers:
        if isinstance(t, LazyTarget):
            t.done()
    return found


def _target(t: Tensor | None, mode: str) -> Any:
    return Target([t], mode) if mode and t is not None else t


def _once(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """backward under create_graph=True: whoever differentiates what it returns again is told that it cannot be."""
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
    """Gradients, as they are. What they depend on is named, so that every way back leads here."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([t.detach() for t in tensors[:number]])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedConfig(
            "Octavo's layers are differentiated once, and a gradient of theirs (create_graph=True) was to be "
            "differentiated again. Run the layers that such a loss goes through in plain torch (octavo.revert)."
        )


def run(
    layer: Layer, config: Any, inputs: Any, buffers: Any, *, differentiable: bool, anchored: bool = False,
    watched: Sequence[Tensor] = (), owner: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Outputs, then extras, of one call. `differentiable` says whether any gradient can be asked for; `anchored` makes
    backward run for what it writes to `buffers`, even where no input takes a gradient; tensors that are `watched` must
    not be written to before it; messages name the `owner`, by its `title()`."""
    inputs = layer.Inputs._make([_in_memory(t) if isinstance(t, Tensor) else t for t in inputs])
    out = inputs.out if layer.takes_memory else None
    if out is not None:
        begin_write(out)
        written = [out, inputs.x] if overlap(out, inputs.x) else [out]
        torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])  # kernels do not
    if not differentiable:
        check_transforms(inputs)
        try:
            with torch.no_grad():
                made, extras, _, _ = _forward(layer, config, inputs, False)
        except RuntimeError as error:
            refuse_active(error)
            raise
        tensors = (*made, *extras)
    else:
        if layer.takes_memory and buffers.dgrad_out is not None:
            refuse_overlap(buffers.dgrad_out, inputs)
            refuse_grad(buffers.dgrad_out, inputs.x)
        # the last input first: of a tensor that is there twice autograd adds the gradients in this order, which is that
        # of layers called one by one
        try:
            tensors = _Run.apply(  # type: ignore[no-untyped-call]
                layer, config, buffers, _ANCHOR if anchored else None, Watched.now(watched) if watched else None, owner,
                *inputs[::-1],
            )  # fmt: skip
        except RuntimeError as error:
            refuse_active(error)
            raise
    if out is not None:
        keep(out, tensors[0])
    return tensors
