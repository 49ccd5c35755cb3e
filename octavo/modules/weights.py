"""A cache of a weight's codes, in buffers of its module at fixed addresses.

It spares the microbatches of a step from quantizing the same weight again: it is refreshed in place, and remembers
which version of the weight it was made from. A weight of which nothing but codes is left is another thing
(`held.py`).

The buffers are not persistent (a checkpoint keeps weights, not codes of them), and codes are bytes, so that
`module.half()` leaves them alone.
"""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_pre_hook

from octavo.errors import UnsupportedConfig
from octavo.layers.linear_config import Parts
from octavo.modules.held import quantize_into
from octavo.quant.proto import TensorProto
from octavo.recipes import Recipe

SIDES = ("row", "column")
PARTS = ("codes", "scale", "level2")


NAMES = {side: tuple(f"weight_{side}_{part}" for part in PARTS) for side in SIDES}


class Codes:
    """What is known of the codes in a module's buffers. Holds no tensor: buffers may be moved or replaced."""

    def __init__(self) -> None:
        self.held = False  # whether the layer's weight is codes (`held.py`), and then there is nothing to cache
        self.recipe: Recipe | None = None  # that they were made by; None: there are none
        self._weights: list[weakref.ref[Tensor]] | None = None  # that they were made from,
        self._states: list[tuple[int, int]] = []  # and their versions and addresses then

    def __getstate__(self) -> dict[str, Any]:
        """A copy's weight is another tensor: its cache is cold."""
        return {**self.__dict__, "_weights": None, "_states": []}

    def parts(self, module: nn.Module, side: str) -> Parts:
        buffers = module._buffers
        return tuple(t for t in (buffers.get(name) for name in NAMES[side]) if t is not None)

    def has(self, module: nn.Module, side: str) -> bool:
        return module._buffers.get(NAMES[side][0]) is not None

    def drop(self, module: nn.Module) -> None:
        drop_buffers(module, [name for names in NAMES.values() for name in names])
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
    ) -> None:
        """Quantize `weight` into the module's buffers, making those that are missing. A column that is there stays in
        use. Without `scaling` a delayed recipe's scale is the weight's own. Where `skip`, on the device, is not zero,
        codes stay what they are."""
        with as_real_as(weight), torch.no_grad():
            if self.recipe != recipe:
                self.drop(module)
            config = module.LAYER.config(f"{module.NAME}(recipe={recipe.key})")
            self._reserve(module, config, weight, column)
            row, columns = self.parts(module, "row"), self.parts(module, "column")
            known = self._weights
            self._weights = None  # unknown until the cast is done
            key = f"{module.NAME}(recipe={recipe.key})"
            quantize_into(module.NAME, key, weight, row, columns, amaxes, scaling, skip)
        if skip is not None:  # who can tell whether they changed: what was known of them still is
            self._weights = known
            return
        own = module.weight_parts()
        self.recipe, self._weights, self._states = recipe, [weakref.ref(w) for w in own], [state_of(w) for w in own]

    def _reserve(self, module: Any, config: Any, weight: Tensor, column: bool) -> None:
        """The buffers that are missing."""
        row_proto, column_proto = module.LAYER.weight_protos(config, TensorProto.of(weight.detach()))
        for side, proto, wanted in (("row", row_proto, True), ("column", column_proto, column)):
            if proto is None or not wanted or self.has(module, side):
                continue
            with torch.inference_mode(False):  # made there, it must still serve training
                for name, tensor in zip(NAMES[side], proto.empty().tensors(), strict=False):
                    stored = tensor.view(torch.uint8) if name == NAMES[side][0] else tensor
                    module.register_buffer(name, stored, persistent=False)

    @property
    def is_cold(self) -> bool:
        """Whether it is not known what they were made from."""
        return self._weights is None

    def check_fresh(self, weights: Sequence[Tensor]) -> None:
        known: Sequence[weakref.ref[Tensor] | None] = self._weights or [None] * len(weights)
        for ref, then, weight in zip(known, self._states, weights, strict=True):
            now = state_of(weight)
            if ref is None or ref() is not weight:
                self._refuse("it is another tensor")
            if then != now:
                other = "it has another storage"
                self._refuse(f"from version {then[0]} to {now[0]}" if then[0] != now[0] else other)

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedConfig(
            f"is_first_microbatch=False uses cached codes of a weight that has changed since ({what}). Pass "
            "is_first_microbatch=True once a step, or call octavo.refresh_weights(model) after the optimizer's."
        )


def state_of(weight: Tensor) -> tuple[int, int]:
    """Version and address: what changes when the weight does. Inference tensors have no version."""
    elusive = isinstance(weight, FakeTensor)
    return (-1 if weight.is_inference() else weight._version), 0 if elusive else weight.data_ptr()


def refuse_shards(weights: Sequence[Tensor], what: str) -> None:
    """Outside of forward and backward FSDP leaves a part of the weight in each process."""
    if any([type(weight).__name__ == "DTensor" for weight in weights]):
        raise UnsupportedConfig(
            f"{what} needs the whole weight, and this process holds a shard of it (a DTensor). Leave it out where "
            "parameters are sharded."
        )


def as_real_as(weight: Tensor) -> AbstractContextManager[Any]:
    """State of a real layer is real, also where a fake mode watches, which would leave fakes behind in it."""
    return nullcontext() if isinstance(weight, FakeTensor) else unset_fake_temporarily()


def drop_buffers(module: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)
