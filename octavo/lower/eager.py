"""The layer contract in eager mode: one thin autograd function, and none at all where nothing needs a gradient.

What backward writes besides its results does not pass through `save_for_backward`: a hook that moves saved tensors
away would otherwise hand backward a copy to write to, and two forwards in flight would trip its version check.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from octavo.errors import UnsupportedConfig
from octavo.layers.contract import Layer
from octavo.layers.targets import Sought, Target
from octavo.lower import tape

_ANCHOR = torch.empty(0, requires_grad=True)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: Layer, config: Any, buffers: Any, anchor: Tensor | None, *inputs: Any
    ) -> tuple[Tensor, ...]:
        outputs, extras, saved, kind = _forward(layer, config, layer.Inputs._make(inputs), True)
        ctx.save_for_backward(*saved)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            kind = None  # what comes back may lie otherwise
        ctx.call = layer, config, buffers, len(outputs), kind
        ctx.set_materialize_grads(False)
        if extras:
            ctx.mark_non_differentiable(*extras)
        return *outputs, *extras

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _once(ctx, *grads) if torch.is_grad_enabled() else _backward(ctx, *grads)


Tensors = Sequence[Tensor | None]


def _forward(layer: Layer, config: Any, inputs: Any, saving: bool) -> tuple[Any, Any, Any, int | None]:
    """Outputs, extras, what backward needs if it is `saving`, and the kind of call it was: from a tape, if there is
    one."""
    if not layer.replays(config, "forward") or getattr(inputs, "out", None) is not None:
        return *_forward_now(layer, config, inputs, saving), None
    tensors, sizes = list[Tensor | None](), list[int]()
    for field in inputs:
        if isinstance(field, tuple):
            sizes.append(len(field))
            tensors += field
        else:
            sizes.append(-1)
            tensors.append(field)

    def work(tensors: Tensors) -> tuple[tuple[int, int], Tensors]:
        rest = iter(tensors)
        fields = [next(rest) if n < 0 else tuple([next(rest) for _ in range(n)]) for n in sizes]
        outputs, extras, saved = _forward_now(layer, config, layer.Inputs._make(fields), saving)
        return (len(outputs), len(outputs) + len(extras)), (*outputs, *extras, *saved)

    (first, second), found, kind = tape.call((config.key, saving, *sizes), tensors, work)
    return found[:first], found[first:second], found[second:], kind


def _forward_now(layer: Layer, config: Any, inputs: Any, saving: bool) -> tuple[Any, Any, Any]:
    at_once = getattr(layer, "forward_and_save", None)  # of a chain
    if at_once is not None:
        made, saved = at_once(config, inputs)
    else:
        made = layer.forward(config, inputs)
        saved = layer.save(config, inputs, made) if saving else ()
    return made.outputs, made.extras, saved if saving else ()


def _gradients(layer: Layer, config: Any, saved: Tensors, buffers: Any, grads: Tensors, kind: int | None) -> Tensors:
    """What the layer's backward returns: from a tape, if there is one, and nothing but tensors is written to. `kind` is
    forward's, which decides how what it saved lies."""
    if not layer.replays(config, "backward") or not all([t is None or isinstance(t, Tensor | Target) for t in buffers]):
        return layer.backward(config, tuple(saved), buffers, tuple(grads))
    modes = [t.mode if isinstance(t, Target) else "" for t in buffers]
    written = [t.buffers[0] if isinstance(t, Target) else t for t in buffers]  # of one weight: several do not replay
    first, second = len(saved), len(saved) + len(written)

    def work(tensors: Tensors) -> tuple[None, Tensors]:
        named = _like(buffers, map(_target, tensors[first:second], modes))
        return None, layer.backward(config, tuple(tensors[:first]), named, tuple(tensors[second:]))

    head = (config.key, "backward", kind, first, second)
    return tape.call(head, [*saved, *written, *grads], work, 0 if kind is None else first).found


def _target(t: Tensor | None, mode: str) -> Any:
    return Target([t], mode) if mode and t is not None else t


def _like(buffers: Any, entries: Iterable[Any]) -> Any:
    return buffers._make(entries) if hasattr(buffers, "_make") else tuple(entries)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    layer, config, buffers, outputs, kind = ctx.call
    sought = [t for t in buffers if isinstance(t, Sought)]
    if all([g is None for g in grads[:outputs]]):
        sought = []  # nothing will be written
    if sought:
        buffers = _like(buffers, [t.find() if isinstance(t, Sought) else t for t in buffers])
    for place in layer.returned_elsewhere(config).values():
        _refuse_rewriting(buffers[place])
    # a graph of the same layer may be in flight, and have the same buffers among what it saved
    written = _tensors_of(buffers)
    if written:
        with _unsafe_preserve_version_counter(written):
            found = _gradients(layer, config, ctx.saved_tensors, buffers, grads[:outputs], kind)
    else:
        found = _gradients(layer, config, ctx.saved_tensors, buffers, grads[:outputs], kind)
    for t in sought:
        t.done()
    return None, None, None, None, *found


def _tensors_of(buffers: Any) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    for t in buffers:
        if isinstance(t, Tensor):
            found.append(t)
        elif isinstance(t, Target):
            found += t.buffers
    return tuple(found)


_last_written: dict[int, int] = {}  # address of a caller's gradient buffer -> the backward that wrote to it


def _refuse_rewriting(buffer: Tensor) -> None:
    """A gradient that waits in its buffer to be added to another must not be overwritten by that other."""
    task = torch._C._current_graph_task_id()
    if _last_written.get(buffer.data_ptr()) == task:
        raise UnsupportedConfig(
            "Two gradients of one backward were to be written to one dgrad_out. Give each call a buffer of its own."
        )
    if len(_last_written) > 4096:
        _last_written.clear()
    _last_written[buffer.data_ptr()] = task


_once = once_differentiable(
    _backward
)  # under create_graph: what differentiates the result again is told that it cannot


def run(
    layer: Layer, config: Any, inputs: Any, buffers: Any, *, differentiable: bool, anchored: bool = False
) -> tuple[Tensor, ...]:
    """Outputs, then extras, of one call. `differentiable` says whether any gradient can be asked for; `anchored` makes
    backward run for what it writes to `buffers`, even where no input takes a gradient."""
    if not differentiable:
        with torch.no_grad():
            made, extras, _, _ = _forward(layer, config, inputs, False)
        return *made, *extras
    out = getattr(inputs, "out", None)
    if out is not None:
        _forget_values(out)
    tensors: tuple[Tensor, ...] = _Run.apply(layer, config, buffers, _ANCHOR if anchored else None, *inputs)  # type: ignore[no-untyped-call]
    if out is not None:
        _values_in[out.data_ptr()] = tensors[0]
    return tensors


# address of a caller's buffer -> the y that is in it. A y has a version of its own, since slices of one allocation must
# not disturb each other: what comes after it in the same place is told to autograd here
_values_in: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()


def _forget_values(out: Tensor) -> None:
    """The y that was written here before is about to be overwritten: a backward that still needs it must notice."""
    before = _values_in.get(out.data_ptr())
    if before is not None:
        torch.autograd.graph.increment_version([before])
