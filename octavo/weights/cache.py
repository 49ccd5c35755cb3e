"""A cache of a weight's codes, in hidden buffers of its module at fixed addresses.

It spares the microbatches of a step from quantizing the same weight again: it is refreshed in place, and remembers
which version of the weight it was made from. A weight that was replaced by its codes has no cache
(`octavo.weights.quantized_weight`).

A checkpoint keeps weights, not codes of them.
"""

import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo._torch.cuda import is_capturing
from octavo._torch.fakes import as_real_as
from octavo.errors import UnsupportedConfig
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import ORIENTATIONS, Parts
from octavo.recipes import Recipe
from octavo.runtime.contract import WeightCast
from octavo.weights.code_memory import Kind, quantize_into, room_of
from octavo.weights.optimizer_hooks import heard, owner_of
from octavo.weights.quantized_weight import QuantizedWeight
from octavo.weights.weight_state import State, state_of

UPDATED = "an optimizer has stepped"
LOADED = "load_state_dict has written to it"
CAPTURED = "an optimizer's step was captured in a CUDA graph, and nothing tells of its replays"
_UNSEEN = "and no torch optimizer holds this weight, so that an update would not be seen"
_OTHERS = f"another weight's optimizer has stepped, {_UNSEEN}"
_ENDED = f"octavo.step ended a training step, {_UNSEEN}"

BUFFER_NAMES = {
    orientation: tuple(f"weight_{orientation}_{part}" for part in ("codes", "scale", "level2"))
    for orientation in ORIENTATIONS
}


# One lock for all caches: it is held for a cast alone, never where codes are read, and copies and files of a layer
# cannot hold one of its own.
_filling = threading.RLock()


class WeightCache:
    """Track the codes in a layer's buffers. It holds no tensor: buffers may be moved or replaced."""

    def __init__(self) -> None:
        # whether the layer's weight is a QuantizedWeight: there is nothing to cache then
        self.has_quantized_weight = False
        self.recipe: Recipe | None = None  # that made the codes; None: there are none
        # ids of the weights that they were made from. torch.utils.swap_tensors refuses a tensor with weak references; a
        # tensor that later gets the id of another has another storage, which the states tell
        self._weights: list[int] | None = None
        self._states: list[State] = []  # of these weights then
        # whether the last forward that may be recomputed was in an octavo.microbatch, and observed the weight's amax,
        self.ambient = ""  # "", "observed" or "unobserved"
        self.on_device = False  # and whether the device had the block's flag
        self.entry: object = None  # the microbatch block that they were made in: see octavo.recipes.ambient
        self.trained = False  # whether a forward has asked for the weight's gradient
        self._steps = 0  # of optimizers, when the codes were made or last checked
        self._ended = False  # whether a training step has ended since
        self._shape: tuple[int, ...] = ()  # of the whole weight
        self.fills = 0  # how often codes were made, for threads that wait to make the same ones
        self._filler = 0  # the thread that made them last
        self._observed = False  # whether it observed the weight's amax
        self._owners: list[weakref.ref[Any]] = []  # optimizers that were found to update the weights
        # a graph cannot read a version. It guards on these two, which Python outside of it writes:
        self.stale = ""  # why the codes that graphs read may be those of an older weight
        self.captured = ""  # why they are that after any refresh

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy. Its weight is another tensor, so its cache is cold."""
        cold: dict[str, Any] = {
            "_weights": None,
            "_states": [],
            "_owners": [],
            "entry": None,
            "captured": "",
            "_filler": 0,
        }
        return {**self.__dict__, **cold}

    def parts(self, module: Any, orientation: str) -> Parts:
        buffers = module._hidden._buffers
        codes, *scales = [buffers.get(name) for name in BUFFER_NAMES[orientation]]
        return () if codes is None else (codes, *[t for t in scales if t is not None])

    def has(self, module: Any, orientation: str) -> bool:
        return module._hidden._buffers.get(BUFFER_NAMES[orientation][0]) is not None

    def drop(self, module: Any) -> None:
        module._hidden.drop([name for names in BUFFER_NAMES.values() for name in names])
        self.recipe = self._weights = None

    def fill(
        self, module: Any, recipe: Recipe, column: bool, cast: WeightCast, repeated: bool, fills: int | None
    ) -> None:
        """Quantize a weight into the module's buffers, making those that are missing. A column that is there stays in
        use. Without its `scaling` a delayed recipe's scale is the weight's own. `repeated`: nothing tells that the
        weight has changed, so that a backward that needs the old codes may read the new ones. `fills`: how often codes
        were made when this call began; if another thread has made the same codes since, they are used."""
        with _filling:
            others = fills is not None and fills != self.fills and cast.skip is None
            if not (others and self._serves(module, recipe, column, cast.amaxes)):
                self._fill(module, recipe, column, cast, repeated)

    def _serves(self, module: Any, recipe: Recipe, column: bool, amaxes: Sequence[Tensor]) -> bool:
        """Return whether the codes that another thread has made meanwhile are those that this one is about to make."""
        observed = self._observed or not amaxes
        has_all = self.recipe == recipe and (not column or self.has(module, "column"))
        return self._filler != threading.get_ident() and observed and has_all and self.is_fresh(module._weight_parts())

    def _fill(self, module: Any, recipe: Recipe, column: bool, cast: WeightCast, repeated: bool) -> None:
        weight, parts, thread = cast.weight, module._weight_parts(), threading.get_ident()
        # another thread may be between a forward and its backward with these codes: they do not change
        repeated = repeated or (self._filler != thread and self.recipe == recipe and self.is_fresh(parts))
        with as_real_as(weight), torch.no_grad():
            if self.recipe != recipe or self._shape != weight.shape:
                self.drop(module)
            self._shape = weight.shape
            kind = Kind(module.NAME, recipe.key, tuple(weight.shape))
            described = module.LAYER.abstract_weight(kind.config, TensorProto.of(weight.detach()))
            made = {
                side: room_of(proto) for side, proto in zip(ORIENTATIONS, described, strict=True)
                if proto is not None and (column or side == "row") and not self.has(module, side)
            }  # fmt: skip
            row, columns = (made.get(side) or self.parts(module, side) for side in ORIENTATIONS)
            known = self._weights
            self._weights = None  # unknown until the cast is done
            with preserve_version_counter((*row, *columns)) if repeated else nullcontext():
                quantize_into(kind, cast._replace(row=row, column=columns))
            # a thread that finds the codes, which come last, finds their scales
            for orientation, parts_made in made.items():
                for name, tensor in reversed(list(zip(BUFFER_NAMES[orientation], parts_made, strict=False))):
                    module._hidden.put(name, tensor)
        if cast.skip is not None:  # the host cannot tell whether the codes changed: it keeps what it knew
            self._weights = known
            return
        if known != [id(w) for w in parts]:
            self._owners = []  # owners of other weights
        self.recipe, self._steps, self._ended = recipe, heard.steps, False
        self.captured = CAPTURED if heard.captures and any([state_of(w).place in heard.captured for w in parts]) else ""
        self.stale = self.captured
        self.fills, self._filler, self._observed = self.fills + 1, thread, len(cast.amaxes) > 0
        if not any([w.is_inference() for w in parts]):  # they have no version: their codes are never trusted
            self._states = [state_of(w) for w in parts]
            self._weights = [id(w) for w in parts]  # last: from here on other threads take the codes

    @property
    def is_cold(self) -> bool:
        """Whether it is unknown which weights the codes were made from."""
        return self._weights is None

    def is_fresh(self, weights: Sequence[Tensor]) -> bool:
        """Return whether nothing indicates that the weights have changed since the codes were made."""
        return (
            self._weights is not None and not self._ended and self._steps == heard.steps and not self.captured
            and self._weights == [id(weight) for weight in weights]
            and self._states == [state_of(weight) for weight in weights]
        )  # fmt: skip

    def check_fresh(self, weights: Sequence[Tensor]) -> None:
        known: Sequence[int | None] = self._weights or [None] * len(weights)
        for own_id, then, weight in zip(known, self._states, weights, strict=True):
            now = state_of(weight)
            if own_id != id(weight):
                self._refuse(f"it is another tensor{_gathered()}")
            if then != now:
                other = f"it has another storage{_gathered()}"
                self._refuse(f"from version {then[0]} to {now[0]}" if then[0] != now[0] else other)
        if self.captured and not is_capturing():
            self._refuse(self.captured)
        if self._ended or self._steps != heard.steps:
            if not self.is_heard(weights, search=True):
                self._refuse(_ENDED if self._ended else _OTHERS)
            self._steps, self._ended = heard.steps, False

    def check_filled(self, weights: Sequence[Tensor]) -> None:
        """Refuse stale codes as `check_fresh` does, once no other thread is making new ones."""
        try:
            self.check_fresh(weights)
        except UnsupportedConfig:
            with _filling:
                self.check_fresh(weights)

    def check_stale(self, module: Any) -> bool:
        """Refuse codes that a graph is about to read, if Python outside of it has noted that they are stale."""
        if self.stale in (_OTHERS, _ENDED) and self.is_heard(module._weight_parts(), search=True):
            self.stale = ""
        if self.stale:
            self._refuse(self.stale)
        return True

    def note_step(self, module: Any, written: set[int], capturing: bool) -> None:
        """Note that a torch optimizer steps, which writes to the parameters with these ids."""
        if self.recipe is None or module._parametrized_weights():
            return
        weights = module._weight_parts()
        if any([id(weight) in written for weight in weights]):
            self.captured = CAPTURED if capturing else self.captured
            self.stale = self.captured or UPDATED
        else:
            self._note_unheard(weights, _OTHERS)

    def note_load(self) -> None:
        """Note that weights were loaded, where there are codes of them."""
        self.stale = self.captured or (LOADED if self.recipe is not None else "")

    def end_step(self, module: Any) -> None:
        """Note that a training step has ended: weights that torch's optimizers do not update may have changed
        unseen."""
        self._ended = True
        if not torch.compiler.is_compiling() and self.recipe is not None and not module._parametrized_weights():
            self._note_unheard(module._weight_parts(), _ENDED)

    def _note_unheard(self, weights: Sequence[Tensor], why: str) -> None:
        if not self.stale and not self.is_heard(weights):
            self.stale = why

    def is_heard(self, weights: Sequence[Tensor], search: bool = False) -> bool:
        """Return whether torch optimizers hold all weights that are trained. Versions tell of their updates; anything
        else, such as an optimizer of copies or of shards, may write to a weight unseen. `search`: look for optimizers
        that have not stepped yet, which is slow."""
        trained = [w for w in weights if w.requires_grad and (self.trained or w.grad is not None)]
        if len(self._owners) < len(trained) or any([ref() is None for ref in self._owners]):
            owners = [owner_of(weight, search) for weight in trained]
            if None in owners:
                return False
            self._owners = [weakref.ref(owner) for owner in owners]
        return True

    def values(self, module: Any) -> Tensor:
        """Return the whole weight of a module whose weight is codes."""
        whole = module._whole_weight()
        return whole.values() if isinstance(whole, QuantizedWeight) else refuse_dense(whole)

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedConfig(
            f"is_first_microbatch=False uses cached codes, and the weight has changed since, or may have ({what}). "
            "Pass is_first_microbatch=True in the first microbatch of each step, octavo.microbatch(first=True) for a "
            "whole model, or call octavo.refresh_weights(model) after optimizer.step()."
        )


def _gathered() -> str:
    """Return the usual reason why a weight is another tensor where there are several processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ""
    return (
        "; a weight that FSDP shards is gathered anew for each forward: leave octavo.microbatch and "
        "is_first_microbatch out there"
    )


def refuse_dense(weight: Tensor) -> NoReturn:
    raise UnsupportedConfig(
        "This layer's weight is stored as codes, and it, or a part of it, was replaced by another of "
        f"{tuple(weight.shape)}, which forward would not read. Write into the quantized weight instead, "
        "weight.copy_(values); octavo.revert(model) goes back to dense weights."
    )
