"""A layer whose calls are recorded and replayed: the contract of any layer, the same bits, less of the host's time."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo.layers.contract import ForwardResult, Tensors
from octavo.lower.adapter import Adapter
from octavo.lower.packing import pack, packing
from octavo.lower.replay.calls import call, key_of
from octavo.wgrad.targets import LazyTarget, Target, Writes

Groups = tuple[Any, Any, Any]  # of tensors


class Replayed(Adapter):
    """Replays the calls of the layer that it wraps. It calls the layer itself where the layout of the tensors does not
    decide what is launched, and for the first two calls of a kind."""

    def forward(self, config: Any, inputs: Any) -> ForwardResult:
        groups = self._forward("forward", config, inputs, lambda fields: self.layer.forward(config, fields))
        return ForwardResult(*groups)

    def forward_and_save(self, config: Any, inputs: Any, saving: bool) -> tuple[ForwardResult, Tensors]:
        def run(fields: Any) -> Groups:
            made, saved = self.layer.forward_and_save(config, fields, saving)
            return made.outputs, made.extras, saved if saving else ()

        outputs, extras, saved = self._forward("save" if saving else "", config, inputs, run)
        return ForwardResult(outputs, extras, ()), saved

    def _forward(self, which: str, config: Any, inputs: Any, run: Callable[[Any], Groups]) -> Groups:
        """Call run(inputs), or replay it. `which` tells the possible functions apart."""
        out = self.out_place(config)
        if not self.decided_by_layout(config, "forward") or (out is not None and inputs[out] is not None):
            return run(inputs)
        tensors: list[Any] = []
        marks = pack(inputs, tensors)
        key = key_of((self, which, config.key, marks), tensors)
        if key is None:
            return run(inputs)

        def work(tensors: Sequence[Any]) -> tuple[tuple[int, int], Tensors]:
            groups = run(self.Inputs._make(packing(marks).unpack(tensors)))
            first = len(groups[0])
            return (first, first + len(groups[1])), tuple(chain.from_iterable(groups))

        (first, second), results = call(key, tensors, work)
        return results[:first], results[first:second], results[second:]

    def backward(self, config: Any, saved: Any, buffers: Any, grads: Tensors, writes: Writes | None = None) -> Tensors:
        # without a gradient of every output there may be a buffer that the layer does not write to
        alike = writes is None and self.decided_by_layout(config, "backward") and not any([g is None for g in grads])
        opened = _opened(buffers) if alike else None
        if opened is None:
            return self.layer.backward(config, saved, buffers, grads, writes)
        places, modes = opened
        tensors: list[Any] = []
        marks = pack((*saved, *places, *grads), tensors)
        key = key_of((self, "backward", config.key, marks, *modes), tensors)
        if key is None:
            return self.layer.backward(config, saved, buffers, grads)

        def work(tensors: Sequence[Any]) -> tuple[None, Tensors]:
            fields = packing(marks).unpack(tensors)
            own, rest = fields[: len(saved)], fields[len(saved) :]
            named = [Target(t, mode) if mode else t for t, mode in zip(rest, modes, strict=False)]
            dys = rest[len(modes) :]
            return None, tuple(self.layer.backward(config, tuple(own), self.Buffers._make(named), tuple(dys)))

        if not any(modes):
            return call(key, tensors, work)[1]
        return _written(buffers, places, lambda: call(key, tensors, work)[1])


def _opened(buffers: Any) -> tuple[list[Any], list[str]] | None:
    """The tensors of each buffer, and the mode of each that is a target. None where a buffer is something else, or has
    to be looked up when there is a gradient to write to it."""
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


def _written(buffers: Any, places: Sequence[Any], work: Callable[[], Tensors]) -> Tensors:
    """Call work(), preserving the targets' versions, and note that the targets were written to. The layer does both
    itself where it runs, but a recording does not contain them."""
    with preserve_version_counter(tuple([t for place in places if isinstance(place, tuple) for t in place])):
        results = work()
    for t in buffers:
        if isinstance(t, LazyTarget):
            t.done()
    return results
