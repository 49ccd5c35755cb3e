"""A layer whose calls are recorded and replayed: the contract of any layer, the same bits, less of the host's time."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo.runtime.adapter import Adapter
from octavo.runtime.contract import ForwardResult, Tensors
from octavo.runtime.gradient_targets import LazyTarget, Target, Writes
from octavo.runtime.packing import pack, packing
from octavo.runtime.replay.calls import Latest, Results, call, key_of, latest

Groups = tuple[Any, Any, Any]  # of tensors
Replay = Callable[..., Results]


class Replayed(Adapter):
    """Replays the calls of the layer that it wraps. It calls the layer itself where the layout of the tensors does not
    decide what is launched, and for the first two calls of a kind."""

    def forward(self, config: Any, inputs: Any) -> ForwardResult:
        groups = self._forward("forward", config, inputs, lambda fields: self.layer.forward(config, fields))
        return ForwardResult(*groups)

    def forward_and_save(self, config: Any, inputs: Any, saving: bool) -> tuple[ForwardResult, Tensors]:
        def run(fields: Any) -> Groups:
            made, saved = self.layer.forward_and_save(config, fields, saving)
            return made.outputs, made.auxiliary, saved if saving else ()

        outputs, auxiliary, saved = self._forward(_which(saving), config, inputs, run)
        return ForwardResult(outputs, auxiliary, ()), saved

    def latest_forward(self, config: Any, saving: bool, marks: str, tensors: Sequence[Tensor]) -> Latest | None:
        """The replay of `forward_and_save` for these inputs, if calls like it ran before. `marks` and `tensors` are the
        inputs as `pack` lists them. The replay returns how many outputs, and how many outputs and extras there are, and
        the marks of the saved; then outputs, extras, and all that are saved but None."""
        return latest(_head((self, _which(saving), config.key, marks), tensors, 1), tensors) if tensors else None

    def _forward(self, which: str, config: Any, inputs: Any, run: Callable[[Any], Groups]) -> Groups:
        """Call run(inputs), or replay it. `which` tells the possible functions apart."""
        out = self.out_place(config)
        if not self.decided_by_layout(config, "forward") or (out is not None and inputs[out] is not None):
            return run(inputs)
        tensors: list[Any] = []
        marks = pack(inputs, tensors)
        begin = (self, which, config.key, marks)
        key = key_of(begin, tensors)
        if key is None:
            return run(inputs)

        def work(tensors: Sequence[Any]) -> tuple[tuple[int, int, str], Tensors]:
            outputs, auxiliary, rest = run(self.Inputs._make(packing(marks).unpack(tensors)))
            results = [*outputs, *auxiliary]
            return (len(outputs), len(results), pack(rest, results)), tuple(results)

        (first, second, kept), results = call(key, tensors, work, _head(begin, tensors, 1))
        return results[:first], results[first:second], tuple(packing(kept).unpack(results[second:]))

    def backward(self, config: Any, saved: Any, buffers: Any, grads: Tensors, writes: Writes | None = None) -> Tensors:
        # without a gradient of every output there may be a buffer that the layer does not write to
        alike = writes is None and self.decided_by_layout(config, "backward") and not any([g is None for g in grads])
        opened = _opened(buffers) if alike else None
        if opened is None:
            return self.layer.backward(config, saved, buffers, grads, writes)
        places, modes = opened
        tensors: list[Any] = []
        kept = pack(saved, tensors)
        marks = kept + "," + pack((*places, *grads), tensors) if saved else pack((*places, *grads), tensors)
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
            return call(key, tensors, work, _head(self._begin_backward(config, kept, buffers), tensors, -1))[1]
        return _written(buffers, places, lambda: call(key, tensors, work)[1])

    def latest_backward(
        self, config: Any, kept: str, saved: Sequence[Tensor], buffers: Any, grads: Tensors
    ) -> tuple[Replay, list[Any]] | None:
        """The replay of `backward` for these tensors, with its arguments, if calls like it ran before; not where it
        writes to a target. `kept` and `saved` are what forward saved, as `pack` lists it."""
        tensors = [*saved, *[t for t in buffers if t is not None], *grads]
        # guards refuse what is no tensor: a target among the buffers, a gradient that is None
        found = latest(_head(self._begin_backward(config, kept, buffers), tensors, -1), tensors)
        return None if found is None else (found.replay, tensors)

    def _begin_backward(self, config: Any, kept: str, buffers: Any) -> tuple[Any, ...]:
        return (self, "backward", config.key, kept, *[t is None for t in buffers])


def _which(saving: bool) -> str:
    return "save" if saving else ""


def _head(begin: tuple[Any, ...], tensors: Sequence[Any], other: int) -> tuple[Any, ...]:
    """The part of a key that tells most kinds of calls apart: the shapes of the first tensor and of the `other`, which
    are x and w in forward, an operand and dy in backward. A gradient may be None."""
    other %= len(tensors)
    return (*begin, len(tensors), getattr(tensors[0], "shape", None), getattr(tensors[other], "shape", None))


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
