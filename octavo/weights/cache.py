"""A cache of a weight's codes, in hidden buffers of its module at fixed addresses.

It spares the microbatches of a step from quantizing the same weight again: it is refreshed in place, and remembers
which version of the weight it was made from. A weight that was replaced by its codes is another thing (`held.py`).

A checkpoint keeps weights, not codes of them.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from octavo._torch.cuda import is_capturing
from octavo._torch.fakes import FakeTensor, as_real_as
from octavo._torch.tensors import StorageWeakRef
from octavo.errors import UnsupportedConfig
from octavo.layers.contract import WeightCast
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import ORIENTATIONS, Parts
from octavo.recipes import Recipe
from octavo.weights.codes import Kind, quantize_into
from octavo.weights.held import HeldWeight
from octavo.weights.optimizer_hooks import heard, owner_of

BUFFER_NAMES = {
    orientation: tuple(f"weight_{orientation}_{part}" for part in ("codes", "scale", "level2"))
    for orientation in ORIENTATIONS
}


class WeightCache:
    """Tracks the codes in a layer's buffers. It holds no tensor: buffers may be moved or replaced."""

    def __init__(self) -> None:
        self.held = False  # whether the layer's weight is codes (`held.py`), and then there is nothing to cache
        self.recipe: Recipe | None = None  # that made the codes; None: there are none
        self._weights: list[weakref.ref[Tensor]] | None = None  # the weights that they were made from,
        self._states: list[State] = []  # as they were then
        # whether the last forward that may be recomputed was in an octavo.microbatch, and observed the weight's amax,
        self.ambient = ""  # "", "observed" or "unobserved"
        self.on_device = False  # and whether the device had the block's flag
        self.entry: object = None  # the microbatch block that they were made in: see octavo.ambient
        self.trained = False  # whether a forward has asked for the weight's gradient
        self._steps = 0  # of optimizers, when the codes were made or last checked
        self._ended = False  # whether a training step has ended since
        self._owners: list[weakref.ref[Any]] = []  # optimizers that were found to update the weights

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy. Its weight is another tensor, so its cache is cold."""
        return {**self.__dict__, "_weights": None, "_states": [], "_owners": [], "entry": None}

    def parts(self, module: Any, orientation: str) -> Parts:
        buffers = module._hidden._buffers
        return tuple(t for t in (buffers.get(name) for name in BUFFER_NAMES[orientation]) if t is not None)

    def has(self, module: Any, orientation: str) -> bool:
        return module._hidden._buffers.get(BUFFER_NAMES[orientation][0]) is not None

    def drop(self, module: Any) -> None:
        module._hidden.drop([name for names in BUFFER_NAMES.values() for name in names])
        self.recipe = self._weights = None

    def fill(
        self,
        module: Any,
        weight: Tensor,
        recipe: Recipe,
        *,
        column: bool,
        amaxes: Sequence[Tensor] = (),
        scaling: Sequence[Tensor] = (),
        skip: Tensor | None = None,
        agreed: Sequence[Tensor] = (),
    ) -> None:
        """Quantize `weight` into the module's buffers, making those that are missing. A column that is there stays in
        use. Without `scaling` a delayed recipe's scale is the weight's own. Where `skip`, on the device, is not zero,
        the codes do not change."""
        with as_real_as(weight), torch.no_grad():
            if self.recipe != recipe:
                self.drop(module)
            kind = Kind(module.NAME, recipe.key, tuple(weight.shape))
            self._reserve(module, module.LAYER.config(kind.key), weight, column)
            row, columns = self.parts(module, "row"), self.parts(module, "column")
            known = self._weights
            self._weights = None  # unknown until the cast is done
            quantize_into(kind, WeightCast(weight, row, columns, amaxes, scaling, skip, agreed))
        if skip is not None:  # the host cannot tell whether the codes changed: it keeps what it knew
            self._weights = known
            return
        parts = module.weight_parts()
        if known is None or any([ref() is not w for ref, w in zip(known, parts, strict=True)]):
            self._owners = []  # owners of other weights
        self.recipe, self._weights, self._states = recipe, [weakref.ref(w) for w in parts], [state_of(w) for w in parts]
        self._steps, self._ended = heard.steps, False

    def _reserve(self, module: Any, config: Any, weight: Tensor, column: bool) -> None:
        """Make the buffers that are missing."""
        row_proto, column_proto = module.LAYER.abstract_weight(config, TensorProto.of(weight.detach()))
        for orientation, proto, wanted in (("row", row_proto, True), ("column", column_proto, column)):
            if proto is None or not wanted or self.has(module, orientation):
                continue
            with torch.inference_mode(False):  # made when inference mode is on, it must still serve training
                for name, tensor in zip(BUFFER_NAMES[orientation], proto.empty().tensors(), strict=False):
                    stored = tensor.view(torch.uint8) if name == BUFFER_NAMES[orientation][0] else tensor
                    module._hidden.put(name, stored)

    @property
    def is_cold(self) -> bool:
        """Whether it is unknown which weights the codes were made from."""
        return self._weights is None

    def is_fresh(self, weights: Sequence[Tensor]) -> bool:
        """Whether nothing indicates that the weights have changed since the codes were made."""
        refs = self._weights
        return (
            refs is not None and not self._ended and self._steps == heard.steps
            and not (heard.captures and any([weight in heard.captured for weight in weights]))
            and all([ref() is weight for ref, weight in zip(refs, weights, strict=True)])
            and self._states == [state_of(weight) for weight in weights]
        )  # fmt: skip

    def check_fresh(self, weights: Sequence[Tensor]) -> None:
        known: Sequence[weakref.ref[Tensor] | None] = self._weights or [None] * len(weights)
        for ref, then, weight in zip(known, self._states, weights, strict=True):
            now = state_of(weight)
            if ref is None or ref() is not weight:
                self._refuse("it is another tensor")
            if then != now:
                other = "it has another storage"
                self._refuse(f"from version {then[0]} to {now[0]}" if then[0] != now[0] else other)
            if heard.captures and weight in heard.captured and not is_capturing():
                self._refuse("an optimizer's step was captured in a CUDA graph, and nothing tells of its replays")
        if self._ended or self._steps != heard.steps:
            self._check_owners(weights)

    def end_step(self) -> None:
        """Note that a training step has ended: weights that torch's optimizers do not update may have changed
        unseen."""
        self._ended = True

    def _check_owners(self, weights: Sequence[Tensor]) -> None:
        """Refuse a trained weight that no torch optimizer holds. Versions tell of updates by torch's optimizers;
        anything else, such as an optimizer of copies or of shards, may write to the weight unseen."""
        unheard = [w for w in weights if w.requires_grad and (self.trained or w.grad is not None)]
        if len(self._owners) < len(unheard) or any([ref() is None for ref in self._owners]):
            owners = [owner_of(weight) for weight in unheard]
            if None in owners:
                what = "octavo.step ended a training step" if self._ended else "another weight's optimizer has stepped"
                self._refuse(f"{what}, and no torch optimizer holds this weight, so that an update would not be seen")
            self._owners = [weakref.ref(owner) for owner in owners]
        self._steps, self._ended = heard.steps, False

    def values(self, module: Any) -> Tensor:
        """The whole weight of a module whose weight is codes."""
        whole = module.whole_weight()
        return whole.values() if isinstance(whole, HeldWeight) else refuse_dense(whole)

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedConfig(
            f"is_first_microbatch=False uses cached codes, and the weight has changed since, or may have ({what}). "
            "Pass is_first_microbatch=True in the first microbatch of each step, octavo.microbatch(first=True) for a "
            "whole model, or call octavo.refresh_weights(model) after optimizer.step()."
        )


class State(NamedTuple):
    """Marks that change whenever a weight does."""

    version: int  # inference tensors have none
    address: int
    storage: Any  # a weak reference: while it is held, no other storage looks the same


def state_of(weight: Tensor) -> State:
    version = -1 if weight.is_inference() else weight._version
    if isinstance(weight, FakeTensor):
        return State(version, 0, None)
    return State(version, weight.data_ptr(), StorageWeakRef(weight.untyped_storage()))  # type: ignore[no-untyped-call]


def refuse_dense(weight: Tensor) -> NoReturn:
    raise UnsupportedConfig(
        "This layer's weight is held as codes, and it, or a part of it, was replaced by another of "
        f"{tuple(weight.shape)}, which forward would not read. Write into the held weight instead, "
        "weight.copy_(values); octavo.revert(model) goes back to dense weights."
    )
