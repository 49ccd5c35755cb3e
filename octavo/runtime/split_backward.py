"""A backward in two passes over one graph, as schedules of pipelines run it: dx first, gradients of weights later.

A node computes what the pass that runs takes. The first pass casts dy and computes dx. It keeps the gradients that it
does not return and, of a weight, the operands of their GEMM. The second pass returns the former and runs the latter: it
casts nothing, and writes to no running amax and no random counter again.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from octavo._torch.autograd import keeps_graph, wants_gradient_of
from octavo.runtime.contract import LAYERS, Layer, Tensors
from octavo.runtime.modified import refuse_modified, versions_of


def of_pass(nodes: Sequence[Any], inputs: Sequence[int]) -> tuple[list[int], list[int]]:
    """Divide the inputs that have a gradient into those of which the pass that runs takes it, and the others. `nodes`
    are those that the gradients go to, None for one that there is not."""
    wanted, unwanted = list[int](), list[int]()
    for i, node in zip(inputs, nodes, strict=True):
        if node is not None:
            (wanted if wants_gradient_of(node) else unwanted).append(i)
    return wanted, unwanted


class DeferredGradient:
    """An `OperandQueue` that takes the operands of one weight's gradient, for a later pass."""

    def __init__(self, target: Any) -> None:
        self.target = target  # main_grad, if dw goes there
        self.config: Any = None  # none until backward has put operands here
        self.operands: tuple[Any, ...] = ()
        self.versions: tuple[int, ...] = ()

    def put(self, config: Any, *operands: Any) -> None:
        self.config, self.operands, self.versions = config, operands, versions_of(operands)

    def compute(self, title: str) -> Tensor | None:
        for then, now in zip(self.versions, versions_of(self.operands), strict=True):
            if then != now:
                refuse_modified(title, "an unquantized operand of dw", then, now, "the pass for weights")
        layer: Any = LAYERS[self.config.registered_name]
        return layer.weight_gradient(self.config, self.operands, self.target)


class KeptGradients:
    """Gradients that a pass computed and did not return."""

    def __init__(
        self, dys: Tensors, gradients: dict[int, Tensor | None], deferred: dict[int, DeferredGradient]
    ) -> None:
        self.dys, self.versions = dys, versions_of(dys)
        self.gradients = gradients  # by input
        self.deferred = deferred

    def serve(self, dys: Tensors, inputs: Sequence[int]) -> bool:
        """Return whether the gradients of these inputs are here, for a backward with these very gradients of the
        outputs."""
        there = [i in self.gradients or i in self.deferred for i in inputs]
        same = len(dys) == len(self.dys) and all([mine is dy for mine, dy in zip(self.dys, dys, strict=True)])
        return all(there) and same and versions_of(dys) == self.versions

    def take(self, inputs: Sequence[int], count: int, title: str) -> Tensors:
        """Return the gradients of these inputs, in a row of `count`, and drop them here."""
        found: list[Tensor | None] = [None] * count
        for i in inputs:
            found[i] = self.deferred.pop(i).compute(title) if i in self.deferred else self.gradients.pop(i)
        return tuple(found)


def deferring(
    layer: Layer, config: Any, buffers: Sequence[Any], unwanted: Sequence[int]
) -> tuple[list[Any], dict[int, DeferredGradient]]:
    """Return the buffers of a backward that leaves the gradients of these inputs to a later pass, as far as the layer
    can, and where their operands will be."""
    given, deferred = list(buffers), dict[int, DeferredGradient]()
    for i, places in layer.deferrable_gradients(config).items():
        if i in unwanted:
            given[places.queue] = deferred[i] = DeferredGradient(buffers[places.target])
    return given, deferred


def kept(
    dys: Tensors, gradients: Sequence[Tensor | None], unwanted: Sequence[int], deferred: dict[int, DeferredGradient]
) -> KeptGradients | None:
    """Return what a later pass may take; None if this one frees the graph, and none can follow."""
    if not keeps_graph():
        return None
    deferred = {i: each for i, each in deferred.items() if each.config is not None}  # a user's step returned the rest
    return KeptGradients(dys, {i: gradients[i] for i in unwanted if i not in deferred}, deferred)
