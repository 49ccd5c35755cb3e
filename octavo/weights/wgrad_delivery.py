"""Deliver a layer's weight gradient: to `weight.grad`, to `weight.main_grad`, or to a queue until `backward_dw()`.

`WeightGradient` holds the queue and no reference to the layer, which the caller passes to every method: a reference
would keep a deleted model in memory until Python's garbage collector runs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo import backend
from octavo._torch.fakes import FakeTensor
from octavo._torch.tracing import is_averaged_by_ddp
from octavo.errors import UnsupportedConfig, UnsupportedShape, warn, warn_caller
from octavo.quant.qtensor import Parts
from octavo.runtime.deferred_wgrad import are_unfilled
from octavo.text import plural
from octavo.weights.main_grad import MainGrad, graph_buffers
from octavo.weights.unsupported_wgrad import refuse_shards
from octavo.weights.wgrad_queue import (
    Computed,
    Entry,
    Form,
    GraphEntry,
    QueueOfCall,
    Waiting,
    WgradQueue,
    operands_of,
)


class WeightGradient:
    """Deliver one layer's dw."""

    _warned_of_hooks = False

    def __init__(self) -> None:
        self.queue = WgradQueue()

    def main_grad(self, layer: Any) -> tuple[str, bool]:
        """Return how dw goes to `main_grad` ("add" or "overwrite"), and whether `weight.grad` gets zeros in its
        place."""
        layer._refuse_parametrized("fuse_wgrad_accumulation=True")
        # only trained weights have a buffer: a frozen one of several is left out
        trained = [weight for weight in layer._weight_parts() if weight.requires_grad]
        overwrites = bool(getattr(trained[0], "overwrite_main_grad", False))
        # one GEMM writes the gradients of all groups
        for weight in trained[1:]:
            if bool(getattr(weight, "overwrite_main_grad", False)) != overwrites:
                raise UnsupportedConfig(
                    "fuse_wgrad_accumulation=True writes the gradients of all groups at once: all of them add or all "
                    "overwrite. Set overwrite_main_grad alike on each weight."
                )
        has_flag = any([hasattr(weight, "grad_added_to_main_grad") for weight in trained])
        if not torch.compiler.is_compiling():  # a graph was refused before
            if why := self.ddp_refusal(layer):
                raise UnsupportedConfig(f"{layer.op_describe()}: {why}.")
            for weight in trained if not has_flag else ():
                if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                    self._warn_of_hooks(layer)
        return "overwrite" if overwrites else "add", has_flag

    def _warn_of_hooks(self, layer: Any) -> None:
        """Warn once of hooks that never fire, such as those of an optimizer that steps in backward."""
        if self._warned_of_hooks:
            return
        self._warned_of_hooks = True
        warn_caller(
            f"A weight of {layer.op_describe()} has hooks, and fuse_wgrad_accumulation=True adds its gradient to "
            "weight.main_grad past autograd: they never fire. Set weight.grad_added_to_main_grad = False, which "
            "backward sets to True: the hooks then get zeros. Or remove the hooks."
        )

    def ddp_refusal(self, layer: Any) -> str:
        """Return why dw cannot go to `main_grad` in a forward of DistributedDataParallel; empty if it can. A flag
        `grad_added_to_main_grad` says that the trainer reduces `main_grad` itself."""
        trained = [weight for weight in layer._weight_parts() if weight.requires_grad]
        if any([hasattr(weight, "grad_added_to_main_grad") for weight in trained]) or not is_averaged_by_ddp(trained):
            return ""
        return (
            "fuse_wgrad_accumulation=True adds dW to weight.main_grad and leaves weight.grad None, and "
            "DistributedDataParallel averages weight.grad: ranks would keep gradients of their own. Leave "
            "fuse_wgrad_accumulation out, or run forward and backward in ddp.no_sync() and reduce weight.main_grad "
            "yourself"
        )

    def buffers(self, layer: Any, main_grad: str, delay: str, as_nodes: bool) -> tuple[Any, Any]:
        """Return the destinations to which backward writes dw: the target in `main_grad`, and the queue."""
        if as_nodes:
            buffers = tuple(graph_buffers(layer._weight_parts())) if main_grad and not delay else ()
            # a compiler would merge equal calls into a node with room for one dy; it never merges calls of torch.empty
            device = layer._weight_parts()[0].device
            return buffers, torch.empty(0, dtype=torch.float32, device=device) if delay else None
        target = MainGrad(layer._weight_parts(), main_grad) if main_grad and not delay else None
        return target, QueueOfCall(self.queue, _form(layer)) if delay else None

    def enqueue(self, layer: Any, key: str, codes: Parts, auxiliary: Sequence[Tensor]) -> None:
        """Put the operands of dw that a graph's node made into the queue, without reading it: the compiler guards on
        a read. Operands without data, of an export or a run on shapes alone, would stay there for backward_dw()."""
        if any([isinstance(t, FakeTensor) for t in auxiliary]):
            return
        start, stop = layer._now("_wgrad.operand_span", key)
        # linked in front and not appended: a compiler guards on what it reads of a list
        box = self.queue
        box.from_graphs = (GraphEntry(_form(layer), key, tuple(auxiliary[start:stop]), codes), box.from_graphs)

    def operand_span(self, layer: Any, key: str) -> tuple[int, int]:
        """Return the places of dw's operands among the tensors that a node makes besides y."""
        start, stop = layer.LAYER.config(key).deferred_span
        return start - 1, stop - 1

    def deliver(self, layer: Any) -> None:
        """Compute dw of the oldest backward that left it out, and add it to `weight.grad` or `weight.main_grad`, even
        if `delay_wgrad_compute` is off by now or the weight was replaced by one of its shape."""
        weights = layer._weight_parts()
        number, trained = len(self.queue), any([weight is None or weight.requires_grad for weight in weights])
        # a schedule calls every layer of a stage: one that has nothing to do says nothing
        if number == 0 and not (trained and layer.delay_wgrad_compute):
            return
        refuse_shards(weights, "delay_wgrad_compute=True")
        if number == 0:
            warn(
                "backward_dw() has no backward to finish, and does nothing: each call takes one backward that has run "
                "with delay_wgrad_compute=True, oldest first. Call it once for each.",
                stacklevel=3,
            )
            return
        if not trained:
            warn(
                f"backward_dw() does nothing: {plural(number, 'weight gradient')} of {layer.op_describe()} cannot be "
                "added to weights with requires_grad=False. Set it to True and repeat the call, or drop what waits "
                "with discard_dw().",
                stacklevel=3,
            )
            return
        # oldest first: microbatches end in the order in which they began
        entry = self.queue.take(partial(_is_filled, layer))
        if entry is None:
            warn(
                f"backward_dw() has no backward to finish, and does nothing: {plural(number, 'forward')} of "
                f"{layer.op_describe()} ran in a graph, and no backward after it. Run the backward first; forwards "
                "that need none run in torch.no_grad(), and discard_dw() drops what they left.",
                stacklevel=3,
            )
            return
        self._deliver(layer, weights, entry)

    def _deliver(self, layer: Any, weights: Sequence[nn.Parameter], entry: Waiting) -> None:
        """Compute one dw and add it. If that fails, it waits in the queue again, as the oldest."""
        try:
            layer._refuse_parametrized("backward_dw()")
            _check_weights(layer, weights, entry.weight)
            parts = entry.parts if isinstance(entry, Computed) else _computed(layer, entry, weights)
        except BaseException:
            # a call that raised may be repeated: no gradient is lost
            self.queue.put_back(entry)
            raise
        self._accumulate(weights, parts, entry.weight, entry.captured)

    def claim(self, layer: Any) -> list[Waiting]:
        """Take what the backward that has just run left, for `deliver_claimed`. All that waits is its own, since what
        those before it left was claimed; of a graph, whose forwards in flight wait too, it is the oldest."""
        found = list[Waiting]()
        while not (found and isinstance(found[-1], GraphEntry)) and len(self.queue):
            entry = self.queue.take(partial(_is_filled, layer))
            if entry is None:
                break
            found.append(entry)
        return found

    def deliver_claimed(self, layer: Any, entry: Waiting) -> None:
        """Compute the dw of a claimed entry, and add it as `backward_dw()` does."""
        weights = layer._weight_parts()
        refuse_shards(weights, "delay_wgrad_compute=True")
        if any([weight is None or weight.requires_grad for weight in weights]):
            self._deliver(layer, weights, entry)

    def _accumulate(
        self, weights: Sequence[nn.Parameter], parts: Sequence[Tensor | None], form: Form, captured: bool
    ) -> None:
        """Add dw to `.grad` as any backward does, hooks included."""
        before = [(weight.grad, _version(weight.grad)) for weight in weights]
        pairs = [(weight, part) for weight, part in zip(weights, parts, strict=True) if part is not None]
        try:
            if pairs:
                # autograd adds: hooks of the weight, and of DDP, fire as in any backward
                torch.autograd.backward([weight for weight, _ in pairs], [part for _, part in pairs])
        except BaseException:  # a hook's, before this weight's gradient was added or after
            rest = tuple(
                # a `.grad` that was replaced or written to has this gradient: what is put back must not be added again
                part if weight.grad is grad and _version(grad) == version else None
                for weight, part, (grad, version) in zip(weights, parts, before, strict=True)
            )
            if any(part is not None for part in rest):
                self.queue.put_back(Computed(form, rest, captured))
            raise


def _is_filled(layer: Any, entry: GraphEntry) -> bool:
    """Return whether the backward of a graph's forward has run. On a GPU the host would have to wait for the answer: it
    takes the oldest forward for one whose backward has run, and the device checks that under
    `octavo.backend.use("checked")`."""
    buffers = entry.operands[: layer.LAYER.config(entry.key).dy_buffers]
    if buffers[0].device.type == "cpu":
        unfilled = are_unfilled(buffers)
        return unfilled is None or not unfilled
    if (unfilled := are_unfilled(buffers) if backend.forced() == "checked" else None) is not None:
        rule = "Octavo: backward_dw() takes the oldest forward of a graph, and no backward of it has run"
        backend.check_on_device(unfilled.logical_not, rule)
    return True


def _form(layer: Any) -> Form:
    weight = layer._weight_parts()[0]
    return Form(tuple(weight.shape), weight.device)


def _check_weights(layer: Any, weights: Sequence[nn.Parameter | None], form: Form) -> None:
    """Raise if a weight that was replaced since forward cannot take dw."""
    for name, weight in zip(layer._names_of_weights(), weights, strict=True):
        found = None if weight is None else Form(tuple(weight.shape), weight.device)
        if found != form:
            raise UnsupportedShape(
                f"A backward of {layer.op_describe()} left a gradient of shape {form}, and {name} is {found} now. Call "
                "backward_dw() before the weight is replaced or moved, put such a weight back, or drop what waits with "
                "discard_dw()."
            )


def _computed(layer: Any, entry: Entry | GraphEntry, weights: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    """Return dw for each weight; None where it went to `main_grad`, or is not wanted."""
    config, operands = operands_of(entry, layer.LAYER, layer._whole_weight())
    with torch.no_grad():
        target = MainGrad(weights, config.main_grad) if config.main_grad else None
        dw = layer.LAYER.weight_gradient(config, operands, target)
    if dw is None:
        return [None] * len(weights)
    parts = [dw] if len(weights) == 1 else list(dw.unbind())
    return [part.view(w.shape) if w.requires_grad else None for w, part in zip(weights, parts, strict=True)]


def _version(grad: Tensor | None) -> int:
    return -1 if grad is None else grad._version
